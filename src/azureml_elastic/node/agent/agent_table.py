"""The table as the threads of the agent use it, so that a call that hangs keeps neither them nor the node."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from azureml_elastic.errors import NodeLeaving
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.table import Row, Table

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
