"""How all workers agree on one step at which they save and leave, at no cost per step.

Rank 0's agent proposes a step a little ahead of where its own workers are; every agent asks its workers, whose reader
threads answer at once whether that step is still ahead of them, and who from then on will not pass it undecided. When
all have said yes the decision is to go; when one was past the step or not training yet, nobody acts and another step is
proposed a little later (a two-phase commit whose participants cannot crash silently: a broken connection ends the
round). Every agent reports when its workers have stopped, and after the last report rank 0's agent ends the round: a
round that ended sooner would cut the save of a slower node short.

**When waiting nodes may end a round, and when that would cost more than it brings.** A program with a session stops at
a step boundary. One without is ended, and the next round begins where the program itself resumes. Whether it resumes
shows only in what it reads: a program that saves and never reads begins anew. So a round goes on until the program has
saved, while nodes wait, a file that it has looked for at its start. Then next to nothing is lost. But the save may be
its last one, after which it evaluates or exports what it has trained, and would do all that again, or more. So it has
to go on training, too, and waits in the first step that follows until it is ended there: its worker sees both, in
:mod:`~azureml_elastic.forks.state_files` and :mod:`~azureml_elastic.forks.optimizer_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ipc.agent_interface import Action
from azureml_elastic.ipc.agent_messages import Decision, Leaving, NodeStopped, Prepare, Vote
from azureml_elastic.node.core.actions import (
    AwaitSave,
    ForgetSaves,
    HoldWorkers,
    Log,
    MoveEngine,
    ToLeader,
    ToMembers,
    TrainingAction,
)
from azureml_elastic.node.core.events import Noticed, Pace, WorkersSeen
from azureml_elastic.node.core.round import Round

# Steps between the furthest worker and a proposed one. All that a boundary is for waits for them, so they are few at
# first; where a worker was faster than the question, the next proposal is twice as far ahead.
_FIRST_MARGIN = 1
_LARGEST_MARGIN = 64
# Workers that still import, or have just passed the step, say no at once: without a pause they would be asked in a
# loop.
_RETRY_SECONDS = 0.05


class BoundaryParticipant:
    """A node's side of the agreement, for one round.

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
            present: local ranks that can be asked.
            finished: whether a local worker's training loop has ended.
        """
        self._number, self._votes = proposal.boundary, {}
        if len(present) == self._slots:
            return None
        # A worker that cannot be asked, since it still imports or has ended, might pass the step without knowing of it.
        self._votes = None
        return Vote(proposal.boundary, ok=False, step=0, capable=False, finished=finished)

    def take(self, local_rank: int, vote: Vote, *, finished: bool) -> Vote | None:
        """Take a worker's vote; return the node's after the last one.

        Args:
            finished: whether a local worker's training loop has ended.
        """
        if self._votes is None or vote.boundary != self._number:
            return None
        self._votes[local_rank] = vote
        if len(self._votes) < self._slots:
            return None
        votes, self._votes = self._votes.values(), None
        # One whose loop has ended never comes to the step, at which the others would wait for its collectives.
        ok = all(each.ok for each in votes) and not finished
        return Vote(self._number, ok, max(each.step for each in votes), finished=finished)

    def decided(self, decision: Decision) -> None:
        """Take rank 0's decision."""
        self.agreed = self.agreed or decision.go
        self.leavers |= {*decision.leavers}


class BoundaryCoordinator:
    """Rank 0's side of the agreement, for one round."""

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
        self._stopped: dict[str, NodeStopped] = {}

    @property
    def stopped(self) -> frozenset[str]:
        """The nodes whose workers have stopped, or whose training has ended."""
        return frozenset(self._stopped)

    @property
    def reached(self) -> bool:
        """Whether the workers of all nodes have stopped. Where all have finished instead, the run ends well."""
        return self._members <= self._stopped.keys() and not all(each.finished for each in self._stopped.values())

    def stop(self, node: str, report: NodeStopped) -> None:
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
        # Workers of other nodes may be further than those here: their last votes have shown how far.
        self._step = max(step, self._seen) + self._margin
        return Prepare(self._number, self._step, action)

    def take(self, node: str, vote: Vote, now: float, leavers: Sequence[str] = ()) -> Decision | None:
        """Record a node's vote; return the decision, for the agents of all members, after the last one.

        Args:
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
            # A no because a worker cannot vote yet says nothing about the margin.
            if self._seen >= self._step:
                self._margin = min(_LARGEST_MARGIN, self._margin * 2)
        return Decision(self._number, self.leaving, tuple(leavers))


_REMAINING_SECONDS = 1.0
"""A newcomer is not let in any more when the run will end sooner than this: it would only hold it up."""

_GONE_SECONDS = 5.0
"""Time without a waiting node after which the next one waits anew; hubs hold nodes back for less when several come."""


def seconds_left(pace: Pace | None, expected: int | None, step: int, now: float) -> float | None:
    """Return the seconds that training will take at its pace so far, ``None`` where that is unknown.

    Args:
        pace: when and at which step it began.
        expected: number of steps of the whole run, if known.
        step: the furthest step so far.
    """
    if expected is None or pace is None or step <= pace.step:
        return None
    return max(0, expected - step) * (now - pace.moment) / (step - pace.step)


def ends_soon(seconds: float | None) -> bool:
    """Return whether the training ends too soon for newcomers; ``None`` if it is unknown when."""
    return seconds is not None and seconds < _REMAINING_SECONDS


class Newcomers:
    """Decides when waiting nodes may end a round whose workers have no session. On rank 0's node.

    Args:
        timeout: seconds after which nodes end the round without a save, ``None`` for never.
    """

    def __init__(self, timeout: float | None, world_size: int) -> None:
        self._timeout = timeout
        self._alone = world_size == 1
        self._since: float | None = None
        self._seen = 0.0
        self._saved = False
        self._awaited: frozenset[str] = frozenset()

    @property
    def until(self) -> float | None:
        """Monotonic seconds at which they may end the round without a save."""
        return None if self._since is None or self._timeout is None else self._since + self._timeout

    def rest(self) -> list[TrainingAction]:
        """Stop looking: the workers have a session, or nobody waits any more."""
        if self._since is None:
            return []
        self._since, self._saved, self._awaited = None, False, frozenset()
        return [ForgetSaves()]

    def nobody_waits(self, now: float) -> list[TrainingAction]:
        """No node waits at this moment."""
        return self.rest() if now - self._seen >= _GONE_SECONDS else []

    def saved(self) -> None:
        """The program has saved since nodes wait, and waits in the step that follows until time has passed."""
        self._saved = self._since is not None

    def take_saved(self) -> bool:
        """Return, once, whether the program waits in the step after a save."""
        saved, self._saved = self._saved, False
        return saved

    def wait(
        self, waiting: frozenset[str], now: float, *, saved: bool, connected: bool
    ) -> tuple[bool, list[TrainingAction]]:
        """Return whether these nodes may end the round now, and what to do before.

        Args:
            saved: whether a worker waits in the step after its save. It is kept there, so that none begins another one.
            connected: whether workers of the round have begun to connect to each other. What several workers save
                before may be prepared data.
        """
        actions: list[TrainingAction] = []
        self._seen = now
        if self._since is None:
            self._since = now
        if waiting != self._awaited:
            self._awaited = waiting
            actions.append(AwaitSave(waiting))
        if (until := self.until) is not None and now >= until:
            return True, actions
        if saved and (connected or self._alone):
            return True, [*actions, HoldWorkers()]
        return False, actions


_IMPORT_SECONDS = 30.0
"""How long newcomers wait at least for the session that the program speaks of. The same rules as for a program without
a session apply then."""


class Leader:
    """Rank 0's part in one round.

    Args:
        opens_session: whether the program uses this library, so that newcomers wait for its session.
        now: monotonic seconds at which the workers were started, or received their assignments.

    Attributes:
        newcomers: when waiting nodes may end a round without a session.
    """

    def __init__(self, round_: Round, distribution: ElasticDistribution, *, opens_session: bool, now: float) -> None:
        timeout = distribution.newcomer_timeout
        self._opens_session = opens_session
        self._runs_engine = distribution.runs_engine
        self._imported = now + _IMPORT_SECONDS
        self.coordinator = BoundaryCoordinator(member.node for member in round_.members)
        self.newcomers = Newcomers(None if timeout is None else timeout.total_seconds(), round_.world_size)

    @property
    def moments(self) -> list[float | None]:
        """Monotonic seconds at which :meth:`lead` may decide otherwise, though nothing happens."""
        return [self._imported, self.coordinator.not_before, self.newcomers.until]

    def lead(
        self,
        waiting: frozenset[str],
        leavers: frozenset[str],
        workers: WorkersSeen,
        now: float,
        *,
        connected: bool,
        done: bool,
    ) -> tuple[list[TrainingAction], str | None]:
        """Return what to do; and why the round must end at once, because some workers have no session.

        Args:
            waiting: spares to make room for.
            leavers: members that are being preempted.
            workers: what this node's workers have reported.
            connected: whether workers of the round have begun to connect to each other.
            done: whether this node's workers have ended well.
        """
        coordinator, actions = self.coordinator, list[TrainingAction]()
        saved = self.newcomers.take_saved()  # in the next moment the program may have left its training loop
        if workers.in_session:
            actions += self.newcomers.rest()
        elif not waiting:
            actions += self.newcomers.nobody_waits(now)
        ending = coordinator.finished or workers.finished or done
        if coordinator.is_busy(now) or coordinator.leaving or ending or not (leavers or waiting):
            return actions, None
        # Nodes that wait would get nothing to do. A leaver is let go nevertheless: its notice does not wait.
        if not leavers and ends_soon(seconds_left(workers.pace, workers.expected, workers.step, now)):
            return actions, None
        why = f"preempted: {', '.join(sorted(leavers))}" if leavers else f"joining: {', '.join(sorted(waiting))}"
        if self._runs_engine:  # the processes stay and go on working, so that the end of the round costs nothing
            return actions, why
        if not coordinator.incapable and workers.in_session:
            action: Action = "leave" if leavers else "rejoin"
            return [*actions, ToMembers(coordinator.propose(workers.step, action))], None
        if leavers:
            return actions, why
        if not (self._opens_session and now < self._imported):
            ends, more = self.newcomers.wait(waiting, now, saved=saved, connected=connected)
            actions += more
            if ends:
                return actions, why
        if self._opens_session:
            coordinator.incapable = False  # workers may only be importing still: ask again
        return actions, None


class Departure:
    """The departure of one node from one round, perhaps never.

    Args:
        runs_engine: whether the worker is the process of an engine, which stops before it is announced to others.

    Attributes:
        notice: why and until when this node must leave, ``None`` where it need not.
    """

    def __init__(self, *, runs_engine: bool) -> None:
        self._runs_engine = runs_engine
        self._begun = self._announced = False
        self.notice: Noticed | None = None

    def begin(self) -> list[TrainingAction]:
        """Announce, once, that this node must leave."""
        if self.notice is None or self._begun:
            return []
        self._begun = True
        log = Log(f"This node is being preempted ({self.notice.reason}); leaving at the next step.", warning=True)
        return [log, MoveEngine()] if self._runs_engine else [log, *self.announce()]

    def announce(self) -> list[TrainingAction]:
        """Report to rank 0's agent, once, that this node will not be in the next round."""
        if self._announced:
            return []
        self._announced = True
        return [ToLeader(Leaving())]

    def is_overdue(self, now: float) -> bool:
        """Return whether the time of the notice is over."""
        return self.notice is not None and now >= self.notice.until

    def seconds_left(self, now: float) -> float | None:
        """Return how long the workers may still take, ``None`` without a notice."""
        return None if self.notice is None else max(0.0, self.notice.until - now)
