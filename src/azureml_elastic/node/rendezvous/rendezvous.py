"""The rendezvous of one node: its rows in the table, its hub, its link to rank 0, and the moves between rounds.

:class:`Rendezvous` owns the state and the I/O; what to do is decided by the pure functions of
:mod:`~azureml_elastic.node.rendezvous.state.round`. One thread (the agent's) calls it; the hub and the link only wake it up.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import RunFailed, RunSucceeded
from azureml_elastic.node.failures.restart_policy import FailureRecord, aged
from azureml_elastic.node.host.addresses import listening_address, place
from azureml_elastic.node.host.ports import Ports
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.join.entering import Entrance
from azureml_elastic.node.rendezvous.join.waiting import Lobby
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.reachability.probing import DataPort, PeerProber
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, UnreachablePair, is_unreachable
from azureml_elastic.node.rendezvous.round_end import RoundEnding
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment, Status
from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round
from azureml_elastic.node.rendezvous.state.rows import Roster, Rows
from azureml_elastic.node.rendezvous.table_heartbeat import TableHeartbeat
from azureml_elastic.node.table import Table

__all__ = ["Rendezvous"]

_LONGEST_PAUSE_SECONDS = 2.0
"""The longest pause before another attempt of nodes that could not reach each other."""

_LOOK_SECONDS = 5.0
"""The longest sleep of a node that would like to reach another one."""


class Rendezvous:
    """One node's part in the run.

    Args:
        table: opened for the run.
        node: this node's name, unique in the run.
        host: where the other nodes reach this one.
        slots: workers of this node.
        limits: node counts.
        timings: the patience.
        cancelled: asked while waiting; true ends the wait with ``InterruptedError``.
        host_id: names the machine that strikes are held against.
        strikes: returns how many are live against it; is told whether others may have struck it meanwhile.
        machine: that the node runs on; by default this one, with the ports.
        ports: the first and the last port to listen on; ``None`` for any.
        unreachable: called with each other node that this one cannot reach.

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
        machine: Runtime | None = None,
        ports: tuple[int, int] | None = None,
        unreachable: Callable[[UnreachablePair], None] = lambda _: None,
    ) -> None:
        self.node = node
        self.incarnation = uuid.uuid4().hex[:12]
        self._machine = machine or Runtime(Ports(ports))
        self._clock = self._machine.clock
        self.wake = self._machine.event()
        self._rows = Rows(table, self._rest)
        self._host = host
        self._slots = slots
        self._limits = limits
        self._timings = timings
        self._cancelled = cancelled
        self._host_id = host_id
        self._strikes = strikes
        self._interface = listening_address(host)
        self._unreachable = unreachable
        self._reach = Reachability(node, host, self._clock, ports, self._cannot_reach)
        self._hub = Hub(self._interface, timings, self.wake.set, self.incarnation, self._machine, limits.quarantine)
        self._data_port = DataPort(self._machine, self._interface) if ports is not None else None
        self._witness = TableHeartbeat(table, timings, self._hub.changed, self._machine)
        self._lobby = Lobby(
            self._rows,
            self._hub,
            self._witness,
            limits,
            timings,
            self._sleep,
            self.wake.set,
            self._reach,
            self._machine,
        )
        self._membership = Membership(
            node,
            self.incarnation,
            limits.maximum,
            timings,
            rows=self._rows,
            hub=self._hub,
            witness=self._witness,
            heard=self._lobby.heard,
            wake=self.wake.set,
            machine=self._machine,
        )
        self._entrance = Entrance(
            node,
            membership=self._membership,
            rows=self._rows,
            witness=self._witness,
            reach=self._reach,
            timings=timings,
            rest=self._rest,
            whoami=self._whoami,
            machine=self._machine,
        )
        self._ending = RoundEnding(
            membership=self._membership,
            rows=self._rows,
            hub=self._hub,
            lobby=self._lobby,
            reach=self._reach,
            timings=timings,
            whoami=self._whoami,
            woken=self.wake,
            machine=self._machine,
        )
        self._probing = PeerProber(
            self._machine, self._reach, self._membership.is_on, self._membership.tell_leader, self.wake.set, node
        )
        self._known_strikes = 0

    @property
    def assignment(self) -> Assignment:
        """The place in the round joined last."""
        assert self._membership.assignment is not None, "no round was joined yet"
        return self._membership.assignment

    @property
    def last_round(self) -> int:
        """The number of the round joined last, 0 before the first."""
        return self.assignment.round.number if self._membership.assignment else 0

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self._membership.assignment is not None and self.assignment.rank == 0

    @property
    def seconds_in_round(self) -> float:
        """How long this node has had its place in the round, by its own monotonic clock."""
        return self._membership.seconds

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The run's worker failures that still count, as old as they would be if the round ended now."""
        return aged(self.assignment.round.failures, self.seconds_in_round)

    @property
    def hub(self) -> Hub:
        """This node's hub."""
        return self._hub

    @property
    def link(self) -> Link:
        """The connection to rank 0's hub."""
        assert self._membership.link is not None, "no round was joined yet"
        return self._membership.link

    def announce(self) -> None:
        """Write this node's row before its slow imports, so that the first round can wait for it."""
        self._rows.write_member(replace(self._whoami(), state="starting"))

    def join(self) -> Assignment:
        """Wait for the next round that has a place for this node, and take it.

        Returns:
            The place. On rank 0 the caller must start serving the store on ``assignment.listener`` at once.

        Raises:
            RunSucceeded: the run has ended well; there is nothing left to do.
            RunFailed: the run has failed; the message is the failure's.
            InterruptedError: ``cancelled`` returned true.
            TableForbidden, TableNotFound: the table cannot be used.
        """
        self._membership.leave()
        listener: socket.socket | None = None
        try:
            round_, known = self._first_look()
            while True:
                if round_.closed:
                    raise _ended(round_)
                if round_.state == "sealed":
                    known = round_.members
                    assignment = self._take_seat(round_, listener)
                    if assignment is not None:
                        listener = None if assignment.listener is not None else listener
                        return assignment
                    if self.last_round == round_.number:
                        # This node has left its own round; whoever should end it may be dead.
                        self.reopen(f"{self.node} has left the round")
                        round_ = self._membership.newest(round_)
                    else:
                        round_ = self._lobby.wait_beside(round_, self._whoami())
                    continue
                if listener is None:
                    listener = self._machine.listen(self._interface, 2048)
                if round_.failed_rounds:
                    self._rest(min(_LONGEST_PAUSE_SECONDS, 0.1 * 2**round_.failed_rounds))
                round_ = self._lobby.wait_for_seal(round_, self._candidacy(round_, listener), known)
        finally:
            self._lobby.leave()
            if listener is not None:
                listener.close()

    def running(self) -> bool:
        """Read whether a round trains already, so that this node comes as a spare that nobody waits for."""
        return self._rows.read_round().state == "sealed"

    def given_up(self) -> bool:
        """Read whether the others have gone on without this node, so that it comes back as a new one.

        Raises:
            RunSucceeded, RunFailed: the run has ended.
        """
        round_ = self._rows.read_round()
        if round_.closed:
            raise _ended(round_)
        return round_.number > self.last_round > 0 and self.node not in round_.previous

    def status(self) -> Status:
        """Return what is known about the current round; reads the table only after a hint that it has moved."""
        self._probing.tick()
        return self._membership.status()

    def take_unreachable_pair(self) -> UnreachablePair | None:
        """Return a gap to another member of the round to which workers alone connect, if there is one.

        It is to end the round: until it has closed, the two are not put together again.
        """
        return self._reach.prove({member.incarnation for member in self.assignment.round.members})

    def store_failed(self, error: OSError, seconds: float) -> None:
        """End the round because this node cannot reach the port of its store, and tell so.

        Args:
            error: that a connection ended with.
            seconds: that it was given.
        """
        first, number = self.assignment.round.members[0], self.assignment.round.number
        reason = f"{self.node} cannot reach the store of {first.node} at {place(first.host, first.store_port)}: {error}"
        if is_unreachable(error):
            purpose = f"the store of round {number}"
            reason = str(self._reach.failed(first, purpose, error, seconds, way="store", port=first.store_port))
        self.reopen(reason, round_failed=True)

    def reopen(
        self,
        reason: str,
        *,
        lost: frozenset[str] = frozenset(),
        failures: tuple[FailureRecord, ...] = (),
        round_failed: bool = False,
    ) -> bool:
        """End the current round so that another can form.

        Args:
            reason: why, for the ledger.
            lost: members that will not be back.
            failures: the run's failures with the one that ends the round; none when no worker has failed.
            round_failed: whether the round ends because its nodes could not reach each other.

        Returns:
            Whether it was this node that ended it; otherwise another one was first, and nothing was charged.
        """
        return self._ending.reopen(reason, lost=lost, failures=failures, round_failed=round_failed)

    def drop(self) -> None:
        """Break the connection to rank 0, which tells everyone in milliseconds that this node is gone."""
        self._membership.drop_link()

    def close(
        self,
        *,
        succeeded: bool,
        message: str = "",
        exit_code: int = 0,
        failures: tuple[FailureRecord, ...] = (),
    ) -> bool:
        """End the run for all nodes, and return whether it was this node that ended it."""
        return self._ending.close(succeeded=succeeded, message=message, exit_code=exit_code, failures=failures)

    def leave(self, reason: str) -> None:
        """Tell that this node is gone for good. Never raises: whoever leaves has no time for errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(replace(self._whoami(), state="left", reason=reason))

    def shutdown(self) -> None:
        """Close the hub and the link."""
        self._membership.leave()
        self._witness.stop()
        self._hub.close()
        if self._data_port is not None:
            self._data_port.close()

    def _cannot_reach(self, gap: UnreachablePair) -> None:
        """Tell rank 0's node, where it is another one and can be reached; from any thread."""
        self._unreachable(gap)
        if not self.leads:
            self._membership.tell_leader({"op": "unreachable", "text": str(gap)})

    def _first_look(self) -> tuple[Round, Iterable[Member] | Roster]:
        """Return the round as it is, with the other nodes that this one knows of; without a read where it was told."""
        if self._membership.assignment is None:
            return self._rows.read_some(self.node)
        return self._membership.newest(self.assignment.round), self.assignment.round.members

    def _whoami(self) -> Member:
        return Member(
            node=self.node,
            incarnation=self.incarnation,
            host=self._host,
            hub_port=self._hub.port,
            slots=self._slots,
            host_id=self._host_id,
            strikes=self._known_strikes,
            data_port=self._data_port.number if self._data_port is not None else 0,
        )

    def _candidacy(self, round_: Round, listener: socket.socket) -> Member:
        # A node that was in the run and is no survivor was lost to the others, who may hold that against it.
        self._known_strikes = self._strikes(
            self._membership.assignment is not None and self.node not in round_.previous
        )
        before = self.assignment.round.failures if self._membership.assignment is not None else ()
        self._reach.in_doubt = round_.failed_rounds > 0 or len(round_.failures) > len(before)
        return replace(self._whoami(), round=round_.number, store_port=listener.getsockname()[1])

    def _take_seat(self, round_: Round, listener: socket.socket | None) -> Assignment | None:
        """Enter the sealed round if this incarnation is in it and has not been in it before."""
        rank = self._membership.place_in(round_)
        if rank is None or listener is None:
            return None
        assignment = self._entrance.enter(round_, rank, listener)
        if isinstance(assignment, str):
            self.reopen(assignment, lost=frozenset({round_.members[0].node}), round_failed=True)
            return None
        if assignment is not None:
            self._lobby.leave()  # only now, so that what was said there last has arrived
            self._probing.begin(round_, rank)
        return assignment

    def _rest(self, seconds: float) -> None:
        """Wait for so long, whatever wakes the node up meanwhile."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self._sleep(left)

    def _sleep(self, seconds: float) -> bool:
        """Wait until woken, or for a while; return whether it was before the time."""
        self._probing.tick()
        woken = self.wake.wait(min(seconds, _LOOK_SECONDS) if self._reach.gaps() else seconds)
        self.wake.clear()
        if self._cancelled():
            raise InterruptedError("the node was told to leave")
        return woken


def _ended(round_: Round) -> RunSucceeded | RunFailed:
    if round_.state == "succeeded":
        return RunSucceeded(f"The run ended well in round {round_.number}.")
    return RunFailed(round_.message or "The run failed.", round_.exit_code or 1)
