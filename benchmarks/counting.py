"""A table whose calls are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from azureml_elastic.node.table import Row, Table

__all__ = ["Counter", "CountingTable"]


class Counter:
    """Thread-safe counter of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads = self.writes = self.conflicts = 0

    def count(self, *, conflict: bool) -> None:
        with self._lock:
            self.writes += 1
            self.conflicts += conflict

    def count_read(self) -> None:
        with self._lock:
            self.reads += 1


class CountingTable:
    """A ``Table`` that counts the calls to another one."""

    def __init__(self, table: Table, counter: Counter) -> None:
        self._table = table
        self._counter = counter
        self.close = table.close

    def get(self, key: str) -> Row | None:
        self._counter.count_read()
        return self._table.get(key)

    def query(self, prefix: str) -> Iterator[Row]:
        self._counter.count_read()
        return self._table.query(prefix)

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        return self._write(self._table.insert, key, value)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        return self._write(self._table.replace, key, value, etag)

    def delete(self, key: str, etag: str | None = None) -> None:
        self._write(self._table.delete, key, etag)

    def _write(self, call: Callable[..., Any], *arguments: Any) -> Any:
        from azureml_elastic.errors import RowChanged, RowExists

        try:
            result = call(*arguments)
        except (RowExists, RowChanged):
            self._counter.count(conflict=True)
            raise
        self._counter.count(conflict=False)
        return result
