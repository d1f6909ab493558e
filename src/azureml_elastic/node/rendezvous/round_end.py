"""How a round ends, and the run: who writes it, and what it says about nodes that could not reach each other."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import TableError
from azureml_elastic.node.failures.restart_policy import FailureRecord, aged
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.join.waiting import Lobby
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, why_absent
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.state.round import Member, Round, RoundState, reopened
from azureml_elastic.node.rendezvous.state.rows import Rows

__all__ = ["RoundEnding"]

_LOG = logging.getLogger(__name__)

_TURN_SECONDS = 0.05
"""How long each survivor gives the one before it to end a broken round."""

_LONGEST_TURN_SECONDS = 1.0
"""The longest that a survivor waits for all those before it."""

_MOST_READ = 3
"""Of how many members that never came the rows are read for the reason."""


class RoundEnding:
    """Ends this node's round. For one thread.

    Args:
        membership: this node's.
        rows: of the rendezvous.
        hub: this node's own.
        lobby: listens to whoever should end the round.
        reach: tells what to do about nodes that cannot reach each other.
        timings: the patience.
        whoami: returns this node.
        woken: set when something has happened.
        machine: that the node runs on.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        rows: Rows,
        hub: Hub,
        lobby: Lobby,
        reach: Reachability,
        timings: RendezvousTimings,
        whoami: Callable[[], Member],
        woken: threading.Event,
        machine: Runtime,
    ) -> None:
        self._membership = membership
        self._rows = rows
        self._hub = hub
        self._lobby = lobby
        self._reach = reach
        self._timings = timings
        self._whoami = whoami
        self._woken = woken
        self._clock = machine.clock

    def reopen(
        self,
        reason: str,
        *,
        lost: frozenset[str] = frozenset(),
        failures: tuple[FailureRecord, ...] = (),
        round_failed: bool = False,
    ) -> bool:
        """End the round so that another can form, or the run; see the rendezvous."""
        assignment = self._seat
        if self._membership.has_heard_of_the_next():
            return False
        me = self._whoami()
        if not failures and me.node not in lost:
            # Rank 0, or the first survivor after it, writes; the others make sure that someone does.
            alive = [member for member in assignment.round.members if member.node not in lost]
            if self._another_ends_round(alive, me):
                return False
        if (absent := self._membership.absent & lost) and not failures:
            round_failed = round_failed or lost == absent
            reason = f"{reason}: {self._why_absent(absent)}"
        next_ = reopened(
            assignment.round,
            reason,
            lost,
            sorted(self._hub.view().waiting),
            failures=failures,
            seconds=self._membership.seconds,
            round_failed=round_failed,
        )
        if next_.failed_rounds >= self._timings.max_failed_rounds:
            message = (
                f"{next_.failed_rounds} rounds in a row broke because nodes could not reach each other, the last one "
                f"because {reason}. {self._reach.advice}"
            )
            return self.close(succeeded=False, exit_code=1, message=message)
        return self._write(next_)

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
        round_ = self._seat.round
        closed = replace(
            round_,
            state=state,
            message=message[:30_000],
            exit_code=exit_code,
            failures=failures or aged(round_.failures, self._membership.seconds),
        )
        return self._write(closed)

    @property
    def _seat(self) -> Assignment:
        assert self._membership.assignment is not None, "no round was joined yet"
        return self._membership.assignment

    def _another_ends_round(self, alive: list[Member], me: Member) -> bool:
        """Wait for this node's turn among those that are left; return whether another one was faster."""
        turn = next((turn for turn, member in enumerate(alive) if member.node == me.node), 0)
        if turn == 0:
            return False
        patience = min(_LONGEST_TURN_SECONDS, _TURN_SECONDS * turn)
        until = self._clock() + patience
        if alive[0] != self._seat.round.members[0] or self._membership.link is None:
            self._lobby.listen_to(alive[0], self._seat.round, me, patience)
        while (left := until - self._clock()) > 0 and not self._membership.has_heard_of_the_next():
            self._woken.wait(left)
            self._woken.clear()
        return self._membership.has_heard_of_the_next()

    def _why_absent(self, absent: Collection[str]) -> str:
        """Return why members of the round have never come to rank 0's node, as far as they have written it down."""
        first = self._seat.round.members[0]
        members = [member for member in self._seat.round.members if member.node in absent]
        told = []
        for member in members[:_MOST_READ]:
            row = None
            with contextlib.suppress(TableError):
                row = self._rows.read_member(member.node)
            told.append(why_absent(member, row, first, self._timings.join_timeout.total_seconds()))
        if len(members) > _MOST_READ:
            told.append(f"and {len(members) - _MOST_READ} more")
        why = "; ".join(told)
        _LOG.warning("Members of round %d have not come: %s. %s", self._seat.round.number, why, self._reach.advice)
        return why

    def _write(self, to: Round) -> bool:
        if not self._rows.end_round(self._seat.round.number, to):
            return False
        self._membership.tell(to)
        return True
