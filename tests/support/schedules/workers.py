"""The workers of a round: one process a node, none of which begins a step before all have completed the one before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from azureml_elastic.ipc.worker_messages import Decide, Prepare, Vote
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.failures import Failure, FailureKind
from azureml_elastic.node.core.round import Round

if TYPE_CHECKING:
    from tests.support.schedules.node import Node
    from tests.support.schedules.schedule import Schedule

__all__ = ["Group"]

STEP_SECONDS = 0.3


@dataclass
class _Worker:
    running: bool = True
    hold: int | None = None
    boundary: int = 0
    agreed: bool = False
    stopped: bool = False
    failure: FailureKind | None = None
    leaving: bool = False
    votes: list[ev.WorkerVoted] = field(default_factory=list)


class Group:
    """The workers of one sealed round.

    Args:
        schedule: everything around it.
        round_: the round.
    """

    def __init__(self, schedule: Schedule, round_: Round) -> None:
        self.schedule, self.round = schedule, round_
        self.workers: dict[str, _Worker] = {}
        self.step = schedule.progress
        self.began = self.step
        self.connecting = False
        self.broken = False

    def start(self, node: Node) -> None:
        """The worker of a node is there; the last one begins the training."""
        self.workers[node.incarnation] = _Worker(running=not self.broken)
        if len(self.workers) == len(self.round.members):
            self.connecting = True
            self.schedule.world.after(STEP_SECONDS, self._try_step)

    def _try_step(self) -> None:
        """Complete a step if all take part in it."""
        schedule, world = self.schedule, self.schedule.world
        if self.broken or any(not worker.running for worker in self.workers.values()):
            return
        world.after(STEP_SECONDS, self._try_step)
        processes = {node.incarnation: node for node in world.nodes}
        if any(processes[each].frozen for each in self.workers):
            return
        held = [worker for worker in self.workers.values() if worker.hold is not None and self.step >= worker.hold]
        if any(worker.agreed for worker in held):
            for incarnation, worker in list(self.workers.items()):
                worker.stopped = worker.agreed and self.step >= (worker.hold or 0)
                processes[incarnation].wake()
            return
        if held or self.step >= schedule.steps:
            return
        schedule.begins(self)
        self.step += 1
        schedule.completed(self)
        if self.step >= schedule.steps:
            for incarnation in list(self.workers):
                processes[incarnation].wake()

    def ask(self, node: Node, proposal: Prepare) -> None:
        worker = self.workers[node.incarnation]
        ok = self.step < proposal.step and worker.running and not worker.agreed
        if ok:
            worker.hold, worker.boundary = proposal.step, proposal.boundary
        worker.votes.append(ev.WorkerVoted(0, Vote(proposal.boundary, ok, self.step)))
        self.schedule.world.after(0.001, lambda: node.when_running(node.wake))

    def tell(self, node: Node, decision: Decide) -> None:
        worker = self.workers[node.incarnation]
        if decision.boundary == worker.boundary:
            worker.agreed = decision.go
            worker.hold = worker.hold if decision.go else None

    def end(self, node: Node) -> None:
        """The worker of a node ends because the round does; the others cannot go on."""
        worker = self.workers.get(node.incarnation)
        if worker is not None and worker.running:
            worker.running = False
            self._break()

    def lost(self, node: Node) -> None:
        """A node's process has ended, and its worker with it: the workers of others may fail of that."""
        self.workers.pop(node.incarnation, None)
        if not self.broken:
            self._break()
            world = self.schedule.world
            for other in [each for each in world.nodes if each.incarnation in self.workers]:
                if world.random.random() < 0.5:
                    world.after(world.random.uniform(0.0, 0.3), lambda other=other: self.fail(other, "peer"))

    def fail(self, node: Node, kind: FailureKind) -> None:
        """The worker of a node fails."""
        worker = self.workers.get(node.incarnation)
        if worker is None or not worker.running or not node.alive:
            return
        worker.running, worker.failure, worker.leaving = False, kind, True
        self._break()
        node.when_running(node.wake)
        self.schedule.world.after(0.05, lambda: self._has_sent_all(node, worker))

    @staticmethod
    def _has_sent_all(node: Node, worker: _Worker) -> None:
        worker.leaving = False
        node.when_running(node.wake)

    def _break(self) -> None:
        self.broken = True

    def report(self, node: Node) -> tuple[ev.WorkersSeen, list[ev.WorkerVoted]]:
        """Return what a node's worker has reported, and its votes."""
        worker = self.workers[node.incarnation]
        votes, worker.votes = worker.votes, []
        mine = frozenset({0})
        done = self.step >= self.schedule.steps and worker.running and self.connecting and not self.broken
        finished = done and (worker.hold is None or worker.hold > self.step)
        codes = {0: 1} if worker.failure is not None else {0: 0} if finished or worker.stopped else {}
        trained = self.step > self.began
        return (
            ev.WorkersSeen(
                present=mine if worker.running and not codes else frozenset(),
                in_session=True,
                placed=True,
                connected=self.connecting,
                trained=trained,
                leaving=worker.leaving,
                step=self.step,
                finished=mine if finished else frozenset(),
                stopped=mine if worker.stopped else frozenset(),
                exit_codes=codes,
            ),
            votes,
        )

    def failures(self, node: Node) -> ev.Failures:
        kind = self.workers[node.incarnation].failure or "user"
        code = -9 if kind == "killed" else 1
        failure = Failure(0, 137 if code == -9 else 1, "failed", kind, f"{kind} {self.step}", conclusive=False)
        return ev.Failures({0: code}, failure, "exit code 1", None)
