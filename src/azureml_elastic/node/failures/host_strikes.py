"""Strikes against hosts: the rows ``strike.<host>.<incident>`` of the table.

A strike counts for an hour. Its age is the difference of two times of the table's server: that of its row and
that of a row written by this node (:class:`~azureml_elastic.node.table.server_time.ServerClock`). All nodes derive the
same key for an incident and only insert rows, so an incident is one strike, however many nodes report it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from azureml_elastic.errors import ElasticError, RowExists, TableUnavailable
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.table import Row, Table
from azureml_elastic.node.table.server_time import ServerClock

_LOG = logging.getLogger(__name__)

STRIKE_PREFIX = "strike."

_MAX_ROWS = 16  # per host; the oldest are deleted
_MAX_QUEUED = 64  # strikes that wait for an unavailable table
_WRITE_TIMEOUT_SECONDS = 120.0
_RETRY_SECONDS = (0.5, 10.0)
_FLUSH_SECONDS = 2.0
_REASON_CHARACTERS = 500


@dataclass(frozen=True)
class _Strike:
    host: str
    key: str
    reason: str
    until: float  # monotonic seconds after which writing is given up


class HostStrikes:
    """Reader and writer of strikes for one node. Thread-safe; errors of the table are logged, not raised.

    Args:
        host: id of this node's host, see :func:`~azureml_elastic.node.host.identity.host_id`.
        decay: time after which a strike expires, by the table server's clock.
    """

    def __init__(
        self, table: Table, host: str, node: str, clock: ServerClock, *, decay: timedelta = timedelta(hours=1)
    ) -> None:
        self.host = host
        self._table = table
        self._node = node
        self._decay = decay
        self._clock = clock
        self._monotonic = clock.monotonic
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, float]] = {}
        self._unwritten: dict[str, set[str]] = {}
        self._queue: queue.Queue[_Strike | None] = queue.Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def strike(self, host: str, reason: str, incident: str) -> None:
        """Record a strike against a host; a background thread writes the row.

        All nodes that report an incident must use the same key ``incident``.
        """
        now = self._monotonic()
        key = f"{STRIKE_PREFIX}{host}.{incident}"
        _LOG.warning("Strike against %s: %s.", host, reason.partition("\n")[0])
        strike = _Strike(host, key, reason[:_REASON_CHARACTERS], now + _WRITE_TIMEOUT_SECONDS)
        with self._lock:
            # It counts at once: this node may have to decide whether it joins before the table has the row.
            if host in self._known or host == self.host:
                self._known.setdefault(host, {}).setdefault(key, now + self._decay.total_seconds())
            self._unwritten.setdefault(host, set()).add(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="strikes", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(strike)
        except queue.Full:
            self._settled(strike)
            _LOG.debug("The table has been unavailable for too long; the strike against %s is not written.", host)

    def live(self, host: str) -> int:
        """Return the number of live strikes from the table, or the last known number if the table is unavailable."""
        with self._lock:
            unwritten = set(self._unwritten.get(host, ()))
        try:
            rows = self._rows(host)
            ends = self._ends(rows, self._now(rows)) if rows else {}
        except ElasticError as error:
            _LOG.debug("The strikes against %s could not be read: %s", host, error)
        else:
            with self._lock:
                known = self._known.get(host, {})
                # What waits to be written is not in the rows yet, and must not be forgotten for that.
                self._known[host] = {key: end for key, end in known.items() if key in unwritten} | ends
        return self._count(host)

    def mine(self, *, fresh: bool = False) -> int:
        """Return the live strikes against this node's own host.

        Args:
            fresh: whether to read the table again, because other nodes may have recorded strikes.
        """
        with self._lock:
            known = self.host in self._known
        return self.live(self.host) if fresh or not known else self._count(self.host)

    def close(self) -> None:
        """Flush queued strikes within a short time limit."""
        self._closing.set()
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(_FLUSH_SECONDS)

    def _count(self, host: str) -> int:
        now = self._monotonic()
        with self._lock:
            return sum(end > now for end in self._known.get(host, {}).values())

    def _rows(self, host: str) -> list[Row]:
        # Another host's name may start with this one's.
        return [row for row in self._table.query(f"{STRIKE_PREFIX}{host}.") if row.value.get("host") == host]

    def _now(self, rows: Iterable[Row]) -> datetime:
        """Return the server's time, which is not before that of any row."""
        return max([self._clock.now(), *(row.timestamp for row in rows)])

    def _ends(self, rows: Iterable[Row], now: datetime) -> dict[str, float]:
        """Return the expiry of each live strike, in monotonic seconds."""
        monotonic = self._monotonic()
        ends = {row.key: monotonic + (self._decay - (now - row.timestamp)).total_seconds() for row in rows}
        return {key: end for key, end in ends.items() if end > monotonic}

    def _write_all(self) -> None:
        while (strike := self._queue.get()) is not None:
            written = self._write(strike)
            self._settled(strike)
            # By the writer of a new row alone: all nodes that report the incident would delete the same rows.
            if written:
                self._prune(strike.host)

    def _settled(self, strike: _Strike) -> None:
        with self._lock:
            self._unwritten[strike.host].discard(strike.key)

    def _write(self, strike: _Strike) -> bool:
        pause, longest = _RETRY_SECONDS
        value = {"host": strike.host, "reason": strike.reason, "by": self._node}
        while True:
            try:
                self._table.insert(strike.key, value)
            except RowExists:
                return False  # already recorded, perhaps by this node: a response may have been lost
            except ElasticError as error:
                expired = self._closing.is_set() or self._monotonic() >= strike.until
                if expired or not isinstance(error, TableUnavailable):
                    _LOG.debug("The strike against %s was not written: %s", strike.host, error)
                    return False
                self._closing.wait(pause)
                pause = min(longest, 2 * pause)
            else:
                return True

    def _prune(self, host: str) -> None:
        """Delete a host's expired strikes, and the oldest above the maximum."""
        try:
            rows = sorted(self._rows(host), key=lambda row: row.timestamp)
            now = self._now(rows)
            for index, row in enumerate(rows):
                if now - row.timestamp >= self._decay or index < len(rows) - _MAX_ROWS:
                    self._table.delete(row.key)
        except ElasticError as error:
            _LOG.debug("Old strikes against %s were not removed: %s", host, error)


def incident_id(round_: Round) -> str:
    """Return the key of the incident that ended a round, equal on all nodes that report it."""
    return f"round.{round_.number:06d}"
