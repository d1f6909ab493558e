"""The slow heartbeat in the table: a row that rank 0's node writes while its round runs.

A node that cannot reach rank 0's hub observes, on its own clock, whether the row still changes before it declares the
round dead. Only the version of the row counts, so that no clocks are compared.

The row shows readers outside of the run how far training is. It is also a second record of the highest round: rank 0's
node that finds its own row changed or gone, and a node that is about to seal a round which is not higher, conclude that
rows went back in time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from azureml_elastic.errors import ElasticError, RowChanged, RowExists
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub.hub import Hub
from azureml_elastic.node.rendezvous.round_look import RoundLook
from azureml_elastic.node.rendezvous.state.row_keys import ROUND_KEY
from azureml_elastic.node.table import Row, Table

__all__ = ["TABLE_HEARTBEAT_KEY", "TableHeartbeat"]

_LOG = logging.getLogger(__name__)

TABLE_HEARTBEAT_KEY = "heartbeat"

_LOOKS = 3
"""Further reads of the round's row by a node whose heartbeat was overtaken."""


class TableHeartbeat:
    """Writer of the row while this node is rank 0, and reader while it is not.

    Args:
        context: interval between two writes, clock and threads, and how far training is.
        table: table of the run.
        hub: this node's hub. When a newer round writes the row, this node was given up: all nodes at its hub have to
            read the round's row.
        look: what looks at the round's row, at most once in each interval, when the heartbeat's row is not as this node
            has left it, or another node does not accept this node's key.
    """

    def __init__(self, context: Context, table: Table, hub: Hub, look: RoundLook) -> None:
        self._interval = context.timings.table_heartbeat_interval.total_seconds()
        self._runtime = context.runtime
        self._table = table
        self._hub = hub
        self._look = look
        self._surroundings = context.surroundings
        self._authenticator = context.authenticator
        self._me = context.authenticator.me.incarnation
        self._stopped = self._runtime.event()
        self._thread: threading.Thread | None = None

    def look(self) -> tuple[str | None, int]:
        """Return the row's version, and the number of the round that has written it last.

        They are ``None`` and 0 when there is no row or the table is unavailable.
        """
        row = self._read()
        return (row.etag, int(row.value["round"])) if row is not None else (None, 0)

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

    def nudge(self) -> None:
        """Change the row, so that the node that writes it looks at the round's row. Never raises."""
        row = self._read()
        if row is not None:
            with contextlib.suppress(ElasticError):
                self._table.replace(TABLE_HEARTBEAT_KEY, {**row.value, "by": ""}, row.etag)

    def _run(self, number: int, stopped: threading.Event) -> None:
        # A later round finds the row of an earlier one.
        row = self._read() if number > 1 else None
        etag = row.etag if row is not None and row.value["round"] <= number else None
        refusals = self._authenticator.refusals
        beats = confirmed = 0
        is_repeated = False
        while not stopped.is_set():
            beats += 1
            try:
                etag = self._beat(
                    {**self._surroundings.progress(), "round": number, "beats": beats, "by": self._me}, etag
                )
                if not confirmed and not self._holds(number):
                    self._look.request()  # what was lost before the first beat does not show in this row
                confirmed = beats
            except (RowExists, RowChanged):
                row = self._read()
                if row is not None and row.value["round"] > number:
                    self._give_way(stopped)
                    return
                etag = row.etag if row is not None else None
                if confirmed and (row is None or row.value.get("by") != self._me or row.value["beats"] < confirmed):
                    self._look.request()
                if not is_repeated:
                    is_repeated = True
                    continue
            except ElasticError as error:
                _LOG.debug("The table heartbeat could not be written: %s", error)
            is_repeated = False
            if self._authenticator.refusals != refusals:
                refusals = self._authenticator.refusals
                self._look.request()
            stopped.wait(self._interval)

    def _beat(self, value: Mapping[str, Any], etag: str | None) -> str:
        if etag is None:
            return self._table.insert(TABLE_HEARTBEAT_KEY, value)
        return self._table.replace(TABLE_HEARTBEAT_KEY, value, etag)

    def _holds(self, number: int) -> bool:
        """Return whether the round's row holds this round, sealed."""
        row = self._table.get(ROUND_KEY)
        return row is not None and (row.value.get("number"), row.value.get("state")) == (number, "sealed")

    def _give_way(self, stopped: threading.Event) -> None:
        """Have the members read the round's row, and this node again, as the newer round may not be in it yet."""
        self._hub.request_read()
        for _ in range(_LOOKS):
            stopped.wait(2 * self._interval)
            if not stopped.is_set():
                self._look.request()

    def _read(self) -> Row | None:
        """Return the row, ``None`` also where it holds what no node has written."""
        try:
            row = self._table.get(TABLE_HEARTBEAT_KEY)
        except ElasticError:
            return None
        is_ours = row is not None and all(isinstance(row.value.get(name), int) for name in ("round", "beats"))
        return row if is_ours else None
