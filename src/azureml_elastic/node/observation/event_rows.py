"""The events of a run that its table has: all but most steps, logged metrics and passed health checks."""

from __future__ import annotations

import time
from collections.abc import Iterable

from azureml_elastic.ledger.events import Event, Progress, read_event_value
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.io.event_recorder import EVENT_PREFIX
from azureml_elastic.node.rendezvous.state.row_keys import ROUND_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table import Row, Table

__all__ = ["EventRowReader", "read_event_rows"]


def read_event_rows(table: Table) -> tuple[list[Event], int]:
    """Read the events of a run.

    Returns:
        The events of all nodes, those of one node in order, and the number of rows that are no events of a known kind.

    Raises:
        TableError: the table cannot be read.
    """
    return _parse(table.query(EVENT_PREFIX))


class EventRowReader:
    """Reader of a running run's events that returns each of them once.

    The first read takes all rows, each further one those of the newest rounds: an event that is written two rounds late
    is not returned.

    Args:
        table: table of the run.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seen: set[str] = set()
        self._round: int | None = None
        self._step = 0

    def read(self) -> list[Event]:
        """Return the events since the last call; the step of rank 0's node is one, as its heartbeat has it.

        Raises:
            TableError: the table cannot be read.
        """
        row = self._table.get(ROUND_KEY)
        round_ = Round.from_value(row.value) if row is not None else Round()
        rows = [row for prefix in self._prefixes(round_.number) for row in self._table.query(prefix)]
        heartbeat = self._table.get(TABLE_HEARTBEAT_KEY)
        self._round = round_.number
        events, _ = _parse(row for row in rows if row.key not in self._seen)
        self._seen.update(row.key for row in rows)
        step = 0 if heartbeat is None else heartbeat.value.get("step") or 0
        if step > self._step and round_.members and heartbeat is not None:
            self._step = step
            node = round_.members[0].node
            events.append(Progress(time=time.time(), node=node, round=heartbeat.value["round"], step=step))
        return events

    def _prefixes(self, newest: int) -> list[str]:
        if self._round is None:
            return [EVENT_PREFIX]
        numbers = [0, *range(max(1, self._round - 1), newest + 1)]
        return [f"{EVENT_PREFIX}{number:06d}." for number in numbers]


def _parse(rows: Iterable[Row]) -> tuple[list[Event], int]:
    events, skipped = [], 0
    for row in sorted(rows, key=lambda row: row.key):
        try:
            events.append(read_event_value(row.value))
        except ValueError:
            skipped += 1
    return sorted(events, key=lambda event: event.time), skipped
