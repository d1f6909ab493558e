"""How a node ends its round, or the run: whose turn it is, and what is written about members that never connected."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import TableError
from azureml_elastic.node.failures.restart_policy import FailureRecord, aged
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.hub.messages import RoundChanged
from azureml_elastic.node.rendezvous.hub.watch import HubWatch
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, describe_absence
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import LatestRound
from azureml_elastic.node.rendezvous.state.rows import Rows
from azureml_elastic.node.rendezvous.state.sealing import reopened

__all__ = ["RoundEnd"]

_LOG = logging.getLogger(__name__)

_TURN_SECONDS = 0.05
"""Time that each survivor gives the one before it to end a broken round."""

_MAX_TURN_SECONDS = 1.0
"""Longest time that a survivor waits for all those before it."""

_MAX_DESCRIBED = 3
"""Largest number of members that never connected whose rows are read for the reason."""


class RoundEnd:
    """The end of this node's rounds. For the agent's thread.

    Args:
        membership: the round joined last.
        rows: table rows.
        hub: this node's own hub.
        watch: connection to the hub of the node that should end the round.
        wake: event that is set when a hub has sent something.
        reachability: source of the advice about nodes that could not connect.
        timings: join timeout and largest number of failed rounds.
        clock: clock in monotonic seconds.
        latest: newest version of the round.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        rows: Rows,
        hub: Hub,
        watch: HubWatch,
        wake: threading.Event,
        reachability: Reachability,
        timings: RendezvousTimings,
        clock: Callable[[], float],
        latest: LatestRound,
    ) -> None:
        self._membership = membership
        self._rows = rows
        self._hub = hub
        self._watch = watch
        self._wake = wake
        self._reachability = reachability
        self._timings = timings
        self._clock = clock
        self._latest = latest

    def reopen(
        self,
        me: Member,
        reason: str,
        *,
        lost: frozenset[str] = frozenset(),
        failures: tuple[FailureRecord, ...] = (),
        round_failed: bool = False,
    ) -> bool:
        """End the current round so that another can form, or the run after too many failed rounds.

        Args:
            me: this node.
            reason: why, for the ledger.
            lost: members that will not return.
            failures: the run's failures with the one that ends the round; none when no worker has failed.
            round_failed: whether the round ends because its nodes could not connect to each other.

        Returns:
            Whether this node has ended it; otherwise another one was first, and nothing is charged.
        """
        round_ = self._round
        if self._latest.after(round_) is not None:
            return False
        if not failures and me.node not in lost and self._another_node_ends(round_, lost, me):
            return False
        absent = self._absent() & lost
        if absent and not failures:
            round_failed = round_failed or lost == absent
            reason = f"{reason}: {self._describe_absent(round_, absent)}"
        next_ = reopened(
            round_,
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
                f"because {reason}. {self._reachability.advice}"
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
        """End the run for all nodes, and return whether this node has ended it."""
        closed = replace(
            self._round,
            state="succeeded" if succeeded else "failed",
            message=message[:30_000],
            exit_code=exit_code,
            failures=failures or aged(self._round.failures, self._membership.seconds),
        )
        return self._write(closed)

    @property
    def _round(self) -> Round:
        assert self._membership.assignment is not None, "no round was joined yet"
        return self._membership.assignment.round

    def _another_node_ends(self, round_: Round, lost: frozenset[str], me: Member) -> bool:
        """Wait for this node's turn among the survivors; return whether another one has ended the round.

        Rank 0, or the first survivor after it, ends the round. The others make sure that it is ended.
        """
        alive = [member for member in round_.members if member.node not in lost]
        turn = next((turn for turn, member in enumerate(alive) if member.node == me.node), 0)
        if turn == 0:
            return False
        timeout = min(_MAX_TURN_SECONDS, _TURN_SECONDS * turn)
        until = self._clock() + timeout
        if alive[0] != round_.members[0] or self._membership.link is None:
            self._watch.connect(alive[0], round_, me, "the next to end the round", timeout)
        while (left := until - self._clock()) > 0 and self._latest.after(round_) is None:
            self._wake.wait(left)
            self._wake.clear()
        return self._latest.after(round_) is not None

    def _absent(self) -> frozenset[str]:
        """Return the lost members that have never connected to rank 0's hub."""
        absent = self._membership.link.absent if self._membership.link is not None else frozenset()
        return absent | self._hub.view().absent if self._membership.leads else absent

    def _describe_absent(self, round_: Round, absent: frozenset[str]) -> str:
        """Return why members have never connected to rank 0's hub, as far as their rows say."""
        members = [member for member in round_.members if member.node in absent]
        texts = []
        for member in members[:_MAX_DESCRIBED]:
            row = None
            with contextlib.suppress(TableError):
                row = self._rows.read_member(member.node)
            texts.append(describe_absence(member, row, round_.members[0], self._timings.join_timeout.total_seconds()))
        if len(members) > _MAX_DESCRIBED:
            texts.append(f"and {len(members) - _MAX_DESCRIBED} more")
        reason = "; ".join(texts)
        _LOG.warning("Members of round %d have not connected: %s. %s", round_.number, reason, self._reachability.advice)
        return reason

    def _write(self, to: Round) -> bool:
        """Write the next version of the round and send it to all connected nodes."""
        if not self._rows.end_round(self._round.number, to):
            return False
        self._hub.publish(to)
        self._membership.send_to_leader(RoundChanged(to))
        return True
