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
from azureml_elastic.node.core.table_heartbeat import HeartbeatRow, HeartbeatWriter
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.table import Row, Table

_LOG = logging.getLogger(__name__)

TABLE_HEARTBEAT_KEY = "heartbeat"

_LOOKS = 3
"""Further reads of the round's row by a node whose heartbeat was overtaken."""


class LookRequest:
    """In the queue of the agent: the round's row is to be looked at."""


class TableHeartbeat:
    """Writer of the row while this node is rank 0, and reader while it is not.

    Args:
        context: interval between two writes, clock and threads, and how far training is. ``queue`` gets a
            :class:`LookRequest`, at most once in each interval, when the heartbeat's row is not as this node has left
            it, or another node does not accept this node's key.
        hub: this node's hub. When a newer round writes the row, this node was given up: all nodes at its hub have to
            read the round's row.
    """

    def __init__(self, context: Context, table: Table, hub: Hub) -> None:
        self._interval = context.timings.table_heartbeat_interval.total_seconds()
        self._runtime = context.runtime
        self._queue = context.queue
        self._table = table
        self._hub = hub
        self._surroundings = context.surroundings
        self._authenticator = context.authenticator
        self._me = context.authenticator.me.incarnation
        self._stopped = self._runtime.event()
        self._thread: threading.Thread | None = None

    def look(self) -> tuple[str | None, int]:
        """Return the row's version, and the number of the round that has written it last.

        They are ``None`` and 0 when there is no row or the table is unavailable.
        """
        found = _found(self._read())
        return (found.version, found.round) if found is not None else (None, 0)

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
            # A call of the table may take ten seconds. The thread ends after it, by its own event.
            self._thread.join(timeout=1)
            self._thread = None

    def nudge(self) -> None:
        """Change the row, so that the node that writes it looks at the round's row. Never raises."""
        row = self._read()
        if row is not None and _found(row) is not None:
            with contextlib.suppress(ElasticError):
                self._table.replace(TABLE_HEARTBEAT_KEY, {**row.value, "by": ""}, row.etag)

    def _run(self, number: int, stopped: threading.Event) -> None:
        writer = HeartbeatWriter(number, self._me, _found(self._read()) if number > 1 else None)
        refusals = self._authenticator.refusals
        while not stopped.is_set():
            try:
                version = self._write({**self._surroundings.progress(), **writer.beat()}, writer.version)
                if writer.written(version) and not self._holds(number):
                    self._queue.post(LookRequest())
            except (RowExists, RowChanged):
                then = writer.overtaken(_found(self._read()))
                if then.given_up:
                    self._give_way(stopped)
                    return
                if then.look:
                    self._queue.post(LookRequest())
                if then.again:
                    continue
            except ElasticError as error:
                writer.unanswered()
                _LOG.debug("The table heartbeat could not be written: %s", error)
            if self._authenticator.refusals != refusals:
                refusals = self._authenticator.refusals
                self._queue.post(LookRequest())
            stopped.wait(self._interval)

    def _write(self, value: Mapping[str, Any], version: str | None) -> str:
        if version is None:
            return self._table.insert(TABLE_HEARTBEAT_KEY, value)
        return self._table.replace(TABLE_HEARTBEAT_KEY, value, version)

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
                self._queue.post(LookRequest())

    def _read(self) -> Row | None:
        """Return the row, ``None`` also while the table is unavailable."""
        try:
            return self._table.get(TABLE_HEARTBEAT_KEY)
        except ElasticError:
            return None


def _found(row: Row | None) -> HeartbeatRow | None:
    """Return what a row holds, ``None`` where no node has written that."""
    if row is None or not all(isinstance(row.value.get(name), int) for name in ("round", "beats")):
        return None
    return HeartbeatRow(row.etag, int(row.value["round"]), int(row.value["beats"]), str(row.value.get("by", "")))
