"""The table as the threads of the agent use it, so that a call that hangs keeps neither them nor the node."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import ElasticError, Fenced, NodeLeaving
from azureml_elastic.ipc.worker_messages import Accepted, Commit, Pointer, PointerReply, Refused, Reply
from azureml_elastic.ledger.events import CheckpointCommitted
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.table import Row, Table
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer

_T = TypeVar("_T")

_CHECK_SECONDS = 0.25
"""Time between two looks for a notice during a call; most calls end before the first."""

_LEAVING_SECONDS = 0.5
"""Time that a call has left once there is a notice: the table's own limit is a third of what Azure gives a node."""


class AgentTable:
    """Makes the calls of one thread on others, and abandons what hangs once this node must leave.

    An abandoned write may still be carried out, as one whose answer is lost. Calls of other threads are made as they
    are: the heartbeat's row is written, and the row of a node that leaves, whatever has been noticed.
    """

    def __init__(self, table: Table, preemption: PreemptionWatcher) -> None:
        self._table = table
        self._preemption = preemption
        self._agent = threading.get_ident()

    def get(self, key: str) -> Row | None:
        """See :meth:`Table.get`."""
        return self._call(lambda: self._table.get(key))

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """See :meth:`Table.insert`."""
        return self._call(lambda: self._table.insert(key, value))

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """See :meth:`Table.replace`."""
        return self._call(lambda: self._table.replace(key, value, etag))

    def delete(self, key: str, etag: str | None = None) -> None:
        """See :meth:`Table.delete`."""
        self._call(lambda: self._table.delete(key, etag))

    def query(self, prefix: str) -> Iterator[Row]:
        """See :meth:`Table.query`."""
        return iter(self._call(lambda: list(self._table.query(prefix))))

    def close(self) -> None:
        """See :meth:`Table.close`."""
        self._table.close()

    def _call(self, call: Callable[[], _T]) -> _T:
        """Make a call.

        Raises:
            NodeLeaving: this node must leave, and the call has not ended.
        """
        if threading.get_ident() != self._agent:
            return call()
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def make() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the call was made
                answer.set_exception(error)

        # A thread for each call: one that hangs may do so for minutes, and the next call must not wait for it. A
        # daemon, so that the process can end meanwhile.
        threading.Thread(target=make, name="table call", daemon=True).start()
        while not _has_ended(answer, _CHECK_SECONDS):
            if self._preemption.noticed and self._preemption.commit_to_leave():
                if _has_ended(answer, _LEAVING_SECONDS):
                    break
                raise NodeLeaving("the node is leaving, and the table does not answer")
        return answer.result()


def _has_ended(answer: concurrent.futures.Future[Any], seconds: float) -> bool:
    return bool(concurrent.futures.wait([answer], seconds).done)


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
