"""The rendezvous of one node: its rows in the table, its hub, its link to rank 0, and the moves between rounds.

:class:`Rendezvous` owns the state and the I/O; what to do is decided by the pure functions of
:mod:`~azureml_elastic.node.rendezvous.round`. One thread (the agent's) calls it; the hub and the link only wake it up.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from azureml_elastic.errors import RunFailed, RunSucceeded, TableUnavailable
from azureml_elastic.node.rendezvous.hub import Hub, HubView
from azureml_elastic.node.rendezvous.link import Link
from azureml_elastic.node.rendezvous.lobby import Lobby
from azureml_elastic.node.rendezvous.round import (
    Limits,
    Member,
    Round,
    RoundState,
    reopened,
)
from azureml_elastic.node.rendezvous.rows import Rows
from azureml_elastic.node.rendezvous.seat import Seat, Status
from azureml_elastic.node.rendezvous.witness import Witness
from azureml_elastic.node.table import Table
from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.spec.environment import LOCAL_ADDRESS
from azureml_elastic.wire import listen

__all__ = ["Rendezvous"]

_LOG = logging.getLogger(__name__)

_TURN_SECONDS = 0.05
"""How long each survivor gives the one before it to end a broken round."""

_SNUBBED_SECONDS = 15.0
"""How long the round runs before a node that was expected, but did not come, is made room for again."""

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
    ) -> None:
        self.node = node
        self.incarnation = uuid.uuid4().hex[:12]
        self.wake = threading.Event()
        self._rows = Rows(table, self._sleep)
        self._host = host
        self._slots = slots
        self._limits = limits
        self._timings = timings
        self._cancelled = cancelled
        self._interface = host if host.startswith("127.") else ("::" if ":" in host else "0.0.0.0")  # noqa: S104
        self._hub = Hub(self._interface, timings, self.wake.set)
        self._witness = Witness(table, timings, self._hub.changed)
        self._lobby = Lobby(self._rows, self._hub, self._witness, limits, timings, self._sleep, self.wake.set)
        self._link: Link | None = None
        self._seat: Seat | None = None
        self._over = False
        self._seated_at = 0.0

    @property
    def seat(self) -> Seat:
        """The place in the round joined last."""
        assert self._seat is not None, "no round was joined yet"
        return self._seat

    @property
    def last_round(self) -> int:
        """The number of the round joined last, 0 before the first."""
        return self._seat.round.number if self._seat else 0

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self._seat is not None and self._seat.rank == 0

    @property
    def hub(self) -> Hub:
        """This node's hub."""
        return self._hub

    @property
    def link(self) -> Link:
        """The connection to rank 0's hub."""
        assert self._link is not None, "no round was joined yet"
        return self._link

    def announce(self) -> None:
        """Write this node's row before its slow imports, so that the first round can wait for it."""
        self._rows.write_member(Member(self.node, self.incarnation, state="starting", slots=self._slots))

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
        self._leave_seat()
        listener: socket.socket | None = None
        try:
            round_ = self._rows.read_round()
            while True:
                if round_.closed:
                    raise _ended(round_)
                if round_.state == "sealed":
                    seat = self._take_seat(round_, listener)
                    if seat is not None:
                        listener = None if seat.listener is not None else listener
                        return seat
                    if self.last_round == round_.number:
                        # This node has left its own round; whoever should end it may be dead.
                        self.reopen(f"{self.node} has left the round")
                    else:
                        self._lobby.wait_beside(round_, Member(self.node, self.incarnation))
                    round_ = self._rows.read_round()
                    continue
                if listener is None:
                    listener = listen((self._interface, 0), backlog=2048)
                if round_.fruitless:
                    self._sleep(min(_LONGEST_PAUSE_SECONDS, 0.1 * 2**round_.fruitless))
                round_ = self._lobby.wait_for_seal(round_, self._candidacy(round_, listener))
        finally:
            self._lobby.leave()
            if listener is not None:
                listener.close()

    def status(self) -> Status:
        """Return what is known about the current round; reads the table only after a hint that it has moved."""
        link, seat = self._link, self._seat
        if link is None or seat is None:
            return Status()
        view = self._hub.view() if seat.rank == 0 else HubView()
        waiting: frozenset[str] = frozenset()
        room = len(seat.round.members) < self._limits.maximum
        if room and view.waiting_since is not None:
            waited = time.monotonic() - view.waiting_since
            if waited >= self._timings.rescale_debounce.total_seconds():
                waiting = view.waiting - self._snubbed(seat)
        lost = link.lost_nodes | view.lost
        self._over = self._over or link.broken or (link.changed and self._round_has_moved())
        if link.broken:
            lost |= {seat.round.members[0].node} - {self.node}
        return Status(
            lost=lost - {self.node}, over=self._over or self.node in lost, waiting=waiting, all_done=link.all_done
        )

    def reopen(
        self, reason: str, *, lost: frozenset[str] = frozenset(), failures: int = 0, fruitless: bool = False
    ) -> bool:
        """End the current round so that another can form.

        Args:
            reason: why, for the ledger.
            lost: members that will not be back.
            failures: worker failures to charge to the run.
            fruitless: whether the round ends because its nodes could not reach each other.

        Returns:
            Whether it was this node that ended it; otherwise another one was first, and nothing was charged.
        """
        seat = self.seat
        if not failures and self.node not in lost:
            # Rank 0, or the first survivor after it, writes; the others make sure that someone does.
            alive = [member.node for member in seat.round.members if member.node not in lost]
            if self._another_ends_round(alive.index(self.node) if self.node in alive else 0):
                return False
        view = self._hub.view()
        waiting = sorted(view.waiting)
        next_ = reopened(seat.round, reason, lost, waiting, failures=failures, fruitless=fruitless)
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
        self._drop_link()

    def close(self, *, succeeded: bool, message: str = "", exit_code: int = 0) -> bool:
        """End the run for all nodes, and return whether it was this node that ended it."""
        state: RoundState = "succeeded" if succeeded else "failed"
        closed = replace(self.seat.round, state=state, message=message[:30_000], exit_code=exit_code)
        return self._end_round(closed)

    def leave(self, reason: str) -> None:
        """Tell that this node is gone for good. Never raises: whoever leaves has no time for errors."""
        with contextlib.suppress(Exception):
            self._rows.write_member(Member(self.node, self.incarnation, state="left", slots=self._slots, reason=reason))

    def shutdown(self) -> None:
        """Close the hub and the link."""
        self._leave_seat()
        self._witness.stop()
        self._hub.close()

    def _snubbed(self, seat: Seat) -> set[str]:
        """Return the nodes that the round was made for but that did not come; for a while nobody waits for them."""
        if time.monotonic() - self._seated_at >= _SNUBBED_SECONDS:
            return set()
        return set(seat.round.expected) - {member.node for member in seat.round.members}

    def _another_ends_round(self, turn: int) -> bool:
        """Wait for this node's turn; return whether another one was faster."""
        until = time.monotonic() + min(1.0, _TURN_SECONDS * turn)
        pause = _TURN_SECONDS / 2
        while (left := until - time.monotonic()) > 0:
            self.wake.wait(min(pause, left))
            self.wake.clear()
            current = self._rows.read_round()
            if current.number != self.seat.round.number or current.state != "sealed":
                return True
            pause *= 2
        return False

    def _end_round(self, to: Round) -> bool:
        if not self._rows.end_round(self.seat.round.number, to):
            return False
        if self._link is not None:
            self._link.send({"op": "changed"})
        return True

    def _round_has_moved(self) -> bool:
        """Read the row after a hint that it has changed."""
        seat = self.seat
        self.link.changed = False
        try:
            current = self._rows.read_round_now()
        except TableUnavailable:
            self.link.changed = True
            return False
        return current.number != seat.round.number or current.state != "sealed"

    def _candidacy(self, round_: Round, listener: socket.socket) -> Member:
        return Member(
            node=self.node,
            incarnation=self.incarnation,
            round=round_.number,
            host=self._host,
            store_port=listener.getsockname()[1],
            hub_port=self._hub.port,
            slots=self._slots,
        )

    def _take_seat(self, round_: Round, listener: socket.socket | None) -> Seat | None:
        """Enter the sealed round if this incarnation is in it and has not been in it before."""
        rank = round_.rank_of(self.node, self.incarnation)
        already = self._seat is not None and self._seat.round.number >= round_.number
        if rank is None or already or listener is None:
            return None
        seat = Seat(round_, rank, listener if rank == 0 else None)
        self._seat, self._over, self._seated_at = seat, False, time.monotonic()
        self._lobby.leave()
        if rank == 0:
            self._hub.enter(round_)
            self._witness.start(round_.number)
        else:
            self._witness.stop()
        first = round_.members[0]
        greeting = {"op": "hello", "node": self.node, "incarnation": self.incarnation, "round": round_.number}
        try:
            self._link = Link((first.host, first.hub_port), greeting, self._timings, self.wake.set)
        except OSError as error:
            _LOG.warning("Rank 0's node %s of round %d cannot be reached: %s", first.node, round_.number, error)
            where = f"{first.node} at {first.host}:{first.hub_port}"
            self.reopen(f"{self.node} cannot reach {where}", lost=frozenset({first.node}), fruitless=True)
            return None
        return seat

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _leave_seat(self) -> None:
        self._drop_link()
        if self._seat is not None and self._seat.listener is not None:
            self._seat.listener.close()  # nothing where the store has taken it over

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
