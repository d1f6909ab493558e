"""The rendezvous of one node: it joins a round, is a member of it, and ends it, again and again until the run ends.

:class:`Rendezvous` drives objects that each own one piece of I/O. :mod:`~azureml_elastic.node.core` decides. One
thread, the agent's, calls it; other threads only wake that one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import RunFailed, RunSucceeded
from azureml_elastic.ipc import Peer
from azureml_elastic.ledger import events
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Roster, RoundSeen
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.joiner import Joiner, JoinState
from azureml_elastic.node.core.joining import greeting_of, is_landmark
from azureml_elastic.node.core.messages import RoundChanged, Unreachable
from azureml_elastic.node.core.round import Limits, Member, Round, reopened
from azureml_elastic.node.host.addresses import Ports, format_address, listening_address
from azureml_elastic.node.rendezvous.context import STORE_SECONDS, Context, LocalNode, Runtime, Surroundings
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import Assignment, HubWatch, Membership
from azureml_elastic.node.rendezvous.probing import DataPort, PeerProber, Sleeper
from azureml_elastic.node.rendezvous.reachability import Reachability, UnreachablePair, is_unreachable, query_members
from azureml_elastic.node.rendezvous.round_end import RoundEnd
from azureml_elastic.node.rendezvous.rows import Rows, RunKey
from azureml_elastic.node.rendezvous.table_heartbeat import RoundLook, TableHeartbeat
from azureml_elastic.node.table import Table

_LOG = logging.getLogger(__name__)

_RETRY_TIMEOUT_SECONDS = 1.2
"""Time to connect in a further attempt to enter a round: enough for TCP's second one."""

_DECLINE_SECONDS = 1.0
"""Time in which a node that leaves connects to rank 0's hub to send it that it does not enter its round."""

_FEW_NODES = 64
"""Largest round whose nodes all get the run's key before they are ready to join; in a larger one the landmarks do."""


class Rendezvous:
    """One node's part in the run.

    Args:
        runtime: clock, threads and sockets; by default those of this machine.
        wake: event to set when there is something to do; ``None`` for a new one.

    Attributes:
        wake: event that is set when the agent should look at :meth:`status` and at the inbox.
        inbox: messages of other agents for the agent's thread.
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
        wake: threading.Event | None = None,
    ) -> None:
        # Each object gets only objects that were made before it.
        self.node = node.name
        self.incarnation = node.incarnation
        self._interface = listening_address(node.host)
        runtime = runtime or Runtime(Ports(node.ports))
        self._context = context = Context(
            limits, timings, runtime, Peer(node.name, node.incarnation), surroundings, wake
        )
        self._surroundings = context.surroundings
        self.wake = context.wake
        self.inbox = context.inbox
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
        self.membership = membership = Membership(context, me)
        self._reachability = reach = Reachability(
            node.name, node.host, context.clock, node.ports, self._report_unreachable
        )
        self._prober = PeerProber(context, reach, membership)
        self._sleeper = Sleeper(context, self._prober)
        key = RunKey(table, context.clock, context.authenticator, node.program)
        self._rows = rows = Rows(table, self._sleeper.sleep, context.latest, key)
        self.hub = hub = Hub(context, hub_listener, membership)
        self._look = RoundLook(context, rows)
        self._has_woken = False
        self._listener: socket.socket | None = None
        self._events: deque[ev.JoinEvent] = deque()
        self._heartbeat = TableHeartbeat(context, table, hub, self._look)
        self._watch = HubWatch(context, reach)
        self.round_end = RoundEnd(context, membership, rows, hub, self._watch, reach)

    # --- joining -----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Write this node's row before its slow imports, so that the first round can wait for it.

        Raises:
            UsageError: the run has another program.
        """
        if not self._is_one_of_many:
            # Others meet at this node's hub before it is ready to join. They must not wait for a node that is refused.
            self._rows.read_run_key(defer=False)
        self._rows.write_member(replace(self.membership.me, state="starting"))

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
        if self.membership.last_round:
            # Before the disconnection, by which the others would take this node for lost and go on without it.
            self.round_end.reopen(do.Reopen(f"{self.node} has left the round", lost=self.status().lost))
        self.membership.leave()
        try:
            round_, known = self._first_read()
            self._rows.read_run_key(defer=self._is_one_of_many)
            self._drive(ev.Started(round_, known))
            self._rows.persistent = True
            assignment = self.membership.assignment
            self._prober.begin(assignment)
            if assignment.listener is not None:
                self._listener = None
            return assignment
        finally:
            self._watch.close()  # only now, so that the messages sent there have arrived
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def _drive(self, event: ev.JoinEvent) -> None:
        """Bring events to a :class:`Joiner` and perform its actions, until this node has its place in a round."""
        me, limits, timings = self.membership.me, self._context.limits, self._context.timings
        last_round, has_left = self.membership.last_round, self._rows.has_left
        joiner = Joiner(me, limits, timings, last_round=last_round, has_left=has_left)
        answer: ev.JoinEvent | None = event
        while joiner.state is not JoinState.IN:
            actions = joiner.handle(answer or self._next_event(joiner), self._context.clock())
            answer = None
            for action in actions:
                if not isinstance(action, do.Call):
                    self._perform(action)
                # A call takes up to seconds, and one for a version that has passed would be for nothing.
                elif self._context.latest.after(joiner.round) is None:
                    answer = self._call(action, joiner.me)

    def _next_event(self, joiner: Joiner) -> ev.JoinEvent:
        """Wait for what happens next.

        Raises:
            NodeLeaving: this node must leave.
        """
        context = self._context
        while True:
            self._collect()
            if self._events:
                return self._events.popleft()
            if (newer := context.latest.after(joiner.round)) is not None:
                return ev.NewerRound(newer)
            if (marked := self._reachability.marked(joiner.me)) != joiner.me:
                return ev.MarksChanged(marked)
            if self._has_woken:
                self._has_woken = False
                return ev.Woken(self.hub.should_seal(), self.hub.take_read_request())
            left = joiner.deadline - context.clock()
            if left <= 0:
                return ev.TimerFired()
            self._has_woken = self._sleeper.wait(left)

    def _call(self, call: do.Call, me: Member) -> ev.JoinEvent | None:
        """Perform a call; return its answer, ``None`` where it was abandoned for a newer version of the round."""
        match call:
            case do.PrepareRow():
                return ev.RowPrepared(self._prepare(call.round), self._rows.has_written(call.round))
            case do.Connect():
                failure = self._watch.connect(call.to, call.greeting, call.purpose, call.timeout)
                if failure is None:
                    return ev.Connected()
                return ev.ConnectFailed(isinstance(failure, ConnectionRefusedError), self._reachability.marked(me))
            case do.TakeCandidates():
                return ev.CandidatesTaken(self.hub.candidates())
            case do.Enter():
                return self._enter(call, me)
            case do.ReachStore():
                return self._reach_store(call.round)
            case do.QueryMembers():
                return ev.MembersAnswered(query_members(self._context, call.round, self.node))
            case do.ReadHeartbeat():
                return ev.HeartbeatRead(*self._heartbeat.look())
            case do.Reopen():
                self.round_end.reopen(call)
                return ev.Reopened()
            case do.GetReady():
                return ev.GotReady(self._surroundings.get_ready())
        return self._rows.perform(call)

    def _perform(self, action: do.JoinAction) -> None:
        match action:
            case do.Offer():
                self.hub.add_own_candidacy(action.round, action.me)
                self._has_woken = True
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

    def _reach_store(self, round_: Round) -> ev.JoinEvent:
        """Connect to the port of a round's store, which another node serves."""
        first = round_.members[0]
        error = self._context.runtime.reach((first.host, first.store_port), lambda: self.status().broken)
        if error is None:
            return ev.StoreReached()
        seen, port = self.status(), first.store_port
        if seen.broken:
            return ev.StoreUnreachable("the round's store cannot be reached", seen)
        reason = f"{self.node} cannot reach the store of {first.node} at {format_address(first.host, port)}: {error}"
        if is_unreachable(error):
            purpose = f"the store of round {round_.number}"
            pair = self._reachability.failed(first, purpose, error, STORE_SECONDS, target="store", port=port)
            reason = str(pair)
        return ev.StoreUnreachable(reason, seen)

    def _collect(self) -> None:
        """Take what hubs have sent on connections that this node still has."""
        received = self._context.received
        while received:
            link, event = received.popleft()
            # What came on earlier connections is of rounds that are over, and is dropped.
            if self.membership.connected and link is self.membership.link:
                self.membership.reports.take(event)
            elif link is self._watch.link:
                self._events.append(event)
                if isinstance(event, ev.LinkEnded):
                    self._watch.close()

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to do, at most for this time, while this node is in no round.

        Raises:
            NodeLeaving: this node must leave.
        """
        self._sleeper.wait(seconds)

    def read_round(self) -> Round:
        """Read the current round, for a node that has not joined yet: no node waits for it after the first seal."""
        return self._rows.read_round()

    def given_up(self) -> bool:
        """Read whether the others have gone on without this node, so that it returns as a new one.

        Raises:
            RunSucceeded, RunFailed: the run has ended.
        """
        round_ = self._rows.read_round()
        if round_.closed:
            raise self._end_of(round_)
        return round_.number > self.membership.last_round > 0 and self.node not in round_.previous

    def is_left_out(self) -> bool:
        """Return the same as :meth:`given_up` right after this node's round, without a read where its end is known.

        Raises:
            RunSucceeded, RunFailed: the run has ended.
        """
        newer = self._context.latest.after(self.membership.assignment.round) if self.membership.last_round else None
        return self.given_up() if newer is None or newer.closed else self.node not in newer.previous

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

    def _first_read(self) -> tuple[Round, Mapping[str, Member] | Roster]:
        """Return the current round and other nodes, without a read where the round was received."""
        if not self.membership.last_round:
            return self._rows.read_some(self.node)
        before = self.membership.assignment.round
        return self._context.latest.after(before) or self._rows.read_round(), {
            member.node: member for member in before.members
        }

    def _prepare(self, round_: Round) -> Member:
        """Return the row with which this node wants to be in an open round."""
        # Listening before the seal: those that connect as soon as they read it wait instead of being refused.
        if self._listener is None:
            self._listener = self._context.runtime.listen(self._interface, 2048)
        # A former member that is not a survivor was lost to the others, which may have written strikes against it.
        was_member = self.membership.last_round > 0
        strikes = self._surroundings.live_strikes(fresh=was_member and self.node not in round_.previous)
        quarantine = self._context.limits.quarantine
        if quarantine is not None and strikes >= quarantine:
            host_id = self.membership.me.host_id
            self._surroundings.record(events.HostQuarantined, self.membership.last_round, host=host_id, strikes=strikes)
        self.membership.me = me = replace(self.membership.me, strikes=strikes)
        failures_before = self.membership.assignment.round.failures if was_member else ()
        self._reachability.suspect_workers = round_.failed_rounds > 0 or len(round_.failures) > len(failures_before)
        return self._reachability.marked(replace(me, round=round_.number, store_port=self._listener.getsockname()[1]))

    # --- being a member ----------------------------------------------------------------------------------------------

    def status(self) -> RoundSeen:
        """Return the state of the round; reads the table only where a hub has sent that the row has changed."""
        self._prober.tick()
        membership = self.membership
        if not membership.connected:
            return RoundSeen()
        self._collect()
        reports, round_ = membership.reports, membership.assignment.round
        view = self.hub.view() if membership.leads else HubView()
        was_given_up = view.was_given_up or reports.was_given_up
        # Once over it stays so, although the row that has shown it is not looked at again.
        membership.over = membership.over or was_given_up or reports.broken or self._has_changed(round_)
        context = self._context
        debounce, now = context.timings.rescale_debounce.total_seconds(), context.clock()
        known = {"over": membership.over, "ended": context.latest.after(round_) is not None}
        return reports.see(round_, self.node, view, **known, limits=context.limits, debounce=debounce, now=now)

    def take_unreachable_pair(self) -> UnreachablePair | None:
        """Return an unreachable member to which only workers connect, if there is one, because of which the round ends.

        The two nodes are not members of one round again until they reach each other.
        """
        return self._reachability.confirm({member.incarnation for member in self.membership.assignment.round.members})

    def leave(self, reason: str) -> None:
        """Write that this node will not return. Never raises, since a node that leaves cannot handle errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(replace(self.membership.me, state="left", reason=reason))
            self._decline(reason)

    def _decline(self, reason: str) -> None:
        """Reopen a round that was sealed with this node while it was leaving: the others would wait for it."""
        round_ = self._rows.observe(self._rows.look())
        is_member = round_.rank_of(self.node, self.incarnation) is not None
        if round_.state != "sealed" or not is_member or round_.number <= self.membership.last_round:
            return
        next_ = reopened(round_, f"{self.node} has left before it could enter: {reason}", lost=[self.node])
        if self._rows.end_round(round_.number, next_):
            self.hub.publish(next_)
            first, me = round_.members[0], self.membership.me
            purpose = "rank 0 of the round that ends"
            if self._watch.connect(first, greeting_of(me, round_), purpose, _DECLINE_SECONDS) is None:
                self._watch.send(RoundChanged(next_))
            self._watch.close()

    def shutdown(self) -> None:
        """Close the hub and the connections."""
        self.membership.leave()
        self._heartbeat.stop()
        self.hub.close()
        if self._data_port is not None:
            self._data_port.close()

    def _has_changed(self, round_: Round) -> bool:
        """Return whether a newer version of the round is known; looks at the row where a hub has sent to do so."""
        if self._context.latest.after(round_) is not None:
            return True
        if self.membership.reports.take_read_request():
            self._look.request()
        return self._look.has_changed(round_)

    def _report_unreachable(self, pair: UnreachablePair) -> None:
        """Record a pair and report it to rank 0's node. Thread-safe."""
        fields = {"host": pair.host, "peer": pair.peer, "address": pair.address, "purpose": pair.purpose}
        self._surroundings.record(events.Unreachable, self.membership.last_round, **fields, error=pair.error)
        if not self.membership.leads:
            self.membership.send_to_leader(Unreachable(str(pair)))
