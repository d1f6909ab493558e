"""The time of the table's server, the only clock by which two machines may compare an event.

A written row carries the server's time. Two readings of the local clock around the write bound the difference of the
two clocks; the time since then is measured on this process's monotonic clock.
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

CLOCK_PREFIX = "clock."

_ATTEMPTS = 3


@dataclass(frozen=True)
class Reading:
    """Server time of one write between two readings of the local clock.

    Args:
        before: local seconds since the epoch before the write.
        server: server time of the write.
        after: local seconds since the epoch after the write.
        taken: monotonic seconds of this process after the write.
    """

    before: float
    server: datetime
    after: float
    taken: float

    @property
    def skew(self) -> float:
        """Minimum number of seconds by which the local clock is ahead of the server's, negative if behind.

        The write happened between the two readings, so a server time between them shows no difference.
        """
        server = self.server.timestamp()
        return self.before - server if server < self.before else min(0.0, self.after - server)


class ServerClock:
    """Clock of the server's time, read once and continued on the monotonic clock. Thread-safe.

    Args:
        node: name of this node; its row is ``clock.<node>``.
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
            TableError: the table is not available, or another process writes this node's row.
            UsageError: the table cannot be used.
        """
        with self._lock:
            if self._reading is None:
                self._reading = self._read()
            return self._reading

    def now(self) -> datetime:
        """Return the server's time; the first call raises as :meth:`reading`."""
        reading = self.reading()
        return reading.server + timedelta(seconds=max(0.0, self.monotonic() - reading.taken))

    def forget(self) -> None:
        """Delete this node's row, for a process that is no node of the run. Never raises."""
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
                written = ""  # row of an earlier agent, or of an insert whose answer was lost
            after, taken = self._wall(), self.monotonic()
            # Read back, as a write returns no time; only the version tells that the row is the one of this write.
            row = self._table.get(self._key)
            if row is not None and row.etag == written:
                return Reading(before, row.timestamp, after, taken)
            etag = row.etag if row is not None else None
        raise RowChanged(
            f"Row {self._key!r} has changed {_ATTEMPTS} times while it was read, so the server's time is not known. "
            "Two nodes may share a name; give each its own."
        )
