"""Requests of workers about the committed checkpoint, which rank 0's agent answers from the table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import ElasticError, Fenced
from azureml_elastic.ipc.worker_messages import Accepted, Commit, Pointer, PointerReply, Refused, Reply
from azureml_elastic.ledger.events import CheckpointCommitted
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

_LOG = logging.getLogger(__name__)


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

    def submit(
        self, request: Pointer | Commit, number: int, pointer: CheckpointPointer | None, reply: Callable[[Reply], None]
    ) -> None:
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

    def _process(
        self, request: Pointer | Commit, number: int, pointer: CheckpointPointer, reply: Callable[[Reply], None]
    ) -> None:
        try:
            if isinstance(request, Pointer):
                current = pointer.take_over()
                reply(PointerReply(None if current is None else Reference.from_json(current)))
                return
            pointer.commit(Reference(request.directory, request.step, request.digest).to_json())
        except Exception as error:  # noqa: BLE001 - the worker waits for a reply, whatever has happened
            if not isinstance(error, ElasticError):
                _LOG.error("A request of a worker failed.", exc_info=error)
            reply(Refused("fenced" if isinstance(error, Fenced) else "unavailable", str(error)))
            return
        reply(Accepted())
        self._recorder.record(
            CheckpointCommitted, number, step=request.step, directory=request.directory, seconds=request.seconds
        )

    def _take_over(self, pointer: CheckpointPointer) -> None:
        try:
            pointer.take_over()
        except ElasticError as error:
            _LOG.info("%s", error)
