"""The table protocol.

A table is opened for one run (its *partition*); keys are unique within it. Each row is a JSON object with a version
(``etag``) that changes with every write and a timestamp set by the *server*. There is no unconditional overwrite:
replacing a row requires the version that was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """Row as it was read.

    Args:
        key: key, unique within the run: text of 1 to 250 characters whose encoded form has at most 1,024 bytes.
        value: JSON object.
        etag: opaque version of the row.
        timestamp: time of the last write by the server's clock, timezone-aware.
    """

    key: str
    value: Mapping[str, Any]
    etag: str
    timestamp: datetime


class Table(Protocol):
    """Rows of one run. Thread-safe; every call is atomic, and blocks until it is durable or fails.

    Every method may raise:

    - ``TableUnavailable``: throttled, timed out or reset, after the backend's own limited retries.
      A write may or may not have happened.
    - ``TableForbidden``: the identity lacks a role.
    - ``TableNotFound``: the account does not exist or cannot be reached.
    - ``KeyInvalid``: the key is empty or too long.
    """

    def get(self, key: str) -> Row | None:
        """Return the row, or ``None`` if it does not exist."""

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        """Insert a new row and return its etag.

        Raises:
            RowExists: the row exists; nothing was written.
            ValueTooLarge: the value exceeds the limit of a row; nothing was written.
        """

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        """Replace the row if its version is ``etag``, and return the new etag.

        Raises:
            RowChanged: the row has another version or does not exist; nothing was written.
            ValueTooLarge: the value exceeds the limit of a row; nothing was written.
        """

    def delete(self, key: str, etag: str | None = None) -> None:
        """Delete the row. A missing row is an error only if an etag is given.

        Raises:
            RowChanged: an etag was given and the row has another version or does not exist.
        """

    def query(self, prefix: str) -> Iterator[Row]:
        """Yield all rows whose key starts with ``prefix``, in no particular order."""

    def close(self) -> None:
        """Release connections and files; further calls are undefined."""
