"""The table as the rest of the library sees it.

A table is opened for one run (its *partition*); keys are unique within it. Each row is one JSON object with a
version (``etag``) that changes on every write and a time that the *server* set. There is no unconditional
overwrite: whoever replaces a row says which version it has read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

__all__ = ["Row", "Table"]


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Args:
        key: unique within the run; any text of 1 to 250 characters whose encoded form has at most 1,024 bytes, which
            every ASCII text of that length keeps.
        value: a JSON object.
        etag: the row's version, opaque.
        timestamp: when the row was last written, by the server's clock, timezone-aware.
    """

    key: str
    value: Mapping[str, Any]
    etag: str
    timestamp: datetime


class Table(Protocol):
    """Rows of one run. Thread-safe; every call is atomic, and blocks until it is durable or fails.

    Every method may raise:

    - ``TableUnavailable``: throttled, timed out or reset, after the backend's own bounded retries.
      The write may or may not have happened.
    - ``TableForbidden``: the identity lacks a role.
    - ``TableNotFound``: the account does not exist or cannot be reached at all.
    - ``KeyInvalid``: the key is empty or too long.
    """

    def get(self, key: str) -> Row | None:
        """Return the row, or ``None`` where there is none."""

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """Write a row that does not exist yet and return its etag.

        Raises:
            RowExists: there is one; nothing was written.
            ValueTooLarge: the value does not fit; nothing was written.
        """

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Overwrite the row if it still has this version, and return the new etag.

        Raises:
            RowChanged: the row has another version or is gone; nothing was written.
            ValueTooLarge: the value does not fit; nothing was written.
        """

    def delete(self, key: str, etag: str | None = None) -> None:
        """Remove the row; a row that is not there is no error unless an etag was given.

        Raises:
            RowChanged: an etag was given and the row has another version or is gone.
        """

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, in no particular order."""

    def close(self) -> None:
        """Release connections and files; further calls are undefined."""
