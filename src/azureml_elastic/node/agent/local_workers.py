"""The workers of this node that are connected to the agent, and what they have reported in the present round."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from azureml_elastic.ipc import Connection
from azureml_elastic.ipc.worker_messages import (
    FROM_AGENT,
    AgentMessage,
    Assign,
    Decide,
    Hello,
    Interrupt,
    Leave,
    Prepare,
    Vote,
)
from azureml_elastic.node.core.events import Pace, WorkersSeen
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer


@dataclass
class WorkerState:
    """A connected worker.

    Args:
        stays: whether it waits for a place in each round, as it did before its first one.
        round: number of its round, 0 before its first assignment.
        pointer: checkpoint pointer of that round, on rank 0's node only.
    """

    local_rank: int
    rank: int
    stays: bool
    round: int
    pointer: CheckpointPointer | None


@dataclass
class RoundState:
    """What the workers have reported in one round.

    Args:
        size: number of workers of this node.
        pointer: checkpoint pointer, on rank 0's node only.
        stopped: local ranks that have left at a step boundary.
        finished: local ranks whose training loop has ended.
        gave_way: local ranks that exit because the round is over or cannot go on.
        step: furthest step that one has completed.
        pace: when and at which step training began.
        votes: answers to proposals, by local rank, that were not taken yet.
    """

    number: int = 0
    size: int = 0
    pointer: CheckpointPointer | None = None
    stopped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    gave_way: set[int] = field(default_factory=set)
    trained: bool = False
    step: int = 0
    pace: Pace | None = None
    votes: list[tuple[int, Vote]] = field(default_factory=list)


class LocalWorkers:
    """Connections and reports of the local workers. Thread-safe.

    Attributes:
        expected: number of steps of the whole run, ``None`` while it is unknown.
    """

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._lock = threading.RLock()
        self._round = RoundState()
        self._workers: dict[int, Connection] = {}
        self._greeted: set[int] = set()
        self._parked: set[int] = set()
        self._interrupted = self._released = False
        self.expected: int | None = None

    @property
    def round(self) -> RoundState:
        """The state of the present round."""
        with self._lock:
            return self._round

    def begin(self, state: RoundState, *, keep: bool) -> None:
        """Replace the round's state, and forget the workers unless they stay."""
        with self._lock:
            self._round, self._interrupted = state, False
            if not keep:
                self._workers, self._greeted, self._parked, self._released = {}, set(), set(), False

    def find(self, connection: Connection) -> WorkerState | None:
        """Return the worker of a connection, ``None`` where another connection has replaced it or none was greeted."""
        worker: WorkerState | None = connection.state.get("worker")
        with self._lock:
            return worker if worker is not None and self._workers.get(worker.local_rank) is connection else None

    def greet(self, connection: Connection, hello: Hello) -> bool:
        """Add a worker, unless its round is over or the node has no such local rank."""
        with self._lock:
            # One that comes after the release has missed the end of its round, and ignores SIGTERM from now on.
            # A worker of round 0 receives its assignment later.
            if self._released or hello.round not in (self._round.number, 0) or hello.local_rank >= self._round.size > 0:
                return False
            worker = WorkerState(hello.local_rank, hello.rank, hello.round == 0, hello.round, self._round.pointer)
            connection.state["worker"] = worker
            self._workers[hello.local_rank] = connection
            self._greeted.add(hello.local_rank)
            if self._interrupted and hello.round:
                _send([connection], Interrupt(min(self._workers)))
            return True

    def remove(self, connection: Connection) -> None:
        """Remove the worker of a connection that has ended."""
        with self._lock:
            worker = self.find(connection)  # a worker that has connected again in the meantime stays
            if worker is not None:
                del self._workers[worker.local_rank]
                self._parked.discard(worker.local_rank)

    def park(self, local_rank: int) -> None:
        """Record that a worker waits for its assignment."""
        with self._lock:
            self._parked.add(local_rank)

    def advance(self, state: RoundState, step: int, *, completed: bool) -> None:
        """Record the step that a worker has reached.

        Args:
            completed: whether the worker has trained it, rather than restored it.
        """
        with self._lock:
            if not completed or state.pace is None:
                state.pace = Pace(time.monotonic(), step)
            state.trained = state.trained or completed
            state.step = max(state.step, step)

    def end(self, state: RoundState, local_rank: int, step: int, *, finished: bool) -> None:
        """Record that a worker's training has ended, or that it has left at a step boundary."""
        with self._lock:
            (state.finished if finished else state.stopped).add(local_rank)
            state.step = max(state.step, step)

    def give_way(self, state: RoundState, local_rank: int) -> None:
        """Record that a worker exits without having failed."""
        with self._lock:
            state.gave_way.add(local_rank)

    def answer(self, state: RoundState, local_rank: int, vote: Vote) -> None:
        """Record a worker's answer to a proposal."""
        with self._lock:
            state.votes.append((local_rank, vote))
        self._queue.wake()

    def assign(self, assignments: Mapping[int, Assign]) -> None:
        """Send the parked workers their assignments, by local rank."""
        with self._lock:
            pointer = self._round.pointer
            # A worker that has died meanwhile is found by its exit code.
            targets = [(self._workers[rank], each) for rank, each in assignments.items() if rank in self._workers]
            self._parked.clear()
        for connection, assignment in targets:
            worker: WorkerState = connection.state["worker"]
            worker.round, worker.pointer, worker.rank = assignment.round, pointer, assignment.rank
            _send([connection], assignment)

    def interrupt(self) -> None:
        """Send the workers that the round is over: they hand their state over and park."""
        with self._lock:
            # Parked workers have handed their state over, and those that have stopped at a step boundary have saved it:
            # neither has anything left to break off.
            self._interrupted = True
            gone = self._round.stopped | self._parked
            targets = [connection for rank, connection in self._workers.items() if rank not in gone]
            whole = min(self._workers, default=0)
        _send(targets, Interrupt(whole))

    def release(self) -> None:
        """Interrupt the workers, and have those that wait for a place, or will, hand their state over and end."""
        with self._lock:
            self._released = True
            staying = [connection for connection in self._workers.values() if connection.state["worker"].stays]
        _send(staying, Leave())
        self.interrupt()

    def send(self, message: Prepare | Decide | Leave) -> None:
        """Send all workers a message: a proposal, whose votes :meth:`take_votes` returns later, or the decision.

        ``Leave`` has an engine move what it holds to other nodes; it reports that it has stopped.
        """
        with self._lock:
            targets = list(self._workers.values())
        _send(targets, message)

    def cut(self) -> None:
        """Close all connections, at which the workers' sessions end their processes at once."""
        with self._lock:
            workers = list(self._workers.values())
        for connection in workers:
            connection.close("its round is over")

    @property
    def step(self) -> int:
        """The furthest step that a local worker has completed in this round."""
        with self._lock:
            return self._round.step

    @property
    def parked(self) -> frozenset[int]:
        """The local ranks that wait for an assignment."""
        with self._lock:
            return frozenset(self._parked)

    def report(self, exit_codes: Mapping[int, int] | None = None) -> WorkersSeen:
        """Return all that the workers have reported in this round.

        Args:
            exit_codes: exit codes of those that have ended, read before.
        """
        with self._lock:
            state = self._round
            return WorkersSeen(
                present=frozenset(self._workers),
                in_session=self.in_session,
                trained=state.trained,
                leaving=self.leaving,
                step=state.step,
                pace=state.pace,
                expected=self.expected,
                finished=frozenset(state.finished),
                stopped=frozenset(state.stopped),
                gave_way=frozenset(state.gave_way),
                exit_codes=exit_codes or {},
            )

    @property
    def in_session(self) -> bool:
        """Whether every local worker has, or has had, a session."""
        with self._lock:
            return len(self._greeted) == self._round.size

    @property
    def leaving(self) -> bool:
        """Whether a worker is connected that ends by itself once it is interrupted: one that is not parked for good."""
        with self._lock:
            return bool(self._workers if self._released else self._workers.keys() - self._parked)

    def take_votes(self) -> list[tuple[int, Vote]]:
        """Return, once each, the votes of this round by local rank."""
        with self._lock:
            votes, self._round.votes = self._round.votes, []
            return votes


def _send(connections: list[Connection], message: AgentMessage) -> None:
    fields = FROM_AGENT.encode(message)
    for connection in connections:
        connection.send(fields)
