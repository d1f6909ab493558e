"""The table server's time, as one process can tell it: the only clock by which two machines may judge one event.

A row that was just written carries the time that the *server* has set. Between two looks at this machine's own clock
that time bounds how far the two clocks differ, and what has passed since then this process measures on its own
monotonic clock. No time of another machine enters anything here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from azureml_elastic.errors import ElasticError, RowChanged, RowExists
from azureml_elastic.node.table import Table

__all__ = ["CLOCK_PREFIX", "Reading", "ServerClock"]

CLOCK_PREFIX = "clock."

_ATTEMPTS = 3


@dataclass(frozen=True)
class Reading:
    """One row's time between two looks at this machine's clock.

    Args:
        before: seconds since the epoch by this machine, before the write.
        server: when the server says that it was written.
        after: seconds since the epoch by this machine, after the write.
        taken: monotonic seconds of this process, after the write.
    """

    before: float
    server: datetime
    after: float
    taken: float

    @property
    def skew(self) -> float:
        """Seconds that this machine's clock is at least ahead of the server's, negative where it is behind.

        The write happened somewhere between the two looks, so that a server's time between them proves no difference.
        """
        server = self.server.timestamp()
        return self.before - server if server < self.before else min(0.0, self.after - server)


class ServerClock:
    """Reads the server's time once, and counts on from there. Thread-safe.

    Args:
        table: opened for the run.
        node: this node's name; its row is ``clock.<node>``.
        wall: returns seconds since the epoch.
        monotonic: returns monotonic seconds.
    """

    def __init__(
        self,
        table: Table,
        node: str,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._key = CLOCK_PREFIX + node
        self._wall = wall
        self.monotonic = monotonic
        self._lock = threading.Lock()
        self._reading: Reading | None = None

    def reading(self) -> Reading:
        """Return the first reading, which costs one write and one read.

        Raises:
            TableError: the table is away, or another process writes this node's row.
            UsageError: the table cannot be used.
        """
        with self._lock:
            if self._reading is None:
                self._reading = self._read()
            return self._reading

    def now(self) -> datetime:
        """Return the server's time.

        Raises:
            TableError, UsageError: as :meth:`reading` does, the first time.
        """
        reading = self.reading()
        return reading.server + timedelta(seconds=max(0.0, self.monotonic() - reading.taken))

    def forget(self) -> None:
        """Remove this node's row, for a process that is no node of the run. Never raises."""
        with contextlib.suppress(ElasticError):
            self._table.delete(self._key)

    def _read(self) -> Reading:
        etag: str | None = None
        for _ in range(_ATTEMPTS):
            before = self._wall()
            try:
                value = {"node": self._key.removeprefix(CLOCK_PREFIX)}
                if etag is None:
                    written = self._table.insert(self._key, value)
                else:
                    written = self._table.replace(self._key, value, etag)
            except (RowExists, RowChanged):
                written = ""  # an earlier agent's row, or an insert that was repeated because its answer was lost
            after, taken = self._wall(), self.monotonic()
            row = self._table.get(self._key)
            if row is not None and row.etag == written:
                return Reading(before, row.timestamp, after, taken)
            etag = row.etag if row is not None else None
        raise RowChanged(
            f"Row {self._key!r} has changed {_ATTEMPTS} times while it was read, so the server's time is not known. "
            "Two nodes seem to share a name; give each its own."
        )
