"""The workers of a round: one process a node, each with a step of its own.

None completes a step before all have given their part to it. A worker votes by the step that it has completed itself,
saves for as long as it takes, and hands its state over to its node's agent when it ends. One of a program without a
session does none of these: it saves every few steps, and perhaps when it has to end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from azureml_elastic.ipc.worker_messages import Decide, Prepare, Vote
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.failures import Failure, FailureKind
from azureml_elastic.node.core.round import Round

if TYPE_CHECKING:
    from tests.support.schedules.node import Node
    from tests.support.schedules.schedule import Schedule

STEP_SECONDS = 0.3

_SAVE_STEPS = 7
"""Steps between two saves of a program without a session."""


@dataclass
class Worker:
    """The worker of a node.

    Args:
        running: whether it trains, or has ended well.
        step: last step that it has completed.
        begun: last step that it has begun.
        given: last step to which it has given its part.
        saving: whether it saves, at a boundary or by itself.
        held: whether it waits in the step after a save, for a moment.
        kept: whether it waits there until it is ended.
    """

    node: Node
    running: bool = True
    step: int = 0
    begun: int = 0
    given: int = 0
    hold: int | None = None
    boundary: int = 0
    agreed: bool = False
    saving: bool = False
    stopped: bool = False
    held: bool = False
    kept: bool = False
    failure: FailureKind | None = None
    leaving: bool = False
    exited: bool = False
    pace: ev.Pace | None = None
    votes: list[ev.WorkerVoted] = field(default_factory=list)


class Group:
    """The workers of one sealed round.

    Args:
        schedule: everything around it.
        round_: the round.

    Attributes:
        began: the step from which it goes on.
        stepped: when a step was given the last part.
        saves_since: when workers began to save at the boundary.
    """

    def __init__(self, schedule: Schedule, round_: Round) -> None:
        self.schedule, self.world, self.round = schedule, schedule.world, round_
        self.workers: dict[str, Worker] = {}
        self.began = self.step = 0
        self.connecting = False
        self.broken = False
        self.stepped = self.saves_since = 0.0

    def __repr__(self) -> str:
        return f"round {self.round.number}"

    def start(self, node: Node) -> None:
        """The worker of a node is there; the last one begins the training."""
        self.workers[node.incarnation] = Worker(node, running=not self.broken)
        if len(self.workers) == len(self.round.members) and not self.broken:
            self.connecting = True
            self.began = self.step = self.schedule.start_of(self)
            for worker in self.workers.values():
                worker.step = worker.begun = worker.given = self.began
                self._later(STEP_SECONDS, worker, self._advance)
                worker.node.wake()

    def _later(self, seconds: float, worker: Worker, what) -> None:
        """Have a worker do something after some time in which its node runs."""
        self.world.after(seconds, lambda: worker.node.when_running(partial(what, worker)))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _advance(self, worker: Worker) -> None:
        """Begin the next step, unless the worker waits at a boundary or has finished."""
        if not worker.running or worker.saving or worker.stopped or worker.held or worker.kept:
            return
        if worker.hold is not None and worker.step >= worker.hold:
            if worker.agreed:
                self._save(worker)
        elif worker.step >= self.schedule.steps:
            self._later(self.world.random.choice((0.0, 0.5, 2.5)), worker, self._exits)
            worker.node.wake()
        elif worker.begun == worker.step and not self.broken:
            worker.begun += 1
            self._later(STEP_SECONDS * self.world.random.uniform(0.8, 1.0), worker, self._give)

    def _give(self, worker: Worker) -> None:
        """Give the part of a worker to its step, which the last one completes."""
        schedule, world = self.schedule, self.world
        if self.broken or not worker.running:
            return
        if world.now < schedule.stuck_until:
            self._later(STEP_SECONDS, worker, self._give)
            return
        worker.given = worker.begun
        if any(each.given < worker.given for each in self.workers.values()):
            return
        schedule.begins(self)
        self.step, self.stepped = worker.given, world.now
        for each in self.workers.values():
            slow = world.random.random() < 0.05
            self._later(world.random.uniform(0.0, 0.25 if slow else 0.02), each, self._complete)

    def _complete(self, worker: Worker) -> None:
        if not worker.running:
            return
        worker.step = worker.given
        worker.pace = worker.pace or ev.Pace(worker.node.now, worker.step)
        self.schedule.completed(self, worker)
        saves = not self.schedule.opens_session and worker.step % _SAVE_STEPS == 0
        if saves and worker.node.name == self.round.members[0].node:
            worker.saving = True
            self._later(self.world.random.uniform(0.02, 0.6), worker, self._has_saved)
        self._advance(worker)

    def _has_saved(self, worker: Worker) -> None:
        """A program without a session has saved, and trains on, after a moment where nodes wait."""
        if not worker.running:
            return
        self.schedule.saved(worker.step)
        worker.saving, worker.held = False, worker.node.awaits_save
        if worker.held:
            worker.node.program_saved()
            self._later(self.world.random.uniform(0.02, 1.0), worker, self._let_go)
        self._advance(worker)

    def _let_go(self, worker: Worker) -> None:
        worker.held = False
        self._advance(worker)

    @staticmethod
    def _exits(worker: Worker) -> None:
        worker.exited = True
        worker.node.wake()

    # --- the boundary ------------------------------------------------------------------------------------------------

    def ask(self, node: Node, proposal: Prepare) -> None:
        worker = self.workers[node.incarnation]
        ok = worker.step < proposal.step and worker.running and not worker.agreed
        if ok:
            worker.hold, worker.boundary = proposal.step, proposal.boundary
        vote = ev.WorkerVoted(0, Vote(proposal.boundary, ok, worker.step))
        self.world.after(
            self.world.random.uniform(0.0005, 0.01), lambda: (worker.votes.append(vote), node.when_running(node.wake))
        )

    def tell(self, node: Node, decision: Decide) -> None:
        worker = self.workers.get(node.incarnation)
        if worker is not None and decision.boundary == worker.boundary:
            worker.agreed = decision.go
            worker.hold = worker.hold if decision.go else None
            self._advance(worker)

    def _save(self, worker: Worker) -> None:
        self.saves_since = self.saves_since or self.world.now
        worker.saving = True
        self._later(0.0 if self.schedule.stays else self.world.random.uniform(0.0, 2.0), worker, self._has_stopped)

    def _has_stopped(self, worker: Worker) -> None:
        if worker.running:
            worker.saving, worker.stopped = False, True
            if not self.schedule.stays:
                self.schedule.saved(worker.step)
            worker.node.wake()

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self, node: Node, seconds: float | None = None) -> float:
        """The worker of a node ends because the round does; the others cannot go on.

        Args:
            seconds: how long it may take, ``None`` for as long as it takes.

        Returns:
            How long it takes.
        """
        worker = self.workers.get(node.incarnation)
        if worker is None or not worker.running:
            return 0.0
        self.schedule.interrupted(self, worker)
        worker.running = False
        takes = self.world.random.uniform(0.0, 0.1)
        if self.schedule.opens_session:
            self.schedule.hands_over(worker)
        elif self.schedule.saves_at_end and node.name == self.round.members[0].node:
            takes = self.world.random.uniform(0.0, 4.0)
            if seconds is None or takes < seconds:
                self._later(takes, worker, lambda _: self.schedule.saved(worker.step))
        self._break(worker)
        return takes if seconds is None else min(takes, seconds)

    def lost(self, node: Node) -> None:
        """A node's process has ended, and its worker with it: the workers of others may fail of that."""
        worker = self.workers.pop(node.incarnation, None)
        if self.broken:
            return
        if worker is None:
            self.broken = True
        else:
            self._break(worker)
        for other in [each for each in self.workers.values() if self.broken]:
            if self.world.random.random() < 0.5:
                kind = self.schedule.ends_without(other)
                self.world.after(self.world.random.uniform(0.0, 0.3), partial(self.fail, other.node, kind))

    def fail(self, node: Node, kind: FailureKind) -> None:
        """The worker of a node fails."""
        worker = self.workers.get(node.incarnation)
        if worker is None or not worker.running or not node.alive or worker.step >= self.schedule.steps:
            return
        # A script that ends by an error of its own may be in half a step.
        if self.schedule.opens_session and kind == "peer":
            self.schedule.hands_over(worker)
        worker.running, worker.failure, worker.leaving = False, kind, self.schedule.opens_session
        self._break(worker)
        node.when_running(node.wake)
        self._later(0.05, worker, self._has_sent_all)

    @staticmethod
    def _has_sent_all(worker: Worker) -> None:
        worker.leaving = False
        worker.node.wake()

    def _break(self, worker: Worker) -> None:
        """Without this worker no further step is completed, unless it has given its part to all of them."""
        self.broken = self.broken or worker.given < self.schedule.steps

    # --- what agents see ---------------------------------------------------------------------------------------------

    def report(self, node: Node) -> tuple[ev.WorkersSeen, list[ev.WorkerVoted]]:
        """Return what a node's worker has reported, and its votes."""
        worker = self.workers[node.incarnation]
        votes, worker.votes = worker.votes, []
        mine, none, schedule = frozenset({0}), frozenset[int](), self.schedule
        code = 1 if worker.failure is not None else 0 if worker.exited else None
        if worker.stopped and not schedule.stays:
            code = 0
        codes = {} if code is None else {0: code}
        if not schedule.opens_session:
            return ev.WorkersSeen(exit_codes=codes), votes
        finished = self.connecting and worker.step >= schedule.steps
        return (
            ev.WorkersSeen(
                present=mine if worker.running and not codes else none,
                in_session=True,
                trained=worker.step > self.began,
                leaving=worker.leaving,
                step=worker.step,
                pace=worker.pace,
                expected=schedule.steps,
                finished=mine if finished else none,
                stopped=mine if worker.stopped else none,
                exit_codes=codes,
            ),
            votes,
        )

    def failures(self, node: Node) -> ev.Failures:
        """Return how the worker of a node has failed."""
        worker = self.workers[node.incarnation]
        kind = worker.failure or "user"
        code = -9 if kind == "killed" else 1
        # Not conclusive: two failures at one step are not the same one.
        failure = Failure(0, 137 if code == -9 else 1, "failed", kind, f"{kind} {worker.step}", conclusive=False)
        return ev.Failures({0: code}, failure, "exit code 1", None)
