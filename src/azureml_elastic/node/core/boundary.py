"""How all workers agree on one step at which they save and leave, at no cost per step.

Rank 0's agent proposes a step a little ahead of where its own workers are; every agent asks its workers, whose reader
threads answer at once whether that step is still ahead of them, and who from then on will not pass it undecided. When
all have said yes the decision is to go; when one was past the step or not training yet, nobody acts and another step is
proposed a little later (a two-phase commit whose participants cannot crash silently: a broken connection ends the
round).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from azureml_elastic.ipc.agent_interface import Action
from azureml_elastic.ipc.agent_messages import Decision, Prepare, Vote

__all__ = ["Ballot", "BoundaryCoordinator"]

_FIRST_MARGIN = 1
_LARGEST_MARGIN = 64
_RETRY_SECONDS = 0.05


@dataclass
class Ballot:
    """The votes of one node's workers on a proposal, which become the node's.

    Args:
        boundary: the proposal's number.
        voters: the local ranks that must answer.
    """

    boundary: int
    voters: frozenset[int]
    votes: dict[int, Vote] = field(default_factory=dict)

    def take(self, local_rank: int, vote: Vote, *, finished: bool) -> Vote | None:
        """Take a worker's vote; return the node's after the last one.

        Args:
            local_rank: the worker's local rank.
            vote: its vote.
            finished: whether a local worker's training loop has ended.
        """
        if vote.boundary != self.boundary:
            return None
        self.votes[local_rank] = vote
        if not self.voters <= self.votes.keys():
            return None
        return Vote(
            self.boundary,
            ok=all(each.ok for each in self.votes.values()) and not finished,
            step=max(each.step for each in self.votes.values()),
            finished=finished,
        )


class BoundaryCoordinator:
    """Rank 0's side of the agreement, for one round.

    Args:
        members: names of the round's nodes.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self._members = frozenset(members)
        self._number = 0
        self._margin = _FIRST_MARGIN
        self._pending = False
        self.not_before = 0.0
        self._answers: dict[str, Vote] = {}
        self._step = 0
        self._seen = 0
        self.incapable = False
        """Whether, at the last attempt, some node's workers had no session: perhaps not yet."""
        self.finished = False
        """Whether some worker's training loop has ended: the run is about to end."""
        self.leaving = False
        """Whether all workers are about to leave at a step."""

    def is_busy(self, now: float) -> bool:
        """Return whether a proposal is under way, or the next one has to wait; ``now`` is in monotonic seconds."""
        return self._pending or now < self.not_before

    def propose(self, step: int, action: Action = "leave") -> Prepare:
        """Return the proposal, for the agents of all members, that workers do something soon after a step.

        Args:
            step: last step that a local worker has completed.
            action: ``leave`` after a checkpoint, or ``rejoin`` with the state in memory.
        """
        self._number += 1
        self._pending = True
        self._answers = {}
        self._step = max(step, self._seen) + self._margin
        return Prepare(self._number, self._step, action)

    def take(self, node: str, vote: Vote, now: float, leavers: Sequence[str] = ()) -> Decision | None:
        """Record a node's vote; return the decision, for the agents of all members, after the last one.

        Args:
            node: name of the node.
            vote: its vote.
            now: monotonic seconds.
            leavers: nodes that will not be in the next round, for the decision.
        """
        if not self._pending or vote.boundary != self._number:
            return None
        self.finished = self.finished or vote.finished
        self._answers[node] = vote
        if not self._members <= self._answers.keys():
            return None
        self._pending = False
        replies = self._answers.values()
        self.incapable = not all(reply.capable for reply in replies)
        self._seen = max(self._seen, *(reply.step for reply in replies))
        self.leaving = all(reply.ok for reply in replies)
        if not self.leaving:
            self.not_before = now + _RETRY_SECONDS
            if self._seen >= self._step:
                self._margin = min(_LARGEST_MARGIN, self._margin * 2)
        return Decision(self._number, self.leaving, tuple(leavers))
