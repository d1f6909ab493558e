"""How all workers agree on one step at which they save and leave, at no cost per step.

Rank 0's agent proposes a step a little ahead of where its own workers are; every agent asks its workers, whose reader
threads answer at once whether that step is still ahead of them, and who from then on will not pass it undecided. When
all have said yes the decision is to go; when one was past the step or not training yet, nobody acts and another step is
proposed a little later (a two-phase commit whose participants cannot crash silently: a broken connection ends the
round). Every agent reports when its workers have stopped, and after the last report rank 0's agent ends the round: a
round that ended sooner would cut the save of a slower node short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from azureml_elastic.ipc.agent_interface import Action
from azureml_elastic.ipc.agent_messages import Decision, Prepare, Stopped, Vote

__all__ = ["BoundaryCoordinator", "BoundaryParticipant"]

_FIRST_MARGIN = 1
_LARGEST_MARGIN = 64
_RETRY_SECONDS = 0.05


class BoundaryParticipant:
    """A node's side of the agreement, for one round.

    Args:
        slots: number of workers of the node.

    Attributes:
        agreed: whether all workers of the round stop at one step.
        leavers: nodes that will not be in the next round, as far as this one knows; final once it is agreed.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._number = 0
        self._votes: dict[int, Vote] | None = None
        self.agreed = False
        self.leavers: frozenset[str] = frozenset()

    def ask(self, proposal: Prepare, present: frozenset[int], *, finished: bool) -> Vote | None:
        """Begin with a proposal, which the workers vote on; return the node's vote where they cannot.

        Args:
            proposal: the proposal.
            present: local ranks that can be asked.
            finished: whether a local worker's training loop has ended.
        """
        self._number, self._votes = proposal.boundary, {}
        if len(present) == self._slots:
            return None
        self._votes = None
        return Vote(proposal.boundary, ok=False, step=0, capable=False, finished=finished)

    def take(self, local_rank: int, vote: Vote, *, finished: bool) -> Vote | None:
        """Take a worker's vote; return the node's after the last one.

        Args:
            local_rank: the worker's local rank.
            vote: its vote.
            finished: whether a local worker's training loop has ended.
        """
        if self._votes is None or vote.boundary != self._number:
            return None
        self._votes[local_rank] = vote
        if len(self._votes) < self._slots:
            return None
        votes, self._votes = self._votes.values(), None
        ok = all(each.ok for each in votes) and not finished
        return Vote(self._number, ok, max(each.step for each in votes), finished=finished)

    def decided(self, decision: Decision) -> None:
        """Take rank 0's decision."""
        self.agreed = self.agreed or decision.go
        self.leavers |= {*decision.leavers}


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
        self._stopped: dict[str, Stopped] = {}

    @property
    def stopped(self) -> frozenset[str]:
        """The nodes whose workers have stopped, or whose training has ended."""
        return frozenset(self._stopped)

    @property
    def reached(self) -> bool:
        """Whether the workers of all nodes have stopped. Where all have finished instead, the run ends well."""
        return self._members <= self._stopped.keys() and not all(each.finished for each in self._stopped.values())

    def stop(self, node: str, report: Stopped) -> None:
        """Record a node's report."""
        self._stopped[node] = report

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
