"""The agent's side of the channel to its workers: a Unix socket that the training session connects to.

Workers never access the table. They report their steps to the agent, request the committed checkpoint, request commits
of new ones, and receive the step at which to save or to leave. A script without a session never connects, and is
restarted at each change as under torchrun. The messages are in :mod:`azureml_elastic.ipc.worker_messages`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots
from azureml_elastic.ipc import Connection, MessageServer, listen, worker_messages
from azureml_elastic.ipc.worker_messages import FROM_AGENT, FROM_WORKER, AgentMessage, Assign, Decide, Prepare
from azureml_elastic.ledger.events import CheckpointQuarantined, Progress, Restored
from azureml_elastic.node.agent.event_recorder import Recorder
from azureml_elastic.node.agent.pointer_service import PointerService
from azureml_elastic.node.agent.step_boundary import BoundaryVote
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.rendezvous.hub.inbox import Inbox, LocalVote
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

__all__ = ["Channel"]

_PROGRESS_SECONDS = 0.05
_LONGEST_FOLDER_BYTES = 70


@dataclass
class _Worker:
    """A connected worker.

    Args:
        local_rank: rank on the node.
        rank: rank in the round.
        round: number of its round, 0 before its first assignment.
        pointer: checkpoint pointer of that round, on rank 0's node only.
    """

    local_rank: int
    rank: int
    round: int
    pointer: CheckpointPointer | None


@dataclass
class _RoundState:
    """What the workers have reported in one round.

    Args:
        number: number of the round.
        size: number of workers of this node.
        pointer: checkpoint pointer, on rank 0's node only.
        stopped: local ranks that have left at a step boundary.
        finished: local ranks whose training loop has ended.
        connected: whether the ranks of the round have connected to each other.
        trained: whether a local worker has completed a step.
        step: furthest step that one has completed.
        began: monotonic seconds and step at which training began.
        vote: answers to the proposal under way.
    """

    number: int = 0
    size: int = 0
    pointer: CheckpointPointer | None = None
    stopped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    connected: bool = False
    trained: bool = False
    step: int = 0
    began: tuple[float, int] | None = None
    vote: BoundaryVote | None = None


class Channel:
    """Serves the local workers. Its methods are for the agent's thread.

    Args:
        recorder: writer of the ledger's events.
        inbox: queue for the workers' votes on step boundaries.
        wake: callback for changes, called from the channel's thread.
        watch: detector of hanging workers.
        local: snapshots on this node's disk, ``None`` without them.

    Attributes:
        folder: folder on a local disk, in which workers may create files.
        path: path of the socket.
        ended_well: whether the run has succeeded, so that nothing on the disk is needed any more.
    """

    def __init__(
        self,
        recorder: Recorder,
        inbox: Inbox,
        wake: Callable[[], None],
        watch: HangDetector,
        local: LocalSnapshots | None = None,
    ) -> None:
        self._recorder = recorder
        self._inbox = inbox
        self._watch = watch
        self._wake = wake
        self._lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="elastic-", dir=_folder_for_sockets()))
        self.path = str(self.folder / "agent.sock")
        self.ended_well = False
        self._round = _RoundState()
        self._workers: dict[int, Connection] = {}
        self._greeted: set[int] = set()
        self._parked: set[int] = set()
        self._expected: int | None = None
        self._recorded = 0.0
        self._memories = AgentMemory(local)
        self._pointers = PointerService(recorder)
        self._server = MessageServer(listen(self.path), self._on_message, self._on_close)

    def begin(self, number: int, size: int, pointer: CheckpointPointer | None, *, keep: bool = False) -> None:
        """Serve a new round's workers, and cut off those of the round before.

        Args:
            number: number of the round.
            size: number of workers of this node.
            pointer: the checkpoint's row in the table, on rank 0's node only.
            keep: whether the parked workers stay, to be assigned to this round.
        """
        if not keep:
            self.cut()
        with self._lock:
            self._round = _RoundState(number, size, pointer)
            if not keep:
                self._workers, self._greeted, self._parked = {}, set(), set()
        if pointer is not None:
            self._pointers.take_over(pointer)

    def assign(self, assignments: Mapping[int, Assign]) -> None:
        """Send the parked workers their assignments, by local rank."""
        with self._lock:
            pointer = self._round.pointer
            # A worker that has died meanwhile is found by its exit code.
            targets = [(self._workers[rank], each) for rank, each in assignments.items() if rank in self._workers]
            self._parked.clear()
        for connection, assignment in targets:
            worker: _Worker = connection.state["worker"]
            worker.round, worker.pointer, worker.rank = assignment.round, pointer, assignment.rank
            _send([connection], assignment)

    def interrupt(self) -> None:
        """Send the workers that the round is over: they hand their state over and park."""
        with self._lock:
            gone = self._round.stopped | self._parked
            targets = [connection for rank, connection in self._workers.items() if rank not in gone]
        _send(targets, worker_messages.Interrupt())

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
    def stopped(self) -> frozenset[int]:
        """The local ranks that have saved and left at an agreed boundary."""
        with self._lock:
            return frozenset(self._round.stopped)

    @property
    def parked(self) -> frozenset[int]:
        """The local ranks that wait for an assignment."""
        with self._lock:
            return frozenset(self._parked)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that training will take at its pace so far, ``None`` where that is unknown."""
        with self._lock:
            if self._expected is None or self._round.began is None:
                return None
            began, first = self._round.began
            step = self._round.step
            return max(0, self._expected - step) * (time.monotonic() - began) / (step - first) if step > first else None

    @property
    def trained(self) -> bool:
        """Whether a local worker has completed a step in this round."""
        with self._lock:
            return self._round.trained

    @property
    def finished(self) -> frozenset[int]:
        """The local ranks whose training has ended."""
        with self._lock:
            return frozenset(self._round.finished)

    @property
    def in_session(self) -> bool:
        """Whether every local worker has a session."""
        with self._lock:
            return len(self._greeted) == self._round.size

    @property
    def placed(self) -> bool:
        """Whether every local worker has a session and an assignment in this round."""
        with self._lock:
            workers = [connection.state["worker"] for connection in self._workers.values()]
            return len(workers) == self._round.size and all(each.round == self._round.number for each in workers)

    @property
    def connected(self) -> bool:
        """Whether a local worker has reported that the ranks of this round have connected to each other."""
        with self._lock:
            return self._round.connected

    @property
    def leaving(self) -> bool:
        """Whether a worker is connected that is not parked, and so ends by itself once it is interrupted."""
        with self._lock:
            return bool(self._workers.keys() - self._parked)

    def prepare(self, proposal: Prepare) -> None:
        """Send a proposal to the workers; their common vote is put into the inbox."""
        with self._lock:
            state = self._round
            targets = list(self._workers.values()) if len(self._workers) == state.size else []
            state.vote = BoundaryVote(proposal.boundary, frozenset(self._workers) if targets else frozenset())
            if not targets:
                self._put_vote(state)
        _send(targets, proposal)
        self._wake()

    def decide(self, decision: Decide) -> None:
        """Send a decision to the workers."""
        with self._lock:
            targets = list(self._workers.values())
        _send(targets, decision)

    def close(self) -> None:
        """Stop serving; workers that still run will exit."""
        self._server.close()
        self._pointers.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._memories.close(forget=self.ended_well)

    def _on_message(self, connection: Connection, fields: dict[str, Any]) -> None:
        message = FROM_WORKER.receive(connection, fields)
        if message is None:
            return
        if isinstance(message, worker_messages.Hello):
            self._on_hello(connection, message)
            return
        worker: _Worker | None = connection.state.get("worker")
        number = fields.get("id")
        if worker is None or self._workers.get(worker.local_rank) is not connection:
            connection.close("it did not send hello first, or its round is over")
        elif isinstance(message, get_args(worker_messages.Request)) and not isinstance(number, int):
            connection.close(f"its request {fields['op']!r} has no id")
        elif worker.round != self._round.number and not isinstance(message, _IN_ANY_ROUND):
            connection.close("its round is over")
        else:
            self._dispatch(connection, worker, message, number)

    def _dispatch(
        self, connection: Connection, worker: _Worker, message: worker_messages.WorkerMessage, number: int | None
    ) -> None:
        def reply(answer: worker_messages.Reply) -> None:
            connection.send({"re": number, **FROM_AGENT.encode(answer)})

        state, local_rank = self._round, worker.local_rank
        match message:
            case worker_messages.Step():
                self._completed(state, local_rank, message.step)
            case worker_messages.Busy():
                self._watch.busy(local_rank, bounded=message.bounded)
            case worker_messages.Free():
                self._watch.free(local_rank)
            case worker_messages.Expects():
                self._expected = message.steps
            case worker_messages.Prepared():
                self._prepared(state, local_rank, message)
            case worker_messages.Pointer() | worker_messages.Commit():
                self._pointers.submit(message, worker.round, worker.pointer, reply)
            case worker_messages.Connected():
                with self._lock:
                    state.connected = True
            case worker_messages.Parked():
                with self._lock:
                    self._parked.add(local_rank)
                self._wake()
            case worker_messages.Damaged(directory, problems):
                self._recorder.record(CheckpointQuarantined, state.number, directory=directory, problems=problems)
            case worker_messages.Restored(step, directory):
                self._watch.opened()
                with self._lock:
                    state.step = max(state.step, step)
                    state.began = time.monotonic(), step
                self._recorder.record(Restored, state.number, step=step, directory=directory)
            case worker_messages.Stopped(step) | worker_messages.Finished(step):
                with self._lock:
                    ended = state.stopped if isinstance(message, worker_messages.Stopped) else state.finished
                    ended.add(local_rank)
                    state.step = max(state.step, step)
                self._watch.finished()
                self._recorder.record(Progress, state.number, step=step)
                self._wake()
            case _ if isinstance(message, get_args(worker_messages.MemoryMessage)):
                answer = self._memories.answer(message, worker.round, worker.rank)
                if answer is not None:
                    reply(answer)

    def _on_hello(self, connection: Connection, hello: worker_messages.Hello) -> None:
        with self._lock:
            current = hello.round in (self._round.number, 0)  # a worker of round 0 receives its assignment later
            if current:
                worker = _Worker(hello.local_rank, hello.rank, hello.round, self._round.pointer)
                connection.state["worker"] = worker
                self._workers[hello.local_rank] = connection
                self._greeted.add(hello.local_rank)
        if not current:
            connection.close(f"round {hello.round} is over")
        elif hello.round:
            self._watch.opened()

    def _completed(self, state: _RoundState, local_rank: int, step: int) -> None:
        self._watch.completed(step, local_rank)
        self._memories.completed(state.number)
        now = time.monotonic()
        with self._lock:
            state.trained = True
            if state.began is None:
                state.began = now, step
            state.step = max(state.step, step)
        if now - self._recorded >= _PROGRESS_SECONDS:
            self._recorded = now
            self._recorder.record(Progress, state.number, step=step)

    def _prepared(self, state: _RoundState, local_rank: int, answer: worker_messages.Prepared) -> None:
        with self._lock:
            vote = state.vote
            if vote is None or vote.boundary != answer.boundary:
                return
            if vote.vote(local_rank, ok=answer.ok, step=answer.step):
                self._put_vote(state)
        self._wake()

    def _put_vote(self, state: _RoundState) -> None:
        assert state.vote is not None
        self._inbox.put(LocalVote(state.number, state.vote.report(finished=bool(state.finished))))
        state.vote = None

    def _on_close(self, connection: Connection) -> None:
        worker: _Worker | None = connection.state.get("worker")
        with self._lock:
            if worker is not None and self._workers.get(worker.local_rank) is connection:
                del self._workers[worker.local_rank]
                self._parked.discard(worker.local_rank)
        self._wake()


_IN_ANY_ROUND = (worker_messages.Parked, worker_messages.Expects, *get_args(worker_messages.MemoryMessage))
"""Messages of a worker that may belong to an earlier round than the agent's."""


def _send(connections: list[Connection], message: AgentMessage) -> None:
    fields = FROM_AGENT.encode(message)
    for connection in connections:
        connection.send(fields)


def _folder_for_sockets() -> str | None:
    """Return where to put a socket: the path of one has at most 107 bytes, and temporary folders may lie deep."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER_BYTES:
        return None
    return "/tmp"  # noqa: S108 - mkdtemp makes a private folder in it
