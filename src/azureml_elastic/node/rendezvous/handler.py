"""The rendezvous of one node: its rows in the table, its hub, its link to rank 0, and the moves between rounds.

:class:`Rendezvous` owns the state and the I/O; what to do is decided by the pure functions of
:mod:`~azureml_elastic.node.rendezvous.round`. One thread (the agent's) calls it; the hub and the link only wake it up.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from azureml_elastic.errors import RunFailed, RunSucceeded
from azureml_elastic.node.budget import FailureRecord, aged
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import Link
from azureml_elastic.node.rendezvous.lobby import Lobby
from azureml_elastic.node.rendezvous.machine import Machine
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.round import (
    Limits,
    Member,
    Round,
    RoundState,
    reopened,
)
from azureml_elastic.node.rendezvous.rows import Roster, Rows
from azureml_elastic.node.rendezvous.seat import Seat, Status
from azureml_elastic.node.rendezvous.witness import Witness
from azureml_elastic.node.table import Table
from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.spec.environment import LOCAL_ADDRESS

__all__ = ["Rendezvous"]

_LOG = logging.getLogger(__name__)

_TURN_SECONDS = 0.05
"""How long each survivor gives the one before it to end a broken round."""

_LONGEST_TURN_SECONDS = 1.0
"""The longest that a survivor waits for all those before it."""

_LONGEST_PAUSE_SECONDS = 2.0
"""The longest pause before another attempt of nodes that could not reach each other."""


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
        machine: that the node runs on.
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
        machine: Machine | None = None,
    ) -> None:
        self.node = node
        self.incarnation = uuid.uuid4().hex[:12]
        self._machine = machine or Machine()
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
        self._interface = host if host.startswith("127.") else ("::" if ":" in host else "0.0.0.0")  # noqa: S104
        self._hub = Hub(self._interface, timings, self.wake.set, self.incarnation, self._machine, limits.quarantine)
        self._witness = Witness(table, timings, self._hub.changed, self._machine)
        self._lobby = Lobby(
            self._rows, self._hub, self._witness, limits, timings, self._sleep, self.wake.set, self._machine
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
        self._known_strikes = 0

    @property
    def seat(self) -> Seat:
        """The place in the round joined last."""
        assert self._membership.seat is not None, "no round was joined yet"
        return self._membership.seat

    @property
    def last_round(self) -> int:
        """The number of the round joined last, 0 before the first."""
        return self.seat.round.number if self._membership.seat else 0

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self._membership.seat is not None and self.seat.rank == 0

    @property
    def seconds_in_round(self) -> float:
        """How long this node has had its place in the round, by its own monotonic clock."""
        return self._membership.seconds

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The run's worker failures that still count, as old as they would be if the round ended now."""
        return aged(self.seat.round.failures, self.seconds_in_round)

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

    def join(self) -> Seat:
        """Wait for the next round that has a place for this node, and take it.

        Returns:
            The place. On rank 0 the caller must start serving the store on ``seat.listener`` at once.

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
                    seat = self._take_seat(round_, listener)
                    if seat is not None:
                        listener = None if seat.listener is not None else listener
                        return seat
                    if self.last_round == round_.number:
                        # This node has left its own round; whoever should end it may be dead.
                        self.reopen(f"{self.node} has left the round")
                        round_ = self._membership.newest(round_)
                    else:
                        round_ = self._lobby.wait_beside(round_, self._whoami())
                    continue
                if listener is None:
                    listener = self._machine.listen(self._interface, 2048)
                if round_.fruitless:
                    self._rest(min(_LONGEST_PAUSE_SECONDS, 0.1 * 2**round_.fruitless))
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
        return self._membership.status()

    def reopen(
        self,
        reason: str,
        *,
        lost: frozenset[str] = frozenset(),
        failures: tuple[FailureRecord, ...] = (),
        fruitless: bool = False,
    ) -> bool:
        """End the current round so that another can form.

        Args:
            reason: why, for the ledger.
            lost: members that will not be back.
            failures: the run's failures with the one that ends the round; none when no worker has failed.
            fruitless: whether the round ends because its nodes could not reach each other.

        Returns:
            Whether it was this node that ended it; otherwise another one was first, and nothing was charged.
        """
        seat = self.seat
        if self._membership.has_heard_of_the_next():
            return False
        if not failures and self.node not in lost:
            # Rank 0, or the first survivor after it, writes; the others make sure that someone does.
            alive = [member for member in seat.round.members if member.node not in lost]
            if self._another_ends_round(alive):
                return False
        view = self._hub.view()
        waiting = sorted(view.waiting)
        next_ = reopened(
            seat.round, reason, lost, waiting, failures=failures, seconds=self.seconds_in_round, fruitless=fruitless
        )
        if next_.fruitless >= self._timings.fruitless_rounds:
            return self.close(
                succeeded=False,
                exit_code=1,
                message=(
                    f"{next_.fruitless} rounds in a row broke because nodes could not reach each other, the last one "
                    f"because {reason}. Allow TCP between the nodes, or set {LOCAL_ADDRESS} on each node to an address "
                    "that the others can reach."
                ),
            )
        return self._end_round(next_)

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
        state: RoundState = "succeeded" if succeeded else "failed"
        closed = replace(
            self.seat.round,
            state=state,
            message=message[:30_000],
            exit_code=exit_code,
            failures=failures or self.failures,
        )
        return self._end_round(closed)

    def leave(self, reason: str) -> None:
        """Tell that this node is gone for good. Never raises: whoever leaves has no time for errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(replace(self._whoami(), state="left", reason=reason))

    def shutdown(self) -> None:
        """Close the hub and the link."""
        self._membership.leave()
        self._witness.stop()
        self._hub.close()

    def _another_ends_round(self, alive: list[Member]) -> bool:
        """Wait for this node's turn among those that are left; return whether another one was faster."""
        turn = next((turn for turn, member in enumerate(alive) if member.node == self.node), 0)
        if turn == 0:
            return False
        patience = min(_LONGEST_TURN_SECONDS, _TURN_SECONDS * turn)
        until = self._clock() + patience
        if alive[0] != self.seat.round.members[0] or self._membership.link is None:
            self._lobby.listen_to(alive[0], self.seat.round, self._whoami(), patience)
        while (left := until - self._clock()) > 0 and not self._membership.has_heard_of_the_next():
            self.wake.wait(left)
            self.wake.clear()
        return self._membership.has_heard_of_the_next()

    def _end_round(self, to: Round) -> bool:
        if not self._rows.end_round(self.seat.round.number, to):
            return False
        self._membership.tell(to)
        return True

    def _first_look(self) -> tuple[Round, Iterable[Member] | Roster]:
        """Return the round as it is, with the other nodes that this one knows of; without a read where it was told."""
        if self._membership.seat is None:
            return self._rows.read_some(self.node)
        return self._membership.newest(self.seat.round), self.seat.round.members

    def _whoami(self) -> Member:
        return Member(
            node=self.node,
            incarnation=self.incarnation,
            host=self._host,
            hub_port=self._hub.port,
            slots=self._slots,
            host_id=self._host_id,
            strikes=self._known_strikes,
        )

    def _candidacy(self, round_: Round, listener: socket.socket) -> Member:
        # A node that was in the run and is no survivor was lost to the others, who may hold that against it.
        self._known_strikes = self._strikes(self._membership.seat is not None and self.node not in round_.previous)
        return replace(self._whoami(), round=round_.number, store_port=listener.getsockname()[1])

    def _take_seat(self, round_: Round, listener: socket.socket | None) -> Seat | None:
        """Enter the sealed round if this incarnation is in it and has not been in it before."""
        rank = self._membership.place_in(round_)
        if rank is None or listener is None:
            return None
        try:
            seat = self._membership.enter(round_, rank, listener)
        except OSError as error:
            first = round_.members[0]
            _LOG.warning("Rank 0's node %s of round %d cannot be reached: %s", first.node, round_.number, error)
            where = f"{first.node} at {first.host}:{first.hub_port}"
            self.reopen(f"{self.node} cannot reach {where}", lost=frozenset({first.node}), fruitless=True)
            return None
        self._lobby.leave()  # only now, so that what was said there last has arrived
        return seat

    def _rest(self, seconds: float) -> None:
        """Wait for so long, whatever wakes the node up meanwhile."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self._sleep(left)

    def _sleep(self, seconds: float) -> bool:
        """Wait until woken; return whether it was before the time."""
        woken = self.wake.wait(seconds)
        self.wake.clear()
        if self._cancelled():
            raise InterruptedError("the node was told to leave")
        return woken


def _ended(round_: Round) -> RunSucceeded | RunFailed:
    if round_.state == "succeeded":
        return RunSucceeded(f"The run ended well in round {round_.number}.")
    return RunFailed(round_.message or "The run failed.", round_.exit_code or 1)
