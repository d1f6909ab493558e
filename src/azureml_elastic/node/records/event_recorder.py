"""Appends this node's events to its file, and the rare ones to the table.

Writing the ledger never delays or fails the run: the file is written at once, the table from a thread of its own which
gives up on a row that the table refuses.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from azureml_elastic.errors import ElasticError
from azureml_elastic.ledger.events import Event
from azureml_elastic.ledger.line_file import LineFile
from azureml_elastic.node.table import Table

_LOG = logging.getLogger(__name__)

EVENT_PREFIX = "event."
"""Prefix of the table's rows of events; the round, of six digits, follows."""

_FLUSH_SECONDS = 2.0


class Recorder:
    """Writer of one node's events. Thread-safe.

    Args:
        folder: the run's folder; the file is ``events/<node>.jsonl`` below it.
        incarnation: the agent's incarnation, part of the rows' keys.
        table: table for the rare events, ``None`` to write the file only.
        subscriber: function that gets each event and returns at once.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        incarnation: str,
        table: Table | None,
        subscriber: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self._file = LineFile(folder / "events" / f"{node}.jsonl", "events")
        self._node = node
        self._incarnation = incarnation
        self._subscriber = subscriber
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if table is not None:
            self._thread = threading.Thread(target=self._write_rows, args=(table,), name="ledger", daemon=True)
            self._thread.start()

    def record(self, kind: type[Any], round_number: int, at: float | None = None, **fields: Any) -> None:
        """Append one event.

        Args:
            round_number: the round that the node is in, 0 before its first.
            at: seconds since the epoch; ``None`` for now.
        """
        event: Event = kind(time=time.time() if at is None else at, node=self._node, round=round_number, **fields)
        with self._lock:
            self._file.append(event.model_dump_json())
            # Under the lock, too: it gets the events in the order of the file.
            self._subscriber(event)
        if self._thread is not None and event.rare:
            self._queue.put(event)

    def close(self) -> None:
        """Write what is waiting, for a short time, and close the file."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_FLUSH_SECONDS)
        with self._lock:
            self._file.close()

    def _write_rows(self, table: Table) -> None:
        while (event := self._queue.get()) is not None:
            key = f"{EVENT_PREFIX}{event.round:06d}.{self._node}.{self._incarnation}.{next(self._numbers):06d}"
            try:
                table.insert(key, event.model_dump(mode="json"))
            except ElasticError as error:
                _LOG.debug("The event %s was not written to the table: %s", event.kind, error)
