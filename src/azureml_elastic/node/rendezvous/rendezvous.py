"""The rendezvous of one node: what carries out its decisions on the way into a round, and at the end of it.

:class:`Rendezvous` has objects that each own one piece of I/O. :mod:`~azureml_elastic.node.core` decides. One thread,
the agent's, calls it; other threads only post to that one's queue.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import NodeLeaving, RunFailed, RunSucceeded, TableUnavailable
from azureml_elastic.ipc import Peer
from azureml_elastic.ledger import events
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Roster, RoundSeen
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.joining import greeting_of, is_landmark
from azureml_elastic.node.core.messages import Done, Report, RoundChanged
from azureml_elastic.node.core.node import Node, Part
from azureml_elastic.node.core.round import Limits, Member, Round, is_same_round, reopened
from azureml_elastic.node.core.training import Training
from azureml_elastic.node.driver import Driver, EventQueue, Received
from azureml_elastic.node.host.addresses import Ports, format_address, listening_address
from azureml_elastic.node.rendezvous.context import Context, LocalNode, Runtime, Surroundings
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import AgentMessage, Assignment, FromLink, HubWatch, Membership
from azureml_elastic.node.rendezvous.probing import DataPort, PeerProber
from azureml_elastic.node.rendezvous.reachability import Reachability, UnreachablePair, is_unreachable, query_members
from azureml_elastic.node.rendezvous.round_end import RoundEnd
from azureml_elastic.node.rendezvous.rows import RowLook, Rows, RunKey
from azureml_elastic.node.rendezvous.table_heartbeat import LookRequest, TableHeartbeat
from azureml_elastic.node.table import Table

_LOG = logging.getLogger(__name__)

_RETRY_TIMEOUT_SECONDS = 1.2
"""Time to connect in a further attempt to enter a round: enough for TCP's second one."""

_DECLINE_SECONDS = 1.0
"""Time in which a node that leaves connects to rank 0's hub to send it that it does not enter its round."""

_MAX_REASONS = 2
"""Largest number of unreachable members that are named as the reason why a round ends."""

_FEW_NODES = 64
"""Largest round whose nodes all get the run's key before they are ready to join; in a larger one the landmarks do."""


@dataclass(frozen=True)
class _Looked:
    """In the queue: what a look at the round's row has found while this round ran, ``None`` for no answer."""

    round: Round
    look: RowLook | None


class Rendezvous:
    """One node's part in the run: a :class:`~azureml_elastic.node.driver.Port` for a node without an agent.

    Args:
        runtime: clock, threads and sockets; by default those of this machine.
        queue: queue of the agent's thread; ``None`` for a new one.

    Attributes:
        machine: what decides.
        newest: newest version of the round that this node knows.
        queue: what other threads have for the agent's.
        authenticator: this node's part in the handshakes with other nodes.
        membership: the round joined last, and the connection to its rank 0.
        round_end: reopens the round, or closes the run.

    Raises:
        UsageError: all these ports are taken.
    """

    def __init__(
        self,
        table: Table,
        node: LocalNode,
        limits: Limits,
        timings: RendezvousTimings,
        surroundings: Surroundings | None = None,
        runtime: Runtime | None = None,
        queue: EventQueue | None = None,
    ) -> None:
        # Each object gets only objects that were made before it.
        self.node = node.name
        self.incarnation = node.incarnation
        self._interface = listening_address(node.host)
        runtime = runtime or Runtime(Ports(node.ports))
        self._context = context = Context(
            limits, timings, runtime, Peer(node.name, node.incarnation), surroundings, queue
        )
        self._surroundings = context.surroundings
        self.queue = context.queue
        self.newest = context.latest
        self.authenticator = context.authenticator
        # A thousand nodes may connect at once. The kernel drops what its queue does not hold, and TCP tries again only
        # after a second.
        hub_listener = runtime.listen(self._interface, 4096)
        probes = node.ports is not None and node.probes_other_ports
        self._data_port = DataPort(context, self._interface) if probes else None
        me = Member(
            node.name,
            node.incarnation,
            host=node.host,
            hub_port=hub_listener.getsockname()[1],
            slots=node.slots,
            host_id=node.host_id,
            data_port=self._data_port.number if self._data_port is not None else 0,
        )
        self.machine = machine = Node(me, limits, timings, context.latest)
        self.membership = membership = Membership(context, machine)
        self._reachability = reach = Reachability(
            node.name, node.host, context.clock, node.ports, self._report_unreachable
        )
        self._prober = PeerProber(context, reach, membership, machine)
        key = RunKey(table, context.clock, context.authenticator, node.program)
        self._rows = rows = Rows(table, self._sleep, context.latest, key)
        self.hub = hub = Hub(context, hub_listener, membership)
        self._listener: socket.socket | None = None
        self._heartbeat = TableHeartbeat(context, table, hub)
        self._watch = HubWatch(context, reach)
        self.round_end = RoundEnd(context, membership, machine, rows, hub, self._watch, reach)
        self._driver = Driver(machine, self)

    # --- joining -----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Write this node's row before its slow imports, so that the first round can wait for it.

        Raises:
            UsageError: the run has another program.
        """
        if not self._is_one_of_many:
            # Others meet at this node's hub before it is ready to join. They must not wait for a node that is refused.
            self._rows.read_run_key(defer=False)
        self._rows.write_member(replace(self.machine.me, state="starting"))

    def join(self) -> Assignment:
        """Wait for the next round in which this node is a member, and enter it.

        Returns:
            The assignment. On rank 0 the caller must start serving the store on its ``listener`` at once.

        Raises:
            RunSucceeded: the run has succeeded; nothing is left to do.
            RunFailed: the run has failed, with this message.
            NodeLeaving: this node must leave.
            TableForbidden, TableNotFound: the table cannot be used.
            UsageError: the run has another program.
        """
        self.status()
        self._driver.begin()
        woken = False
        while True:
            self._driver.turn(woken=woken)
            if self.machine.part is Part.MEMBER:
                return self.membership.assignment
            woken = self.wait(self._driver.deadline - self.clock())

    def status(self) -> RoundSeen:
        """Return what is known of the round, for a node without an agent."""
        return self._driver.status()

    # --- what the driver asks ----------------------------------------------------------------------------------------

    def clock(self) -> float:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return self._context.clock()

    def must_leave(self) -> bool:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return self._surroundings.must_leave()

    def receive(self) -> Received:
        """See :class:`~azureml_elastic.node.driver.Port`. What came on earlier connections is dropped."""
        leader, watched, messages, rows, must_look = [], [], [], [], False
        for posted in self.queue.take():
            match posted:
                case FromLink(link, event) if self.membership.connected and link is self.membership.link:
                    leader.append(event)
                case FromLink(link, event) if link is self._watch.link:
                    watched.append(event)
                    if isinstance(event, ev.LinkEnded):
                        self._watch.close()
                case AgentMessage(number, message):
                    messages.append((number, message))
                case _Looked():
                    rows.append(self._row_seen(posted))
                case LookRequest():
                    must_look = True
        return Received(leader, watched, messages, rows, must_look)

    def view(self) -> HubView:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return self.hub.view() if self.machine.leads else HubView()

    def woken(self) -> ev.Woken:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return ev.Woken(self.hub.should_seal(), self.hub.take_read_request())

    def marked(self, me: Member) -> Member:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return self._reachability.marked(me)

    def readiness(self) -> ev.ReadinessSeen:
        """See :class:`~azureml_elastic.node.driver.Port`. Another agent has the workers."""
        return ev.ReadinessSeen()

    def workers(self) -> tuple[Sequence[ev.WorkerVoted], ev.WorkersSeen]:
        """See :class:`~azureml_elastic.node.driver.Port`. Another agent has them."""
        return (), ev.WorkersSeen()

    def own_events(self, training: Training, workers: ev.WorkersSeen) -> Sequence[ev.TrainingEvent]:  # noqa: ARG002
        """See :class:`~azureml_elastic.node.driver.Port`."""
        return ()

    def wait(self, seconds: float) -> bool:
        """Wait until there may be something to do, at most for this time; return whether there may be.

        Raises:
            NodeLeaving: this node is in no round, and must leave.
        """
        woken = self.queue.wait(seconds)
        if self._surroundings.must_leave():
            raise NodeLeaving("the node is leaving the run")
        return woken

    def _sleep(self, seconds: float) -> None:
        """Sleep for this time, even if woken; raises as :meth:`wait` does."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self.wait(left)

    # --- what the driver has done ------------------------------------------------------------------------------------

    def perform(self, action: do.Action) -> ev.NodeEvent | None:
        """See :class:`~azureml_elastic.node.driver.Port`.

        Raises:
            RunSucceeded, RunFailed: the run has ended.
            NodeLeaving: this node must leave.
            TableForbidden, TableNotFound: the table cannot be used.
            UsageError: the run has another program.
        """
        match action:
            case do.Reopen() | do.Close():
                return self._change_row(action)
            case do.LeaveRound():
                self.membership.leave()
            case do.FindRound(before):
                return self._find_round(before)
            case do.LookAtRow(round_):
                self._context.runtime.thread(partial(self._look, round_), "look at the round").start()
            case do.LeaveRun():
                raise NodeLeaving("the node is leaving the run")
            case do.ToLeader() | do.ToMembers() | do.ReportDone() | do.Disconnect() | do.AwaitEnd():
                self._send(action)
            case _ if isinstance(action, do.RendezvousCall):
                return self._call(action) or ev.Abandoned()
            case _ if isinstance(action, do.JoinStep):
                self._perform(action)
        return None

    def _send(self, action: do.Sending) -> None:
        match action:
            case do.ToLeader(body):
                self.membership.send_to_leader(Report(body))
            case do.ToMembers(body):
                self.hub.broadcast(body)
            case do.ReportDone():
                self.membership.send_to_leader(Done())
            case do.Disconnect():
                self.membership.disconnect()
            case do.AwaitEnd():
                self.round_end.await_other(action)

    def _change_row(self, action: do.RowAction) -> ev.EndWritten:
        if isinstance(action, do.Close):
            mine = self.round_end.write(action) is not None
            if mine:
                self._record(events.RunEnded, succeeded=action.succeeded, message=action.message)
            return ev.EndWritten(mine)
        written = self.round_end.write(action)
        if written is None:
            return ev.EndWritten(mine=False)
        self._record(events.RoundReopened, reason=action.reason, lost=tuple(sorted(action.lost)))
        if written.closed:  # it was one failed round too many
            self._record(events.RunEnded, succeeded=False, message=written.message)
        return ev.EndWritten(True, self.round_end.left_in_order(action.lost))

    def _record(self, kind: type[Any], **fields: Any) -> None:
        self._surroundings.record(kind, self.machine.last_round, **fields)

    def _find_round(self, before: Round | None) -> ev.Started:
        """Read the current round and other nodes, without a read where the round was received."""
        rows = self._rows
        round_: Round
        known: Mapping[str, Member] | Roster
        if before is None:
            round_, known = rows.read_some(self.node)
        else:
            round_ = self.newest.after(before) or rows.read_round()
            known = {member.node: member for member in before.members}
        rows.read_run_key(defer=self._is_one_of_many)
        return ev.Started(round_, known, rows.has_left)

    def _look(self, round_: Round) -> None:
        """Read the round's row, on a thread: a member must see notices and votes while the table does not answer."""
        look: RowLook | None = None
        try:
            with contextlib.suppress(TableUnavailable):
                look = self._rows.look()
        finally:  # whatever happens, so that it is looked at again
            self.queue.post(_Looked(round_, look), wake=look is not None)

    def _row_seen(self, looked: _Looked) -> ev.RowSeen:
        """Take in a row that was read on a thread.

        Raises:
            UsageError: the table holds the key of another program's run.
        """
        round_, look = looked.round, looked.look
        if look is None or self.machine.round is not round_:  # what is older must not replace what was read since
            return ev.RowSeen(round_, None)
        try:
            return ev.RowSeen(round_, not is_same_round(self._rows.observe(look), round_))
        except TableUnavailable:
            return ev.RowSeen(round_, None)

    def _call(self, call: do.RendezvousCall) -> ev.JoinEvent | None:
        """Perform a call; return its answer, ``None`` where it was abandoned for a newer version of the round."""
        match call:
            case do.PrepareRow():
                return ev.RowPrepared(self._prepare(call), self._rows.has_written(call.round))
            case do.Connect():
                failure = self._watch.connect(call.to, call.greeting, call.purpose)
                if failure is None:
                    return ev.Connected()
                return ev.ConnectFailed(
                    isinstance(failure, ConnectionRefusedError), self._reachability.marked(self._me)
                )
            case do.TakeCandidates():
                return ev.CandidatesTaken(self.hub.candidates())
            case do.Enter():
                return self._enter(call, self._me)
            case do.ReachMembers():
                return self._reach_members(call.round)
            case do.QueryMembers():
                return ev.MembersAnswered(query_members(self._context, call.round, self.node))
            case do.ReadHeartbeat():
                return ev.HeartbeatRead(*self._heartbeat.look())
        return self._rows.perform(call)

    def _perform(self, action: do.JoinStep) -> None:
        match action:
            case do.Offer():
                self.hub.add_own_candidacy(action.round, action.me)
            case do.Greet():
                self._watch.send(action.greeting)
            case do.EndWatch():
                self._watch.close()
            case do.Forward():
                self.hub.publish(action.round)
                if action.to_hub:
                    self._watch.send(RoundChanged(action.round))
            case do.NudgeHeartbeat():
                self._heartbeat.nudge()
            case do.Warn():
                _LOG.warning("%s", action.text)
            case do.NoRoom():
                _LOG.warning(
                    "Round %d makes no room for %s, which %s cannot reach. %s",
                    action.round.number,
                    self.node,
                    ", ".join(action.unreachable_from),
                    self._reachability.advice,
                )
            case do.Take():
                self._rows.persistent = True
                self._watch.close()  # only now, so that the messages sent there have arrived
                if self.membership.assignment.listener is None:
                    self._close_listener()
                self._listener = None
            case do.Finish():
                raise self._end_of(action.round)

    def _enter(self, call: do.Enter, me: Member) -> ev.JoinEvent:
        round_, first = call.round, call.round.members[0]
        assert self._listener is not None
        # Rank 0 serves the round before it connects to itself: the others may be there already.
        if call.rank:
            self._heartbeat.stop()
        else:
            self.hub.enter(round_)
            self._heartbeat.start(round_.number)
        try:
            self.membership.enter(round_, call.rank, self._listener, _RETRY_TIMEOUT_SECONDS if call.again else None)
        except OSError as error:
            if not is_unreachable(error):
                _LOG.warning("Rank 0's node %s of round %d cannot be reached: %s", first.node, round_.number, error)
                where = format_address(first.host, first.hub_port)
                return ev.EntryFailed(f"{self.node} cannot reach {first.node} at {where}: {error}", False, me)
            if call.again:
                return ev.EntryFailed("", True, me)
            purpose, seconds = f"rank 0 of round {round_.number}", self._context.silence.timeout
            reason = str(self._reachability.failed(first, purpose, error, seconds))
            return ev.EntryFailed(reason, True, self._reachability.marked(me))
        self._reachability.reached(first.incarnation, "hub")
        return ev.Entered(self.membership.link.refused)

    def _reach_members(self, round_: Round) -> ev.JoinEvent:
        """Connect to what workers will connect to."""
        texts = self._prober.reach(round_, self.machine.rank, lambda: self.status().broken)
        if texts is not None and not texts:
            return ev.MembersReached()
        seen = self.status()
        return ev.MemberUnreachable("; ".join((texts or [f"lost {', '.join(sorted(seen.lost))}"])[:_MAX_REASONS]), seen)

    @property
    def _me(self) -> Member:
        """The row with which this node wants to be in a round."""
        joiner = self.machine.joiner
        return self.machine.me if joiner is None else joiner.me

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _end_of(self, round_: Round) -> RunSucceeded | RunFailed:
        """Return how the run ended, once it is known that it is a run of this node's program.

        Raises:
            UsageError: the run has another program.
        """
        self._rows.read_run_key(defer=False)
        if round_.state == "succeeded":
            return RunSucceeded(f"The run ended well in round {round_.number}.")
        return RunFailed(round_.message or "The run failed.", round_.exit_code or 1)

    @property
    def _is_one_of_many(self) -> bool:
        return self._context.limits.maximum > _FEW_NODES and not is_landmark(self.node)

    def _prepare(self, call: do.PrepareRow) -> Member:
        """Return the row with which this node wants to be in an open round."""
        # Listening before the seal: those that connect as soon as they read it wait instead of being refused.
        if self._listener is None:
            self._listener = self._context.runtime.listen(self._interface, 2048)
        strikes = self._surroundings.live_strikes(fresh=call.was_lost)
        quarantine = self._context.limits.quarantine
        if quarantine is not None and strikes >= quarantine:
            host_id = self.machine.me.host_id
            self._surroundings.record(events.HostQuarantined, self.machine.last_round, host=host_id, strikes=strikes)
        me = replace(self.machine.me, strikes=strikes)
        if call.reaches_again:
            self._prober.forget()
        port = self._listener.getsockname()[1]
        return self._reachability.marked(replace(me, round=call.round.number, store_port=port))

    # --- being a member ----------------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Write that this node will not return. Never raises, since a node that leaves cannot handle errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(replace(self.machine.me, state="left", reason=reason))
            self._decline(reason)

    def _decline(self, reason: str) -> None:
        """Reopen a round that was sealed with this node while it was leaving: the others would wait for it."""
        round_ = self._rows.observe(self._rows.look())
        is_member = round_.rank_of(self.node, self.incarnation) is not None
        if round_.state != "sealed" or not is_member or round_.number <= self.machine.last_round:
            return
        next_ = reopened(round_, f"{self.node} has left before it could enter: {reason}", lost=[self.node])
        if self._rows.end_round(round_.number, next_):
            self.hub.publish(next_)
            first, me = round_.members[0], self.machine.me
            purpose = "rank 0 of the round that ends"
            if self._watch.connect(first, greeting_of(me, round_), purpose, _DECLINE_SECONDS) is None:
                self._watch.send(RoundChanged(next_))
            self._watch.close()

    def shutdown(self) -> None:
        """Close the hub and the connections."""
        self._prober.close()
        self._watch.close()
        self._close_listener()
        self.membership.leave()
        self._heartbeat.stop()
        self.hub.close()
        if self._data_port is not None:
            self._data_port.close()

    def _report_unreachable(self, pair: UnreachablePair) -> None:
        """Record a pair. Thread-safe."""
        fields = {"host": pair.host, "peer": pair.peer, "address": pair.address, "purpose": pair.purpose}
        self._surroundings.record(events.Unreachable, self.machine.last_round, **fields, error=pair.error)
        self._prober.watch()
