"""The rendezvous of one node: it joins a round, is a member of it, and ends it, again and again until the run ends.

:class:`Rendezvous` drives objects that each own one piece of I/O. Decisions are pure functions of
:mod:`~azureml_elastic.node.rendezvous.state`. One thread, the agent's, calls it; other threads only wake that one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import RunFailed, RunSucceeded, TableUnavailable
from azureml_elastic.ipc import Connection, Peer
from azureml_elastic.ipc.shards import ShardDescription
from azureml_elastic.ledger import events
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.joining import is_landmark
from azureml_elastic.node.core.messages import Unreachable
from azureml_elastic.node.core.round import Limits, Member, Round, is_same_round, reopened
from azureml_elastic.node.host.addresses import Ports, format_address, listening_address
from azureml_elastic.node.host.identity import new_incarnation
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.watch import HubWatch
from azureml_elastic.node.rendezvous.join.entering import LeaderLostError, RoundEntry
from azureml_elastic.node.rendezvous.join.sleeper import Sleeper
from azureml_elastic.node.rendezvous.join.waiting import JoinWaiter
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.probing import DataPort, PeerProber
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, UnreachablePair, is_unreachable
from azureml_elastic.node.rendezvous.round_end import RoundEnd
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment, Status
from azureml_elastic.node.rendezvous.state.rows import Roster, Rows
from azureml_elastic.node.rendezvous.state.run_key import RunKey
from azureml_elastic.node.rendezvous.table_heartbeat import TableHeartbeat
from azureml_elastic.node.table import Table

__all__ = ["Rendezvous"]

_MAX_BACKOFF_SECONDS = 2.0
"""Longest pause before a new attempt of nodes that could not connect to each other."""

_DECLINE_SECONDS = 1.0
"""Time in which a node that leaves connects to rank 0's hub to send it that it does not enter its round."""

_FEW_NODES = 64
"""Largest round whose nodes all get the run's key before they are ready to join; in a larger one the landmarks do."""


class Rendezvous:
    """One node's part in the run.

    Args:
        table: table of the run.
        node: name of this node, unique in the run.
        host: address under which the other nodes reach this one.
        slots: number of workers of this node.
        limits: node counts.
        timings: heartbeat interval and timeouts.
        cancelled: function that returns whether to end a wait with ``InterruptedError``.
        host_id: identifier of the machine, against which strikes are counted.
        strikes: function that returns the number of live strikes against the machine; the argument is whether
            other nodes may have written new ones.
        runtime: clock, threads and sockets; by default those of this machine.
        ports: first and last port to listen on; ``None`` for any.
        probes_other_ports: whether the others test a port outside of ``ports``, because workers listen on such ports.
        incarnation: random identifier of this process; ``None`` for a new one.
        wake: event to set when there is something to do; ``None`` for a new one.
        record: callback for events, with the class, the round's number and the fields.
        receive_shard: callback that takes over a connection to the hub whose client offers a snapshot shard.
        progress: function that returns the heartbeat's fields for how far training is; called on rank 0's node.
        program: digest of the program of this node's job; nodes of another one are refused.

    Attributes:
        node: name of this node.
        incarnation: random identifier of this process.
        wake: event that is set when the agent should look at :meth:`status` and at the inbox.
        inbox: messages of other agents for the agent's thread.
        authenticator: this node's part in the handshakes with other nodes.
        hub: this node's hub.
        membership: the round joined last, and the connection to its rank 0.
        round_end: reopens the round, or closes the run.

    Raises:
        UsageError: all these ports are taken.
    """

    def __init__(
        self,
        table: Table,
        node: str,
        host: str,
        slots: int,
        limits: Limits,
        timings: RendezvousTimings,
        cancelled: Callable[[], bool] = lambda: False,
        host_id: str = "",
        strikes: Callable[[bool], int] = lambda _: 0,
        runtime: Runtime | None = None,
        ports: tuple[int, int] | None = None,
        probes_other_ports: bool = True,
        incarnation: str | None = None,
        wake: threading.Event | None = None,
        record: Callable[..., None] = lambda *_, **__: None,
        receive_shard: Callable[[Connection, ShardDescription], None] | None = None,
        progress: Callable[[], Mapping[str, Any]] = dict,
        program: str | None = None,
    ) -> None:
        # Each object gets only objects that were made before it.
        self.node = node
        self.incarnation = incarnation or new_incarnation()
        self._strikes = strikes
        self._record = record
        self._interface = listening_address(host)
        self._context = context = Context(
            limits, timings, runtime or Runtime(Ports(ports)), Peer(node, self.incarnation), wake
        )
        self.wake = context.wake
        self.inbox = context.inbox
        self.authenticator = context.authenticator
        hub_listener = context.runtime.listen(self._interface, 4096)
        self._data_port = DataPort(context, self._interface) if ports is not None and probes_other_ports else None
        me = Member(
            node,
            self.incarnation,
            host=host,
            hub_port=hub_listener.getsockname()[1],
            slots=slots,
            host_id=host_id,
            data_port=self._data_port.number if self._data_port is not None else 0,
        )
        self.membership = membership = Membership(context, me)
        self._reachability = reach = Reachability(node, host, context.clock, ports, self._report_unreachable)
        self._prober = PeerProber(context, reach, membership)
        self._sleeper = Sleeper(context, self._prober, cancelled)
        key = RunKey(table, context.clock, context.adopt_key, program)
        self._rows = rows = Rows(table, self._sleeper.sleep, context.latest, key)
        self.hub = hub = Hub(context, hub_listener, membership.reached_leader, receive_shard)
        self._must_look = False
        self._heartbeat = heartbeat = TableHeartbeat(context, table, hub.request_read, self._look_at_round, progress)
        self._watch = HubWatch(context, reach)
        self._waiter = JoinWaiter(context, rows, hub, self._watch, heartbeat, reach, self._sleeper)
        self._entry = RoundEntry(context, membership, rows, heartbeat, reach, self._sleeper)
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

    def join(self, get_ready: Callable[[], bool] = lambda: False) -> Assignment:
        """Wait for the next round in which this node is a member, and enter it.

        Args:
            get_ready: callback before this node is a spare of a running round; it returns once the node can train, with
                whether that took time.

        Returns:
            The assignment. On rank 0 the caller must start serving the store on its ``listener`` at once.

        Raises:
            RunSucceeded: the run has succeeded; nothing is left to do.
            RunFailed: the run has failed, with this message.
            InterruptedError: ``cancelled`` returned true.
            TableForbidden, TableNotFound: the table cannot be used.
            UsageError: the run has another program.
        """
        if self.membership.last_round:
            # Before the disconnection, by which the others would take this node for lost and go on without it.
            self.round_end.reopen(f"{self.node} has left the round", lost=self.status().lost)
        self.membership.leave()
        listener: socket.socket | None = None
        try:
            round_, known = self._first_read()
            self._rows.read_run_key(defer=self._is_one_of_many)
            pace = _Pace()
            while True:
                self._sleeper.sleep(pace.seconds_before(round_))
                if round_.closed:
                    raise self._end_of(round_)
                if round_.state == "sealed":
                    known = {member.node: member for member in round_.members}
                    assignment = self._enter(round_, listener)
                    if assignment is not None:
                        listener = None if assignment.listener is not None else listener
                        return assignment
                    if self.membership.last_round == round_.number:
                        # This node has left its own round, and the node that should end it may be dead.
                        self.round_end.reopen(f"{self.node} has left the round")
                        round_ = self._context.latest.after(round_) or self._rows.read_round()
                    elif get_ready():
                        round_ = self._context.latest.after(round_) or self._rows.read_round()
                    else:
                        round_ = self._waiter.wait_beside(round_, self.membership.me)
                    continue
                if listener is None:
                    listener = self._context.runtime.listen(self._interface, 2048)
                if round_.failed_rounds:
                    self._sleeper.sleep(min(_MAX_BACKOFF_SECONDS, 0.1 * 2**round_.failed_rounds))
                round_ = self._waiter.wait_for_seal(round_, self._candidacy(round_, listener), known)
        finally:
            self._watch.close()
            if listener is not None:
                listener.close()

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

    def _candidacy(self, round_: Round, listener: socket.socket) -> Member:
        """Return the row with which this node wants to be in an open round."""
        # A former member that is not a survivor was lost to the others, which may have written strikes against it.
        was_member = self.membership.last_round > 0
        strikes = self._strikes(was_member and self.node not in round_.previous)
        quarantine = self._context.limits.quarantine
        if quarantine is not None and strikes >= quarantine:
            host_id = self.membership.me.host_id
            self._record(events.HostQuarantined, self.membership.last_round, host=host_id, strikes=strikes)
        self.membership.me = me = replace(self.membership.me, strikes=strikes)
        failures_before = self.membership.assignment.round.failures if was_member else ()
        self._reachability.suspect_workers = round_.failed_rounds > 0 or len(round_.failures) > len(failures_before)
        return replace(me, round=round_.number, store_port=listener.getsockname()[1])

    def _enter(self, round_: Round, listener: socket.socket | None) -> Assignment | None:
        """Enter the sealed round if this incarnation is in it and has not been in it before."""
        rank = round_.rank_of(self.node, self.incarnation)
        if rank is None or listener is None or self.membership.last_round >= round_.number:
            return None
        if rank == 0:
            self.hub.enter(round_)
            self._heartbeat.start(round_.number)
        else:
            self._heartbeat.stop()
        try:
            assignment = self._entry.enter(round_, rank, listener)
        except LeaderLostError as error:
            self.round_end.reopen(str(error), lost=frozenset({round_.members[0].node}), round_failed=True)
            return None
        if assignment is not None:
            self._rows.persistent = True
            self._watch.close()  # only now, so that the messages sent there have arrived
            self._prober.begin(assignment)
        return assignment

    # --- being a member ----------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the state of the round; reads the table only where a hub has sent that the row has changed."""
        self._prober.tick()
        membership = self.membership
        if not membership.connected:
            return Status()
        link, round_ = membership.link, membership.assignment.round
        view = self.hub.view() if membership.leads else HubView()
        lost = link.lost | view.lost
        was_given_up = view.was_given_up or (link.broken and link.was_given_up)
        membership.over = membership.over or was_given_up or link.broken or self._has_changed(round_)
        if link.broken and not was_given_up:
            lost |= {round_.members[0].node} - {self.node}
        is_full = len(round_.members) >= self._context.limits.maximum
        debounce = self._context.timings.rescale_debounce.total_seconds()
        return Status(
            lost=lost - {self.node},
            over=membership.over or self.node in lost,
            waiting=frozenset() if is_full else view.spares(self._context.clock(), debounce),
            all_done=link.all_done,
            was_given_up=was_given_up,
        )

    def take_unreachable_pair(self) -> UnreachablePair | None:
        """Return an unreachable member to which only workers connect, if there is one, because of which the round ends.

        The two nodes are not members of one round again until they reach each other.
        """
        return self._reachability.confirm({member.incarnation for member in self.membership.assignment.round.members})

    def store_failed(self, error: OSError, seconds: float) -> None:
        """End the round because this node cannot reach the port of its store.

        Args:
            error: error of the connection.
            seconds: timeout of the connection.
        """
        round_ = self.membership.assignment.round
        first, port = round_.members[0], round_.members[0].store_port
        reason = f"{self.node} cannot reach the store of {first.node} at {format_address(first.host, port)}: {error}"
        if is_unreachable(error):
            purpose = f"the store of round {round_.number}"
            reason = str(self._reachability.failed(first, purpose, error, seconds, target="store", port=port))
        self.round_end.reopen(reason, round_failed=True)

    def leave(self, reason: str) -> None:
        """Write that this node will not return. Never raises, since a node that leaves cannot handle errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(replace(self.membership.me, state="left", reason=reason))
            self._decline(reason)

    def _decline(self, reason: str) -> None:
        """Reopen a round that was sealed with this node while it was leaving: the others would wait for it."""
        round_ = self._rows.look_at_round()
        is_member = round_.rank_of(self.node, self.incarnation) is not None
        if round_.state != "sealed" or not is_member or round_.number <= self.membership.last_round:
            return
        next_ = reopened(round_, f"{self.node} has left before it could enter: {reason}", lost=[self.node])
        if self._rows.end_round(round_.number, next_):
            self.hub.publish(next_)
            first, me = round_.members[0], self.membership.me
            self._watch.connect(first, round_, me, "rank 0 of the round that ends", _DECLINE_SECONDS)
            self._watch.forward(next_)
            self._watch.close()

    def shutdown(self) -> None:
        """Close the hub and the connections."""
        self.membership.leave()
        self._heartbeat.stop()
        self.hub.close()
        if self._data_port is not None:
            self._data_port.close()

    def _has_changed(self, round_: Round) -> bool:
        """Return whether a newer version of the round is known; reads the row if rank 0's hub has sent to read it."""
        if self._context.latest.after(round_) is not None:
            return True
        if not (self.membership.link.take_read_request() or self._must_look):
            return False
        self._must_look = False
        try:
            current = self._rows.look_at_round()
        except TableUnavailable:
            self._must_look = True
            return False
        return not is_same_round(current, round_)

    def _look_at_round(self) -> None:
        """Have the agent's thread read the round's row and the run's key. Thread-safe."""
        self._must_look = True
        self.wake.set()

    def _report_unreachable(self, pair: UnreachablePair) -> None:
        """Record a pair and report it to rank 0's node. Thread-safe."""
        fields = {"host": pair.host, "peer": pair.peer, "address": pair.address, "purpose": pair.purpose}
        self._record(events.Unreachable, self.membership.last_round, **fields, error=pair.error)
        if not self.membership.leads:
            self.membership.send_to_leader(Unreachable(str(pair)))


class _Pace:
    """Pauses between the versions of the round that a joining node goes through, longer where they are not newer."""

    def __init__(self) -> None:
        self._seen: Round | None = None
        self._repeats = 0

    def seconds_before(self, round_: Round) -> float:
        """Return the seconds to wait before this version is acted on."""
        if round_.is_newer_than(self._seen):
            self._seen, self._repeats = round_, 0
            return 0.0
        self._repeats += 1
        return min(_MAX_BACKOFF_SECONDS, 0.05 * 2.0**self._repeats)
