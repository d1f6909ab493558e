"""The slow second witness: a row that rank 0's node touches while its round runs.

Whoever cannot reach rank 0's hub looks whether the row still changes, by its own clock, before it declares the round
dead. Nobody's clock is compared with another's: only the row's version counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import ElasticError, RowChanged, RowExists
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.table import Row, Table

__all__ = ["TABLE_HEARTBEAT_KEY", "TableHeartbeat"]

_LOG = logging.getLogger(__name__)

TABLE_HEARTBEAT_KEY = "heartbeat"


class TableHeartbeat:
    """Touches the row while this node leads, and looks at it while it does not.

    Args:
        table: opened for the run.
        timings: ``table_heartbeat_interval`` between two touches.
        superseded: called, from the witness's thread, when a newer round has its own witness: this node was given up.
        machine: to run on.
    """

    def __init__(
        self,
        table: Table,
        timings: RendezvousTimings,
        superseded: Callable[[], None],
        machine: Runtime | None = None,
    ) -> None:
        self._machine = machine or Runtime()
        self._table = table
        self._interval = timings.table_heartbeat_interval.total_seconds()
        self._superseded = superseded
        self._stopped = self._machine.event()
        self._thread: threading.Thread | None = None

    def look(self) -> str | None:
        """Return the row's version, ``None`` when there is no row or the table is away."""
        row = self._read()
        return row.etag if row else None

    def round(self) -> int:
        """Return the number of the round that has given the newest sign of life, 0 for none or an absent table."""
        row = self._read()
        return int(row.value["round"]) if row else 0

    def start(self, number: int) -> None:
        """Touch the row at each interval for as long as this round runs."""
        self.stop()
        self._stopped = self._machine.event()  # a thread that is stuck in a call keeps its own, which stays set
        self._thread = self._machine.thread(partial(self._run, number, self._stopped), "witness")
        self._thread.start()

    def stop(self) -> None:
        """Stop touching."""
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
                _LOG.debug("The sign of life could not be written: %s", error)
            stopped.wait(self._interval)

    def _read(self) -> Row | None:
        try:
            return self._table.get(TABLE_HEARTBEAT_KEY)
        except ElasticError:
            return None
