"""The agent's side of the channel to its workers: a Unix socket that the training session connects to.

Workers never access the table. They report their steps to the agent, request the committed checkpoint, request commits
of new ones, and receive the step at which to save or to leave. A script without a session never connects, and is
restarted at each change as under torchrun. The messages are in :mod:`azureml_elastic.ipc.worker_messages`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from azureml_elastic.checkpoint.snapshots.agent_memory import AgentMemory
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import ElasticError, Fenced
from azureml_elastic.ipc import Connection, MessageServer, listen, worker_messages
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.ipc.worker_messages import FROM_AGENT, FROM_WORKER, Commit, Pointer, Refused
from azureml_elastic.ledger.events import CheckpointCommitted, CheckpointQuarantined, Restored
from azureml_elastic.node.agent.event_logs import MetricsLog, ProgressLog
from azureml_elastic.node.agent.local_workers import LocalWorkers, RoundState, WorkerState
from azureml_elastic.node.agent.shard_transfer import ShardSender
from azureml_elastic.node.core.round import Member
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.host.temporary_folder import TemporaryFolder
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

_LOG = logging.getLogger(__name__)

_LONGEST_FOLDER_BYTES = 70

_IN_ANY_ROUND = (
    worker_messages.Parked,
    worker_messages.Expects,
    worker_messages.Logged,
    *get_args(worker_messages.MemoryMessage),
)
"""Messages of a worker that may belong to an earlier round than the agent's."""

_TO_SERVICES = (
    worker_messages.Pointer,
    worker_messages.Commit,
    worker_messages.ReplicateShard,
    *get_args(worker_messages.MemoryMessage),
)
"""Messages of a worker to services, most of which wait for an answer."""

_Answer = Callable[[worker_messages.Reply], None]


class PointerService:
    """Answers a worker's requests about the committed checkpoint, in the order of their arrival."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # One thread: of two commits the later one must win, and the first commit of a round comes after it has taken
        # over.
        self._table_calls = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-row")

    def take_over(self, pointer: CheckpointPointer) -> None:
        """Fence the pointer's older rounds, without waiting for the table."""
        self._table_calls.submit(self._take_over, pointer)

    def submit(self, request: Pointer | Commit, number: int, pointer: CheckpointPointer | None, reply: _Answer) -> None:
        """Process a request.

        Args:
            pointer: pointer of that round, however many rounds have passed since; ``None`` unless it is rank 0's node.
        """
        if pointer is None:
            reply(Refused("fenced", "This node is not rank 0 of its round; only rank 0's workers commit checkpoints."))
        else:
            self._table_calls.submit(self._process, request, number, pointer, reply)

    def close(self) -> None:
        """Drop the requests that have not begun."""
        self._table_calls.shutdown(wait=False, cancel_futures=True)

    def _process(self, request: Pointer | Commit, number: int, pointer: CheckpointPointer, reply: _Answer) -> None:
        try:
            if isinstance(request, Pointer):
                current = pointer.take_over()
                reply(worker_messages.PointerReply(None if current is None else Reference.from_json(current)))
                return
            pointer.commit(Reference(request.directory, request.step, request.digest).to_json())
        except Exception as error:  # noqa: BLE001 - the worker waits for a reply, whatever has happened
            if not isinstance(error, ElasticError):
                _LOG.error("A request of a worker failed.", exc_info=error)
            reply(Refused("fenced" if isinstance(error, Fenced) else "unavailable", str(error)))
            return
        reply(worker_messages.Accepted())
        self._recorder.record(
            CheckpointCommitted, number, step=request.step, directory=request.directory, seconds=request.seconds
        )

    def _take_over(self, pointer: CheckpointPointer) -> None:
        try:
            pointer.take_over()
        except ElasticError as error:
            _LOG.info("%s", error)


class Channel:
    """Serves the local workers. Its methods are for the agent's thread.

    Args:
        memory: memory of the agent, which the channel closes.
        sender: sender of snapshot shards to other nodes, which the channel closes.

    Attributes:
        workers: connected workers and what they have reported.
        folder: folder on a local disk, in which workers may create files.
        path: path of the socket.
        ended_well: whether the run has succeeded, so that nothing on the disk is needed any more.
    """

    def __init__(
        self,
        recorder: Recorder,
        queue: EventQueue,
        watch: HangDetector,
        memory: AgentMemory,
        sender: ShardSender,
    ) -> None:
        self._recorder = recorder
        self._watch = watch
        self._queue = queue
        self.workers = LocalWorkers(queue)
        self._temporary = TemporaryFolder(_folder_for_sockets())
        self.folder = self._temporary.path
        self.path = str(self.folder / "agent.sock")
        self.ended_well = False
        self._progress = ProgressLog(recorder)
        self._metrics = MetricsLog(recorder)
        self._memories = memory
        self._sender = sender
        self._pointers = PointerService(recorder)
        self._server = MessageServer(listen(self.path), self._on_message, self._on_close)

    def begin(
        self,
        number: int,
        size: int,
        pointer: CheckpointPointer | None,
        *,
        members: Sequence[Member] = (),
        keep: bool = False,
    ) -> None:
        """Serve a new round's workers, and cut off those of the round before.

        Args:
            pointer: the checkpoint's row in the table, on rank 0's node only.
            keep: whether the parked workers stay, to be assigned to this round.
        """
        if not keep:
            self.workers.cut()
        self.record_last_step()  # again: what its workers have trained since its end counts as lost work
        self._sender.begin(members)
        self.workers.begin(RoundState(number, size, pointer), keep=keep)
        if pointer is not None:
            self._pointers.take_over(pointer)

    def record_last_step(self) -> None:
        """Record the last step of a round so far, and its logged values."""
        self._metrics.flush()
        self._progress.flush()

    def take_state(self) -> tuple[int, HandedOverState] | None:
        """Return the state that workers have handed over and no others have restored, with its descriptor."""
        return self._memories.take_state()

    def close(self) -> None:
        """Stop serving; workers that still run will exit."""
        # First, so that nothing arrives for what is closed after it.
        self._server.close()
        self.record_last_step()
        self._sender.close()
        self._pointers.close()
        self._temporary.close()
        self._memories.close(forget=self.ended_well)

    def _on_message(self, connection: Connection, fields: dict[str, Any]) -> None:
        message = FROM_WORKER.receive(connection, fields)
        if message is None:
            return
        if isinstance(message, worker_messages.Hello):
            self._on_hello(connection, message)
            return
        worker, state, number = self.workers.find(connection), self.workers.round, fields.get("id")
        if worker is None:
            connection.close("it did not send hello first, or its round is over")
        elif isinstance(message, get_args(worker_messages.Request)) and not isinstance(number, int):
            _LOG.warning("Closing the connection to a worker, whose request %r has no id.", fields["op"])
            connection.close(f"its request {fields['op']!r} has no id")
        elif worker.round != state.number and isinstance(message, worker_messages.ReplicateShard):
            refusal = worker_messages.Refused("unavailable", f"Round {worker.round} is over.")
            connection.send({"re": number, **FROM_AGENT.encode(refusal)})
        elif worker.round != state.number and not isinstance(message, _IN_ANY_ROUND):
            connection.close("its round is over")
        elif isinstance(message, _TO_SERVICES):
            self._serve(connection, worker, message, number)
        else:
            self._take_report(state, worker, message)

    def _serve(
        self, connection: Connection, worker: WorkerState, message: worker_messages.WorkerMessage, number: int | None
    ) -> None:
        """Have a service answer: the checkpoint's row, this node's memory, or that of other nodes."""

        def reply(answer: worker_messages.Reply) -> None:
            connection.send({"re": number, **FROM_AGENT.encode(answer)})

        match message:
            case worker_messages.Pointer() | worker_messages.Commit():
                self._pointers.submit(message, worker.round, worker.pointer, reply)
            case worker_messages.ReplicateShard():
                self._sender.submit(message, reply)
            case _ if isinstance(message, get_args(worker_messages.MemoryMessage)):
                answer = self._memories.answer(message, worker.round, worker.rank)
                if answer is not None:
                    reply(answer)

    def _take_report(self, state: RoundState, worker: WorkerState, message: worker_messages.WorkerMessage) -> None:
        """Record what a worker reports of its training."""
        local_rank = worker.local_rank
        match message:
            case worker_messages.Step():
                self._watch.completed(message.step, local_rank)
                self._memories.completed(state.number)
                self.workers.advance(state, message.step, completed=True)
                self._progress.completed(state.number, message.step, message.samples)
            case worker_messages.Logged(step, values) if worker.rank == 0:
                self._metrics.logged(worker.round, step, values)
            case worker_messages.Busy():
                self._watch.busy(local_rank, bounded=message.bounded)
            case worker_messages.Free():
                self._watch.free(local_rank)
            case worker_messages.Expects():
                self.workers.expected = message.steps
            case worker_messages.Vote():
                self.workers.answer(state, local_rank, message)
            case worker_messages.Parked():
                self.workers.park(local_rank)
                self._queue.wake()
            case worker_messages.Damaged(directory, problems):
                self._recorder.record(CheckpointQuarantined, state.number, directory=directory, problems=problems)
            case worker_messages.Restored(step, directory):
                self._watch.opened()
                self.workers.advance(state, step, completed=False)
                self._recorder.record(Restored, state.number, step=step, directory=directory)
            case worker_messages.Stopped(step) | worker_messages.Finished(step):
                self.workers.end(state, local_rank, step, finished=isinstance(message, worker_messages.Finished))
                self._watch.finished()
                self._metrics.flush()
                if step:  # else there was no step
                    self._progress.completed(state.number, step)
                self._progress.flush()
                self._queue.wake()
            case worker_messages.GaveWay():
                self.workers.give_way(state, local_rank)

    def _on_hello(self, connection: Connection, hello: worker_messages.Hello) -> None:
        if not self.workers.greet(connection, hello):
            connection.close(f"round {hello.round} is over, or has no local rank {hello.local_rank}")
        elif hello.round:
            self._watch.opened()

    def _on_close(self, connection: Connection) -> None:
        self.workers.remove(connection)
        self._queue.wake()


def _folder_for_sockets() -> Path:
    """Return where to put a socket: the path of one has at most 107 bytes, and temporary folders may lie deep."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST_FOLDER_BYTES else "/tmp")  # noqa: S108 - mkdtemp follows
