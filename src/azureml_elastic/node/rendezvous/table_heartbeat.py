"""The slow heartbeat in the table: a row that rank 0's node writes while its round runs.

A node that cannot reach rank 0's hub observes, on its own clock, whether the row still changes before it declares the
round dead. Only the version of the row counts, so that no clocks are compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from azureml_elastic.errors import ElasticError, RowChanged, RowExists
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.table import Row, Table

__all__ = ["TABLE_HEARTBEAT_KEY", "StaleHeartbeat", "TableHeartbeat"]

_LOG = logging.getLogger(__name__)

TABLE_HEARTBEAT_KEY = "heartbeat"


class TableHeartbeat:
    """Writer of the row while this node is rank 0, and reader while it is not.

    Args:
        context: interval between two writes, clock and threads.
        table: table of the run.
        superseded: callback from the heartbeat's thread when a newer round writes the row, which shows that this node
            was given up.
    """

    def __init__(self, context: Context, table: Table, superseded: Callable[[], None]) -> None:
        self.clock = context.clock
        self.interval = context.timings.table_heartbeat_interval.total_seconds()
        self._runtime = context.runtime
        self._table = table
        self._superseded = superseded
        self._stopped = self._runtime.event()
        self._thread: threading.Thread | None = None

    def version(self) -> str | None:
        """Return the row's version, ``None`` when there is no row or the table is unavailable."""
        row = self._read()
        return row.etag if row else None

    def round(self) -> int:
        """Return the number of the round that wrote the row last, 0 if there is none or the table is unavailable."""
        row = self._read()
        return int(row.value["round"]) if row else 0

    def start(self, number: int) -> None:
        """Write the row at each interval for as long as this round runs."""
        self.stop()
        self._stopped = self._runtime.event()  # a thread that is stuck in a call keeps its own, which stays set
        self._thread = self._runtime.thread(partial(self._run, number, self._stopped), "table heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """Stop writing."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=1)
            self._thread = None

    def _run(self, number: int, stopped: threading.Event) -> None:
        # A later round finds the row of an earlier one.
        row = self._read() if number > 1 else None
        etag = row.etag if row is not None and row.value["round"] <= number else None
        beats = 0
        while not stopped.is_set():
            beats += 1
            value = {"round": number, "beats": beats}
            try:
                if etag is None:
                    etag = self._table.insert(TABLE_HEARTBEAT_KEY, value)
                else:
                    etag = self._table.replace(TABLE_HEARTBEAT_KEY, value, etag)
            except (RowExists, RowChanged):
                row = self._read()
                if row is not None and row.value["round"] > number:
                    self._superseded()
                    return
                etag = row.etag if row is not None else None
                if etag is not None:
                    continue
            except ElasticError as error:
                _LOG.debug("The table heartbeat could not be written: %s", error)
            stopped.wait(self.interval)

    def _read(self) -> Row | None:
        try:
            return self._table.get(TABLE_HEARTBEAT_KEY)
        except ElasticError:
            return None


class StaleHeartbeat:
    """Detector of a table heartbeat that has stopped: its version has not changed for two intervals.

    Args:
        heartbeat: the row.
    """

    def __init__(self, heartbeat: TableHeartbeat) -> None:
        self._heartbeat = heartbeat
        self._version: str | None = None
        self._since: float | None = None

    def reset(self) -> None:
        """Start again with the next read."""
        self._since = None

    def check(self) -> bool:
        """Read the row, and return whether it has not changed for too long."""
        version = self._heartbeat.version()
        if self._since is None or version != self._version:
            self._version, self._since = version, self._heartbeat.clock()
            return False
        return self._heartbeat.clock() - self._since > 2 * self._heartbeat.interval
