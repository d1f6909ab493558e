"""State and events of a run as its table shows them, for readers outside of the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from azureml_elastic.ledger.events import Event, NodeStarted, Progress, read_event_value
from azureml_elastic.ledger.picture import Moment, NodeState
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.records.event_recorder import EVENT_PREFIX
from azureml_elastic.node.rendezvous.row_keys import ALL_PREFIX, ROUND_KEY, node_of, parsed
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table import Row, Table
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY

_BEFORE_ROUNDS = f"{EVENT_PREFIX}000000."


def read_run_state(table: Table) -> Moment | None:
    """Read the state of a run; return ``None`` if the table has no row of it yet.

    Raises:
        TableError: the table cannot be read.
    """
    rows = {row.key: row for row in table.query(ALL_PREFIX)}
    if ROUND_KEY not in rows and not any(node_of(key) is not None for key in rows):
        return None
    round_ = _read_round(rows.pop(ROUND_KEY, None))
    members = [parsed(Member.from_value, row) for key, row in rows.items() if node_of(key) is not None]
    heartbeat, checkpoint = _value(table.get(TABLE_HEARTBEAT_KEY)), _value(table.get(CHECKPOINT_KEY))
    pointer = checkpoint.get("pointer") or {}
    steps = [step for step in (heartbeat.get("step"), pointer.get("step")) if step is not None]
    return Moment(
        round=round_.number,
        state=round_.state,
        members=tuple(member.node for member in round_.members),
        sizes=(round_.world_size,) if round_.members else (),
        reason=round_.reason,
        message=round_.message,
        losses=round_.losses,
        nodes=tuple(_nodes(round_, members, _jobs(table.query(_BEFORE_ROUNDS)))),
        step=max(steps, default=None),
        steps=heartbeat.get("steps"),
        checkpoint_step=pointer.get("step"),
        waits=(heartbeat.get("waits") or "") if heartbeat.get("round") == round_.number else "",
    )


def _read_round(row: Row | None) -> Round:
    return Round() if row is None else parsed(Round.from_value, row)


def _value(row: Row | None) -> Mapping[str, Any]:
    return {} if row is None else row.value


def _jobs(rows: Iterable[Row]) -> dict[str, str]:
    """Return the names of the nodes' jobs."""
    events = [read_event_value(row.value) for row in rows if row.value.get("kind") == "node_started"]
    return {event.node: event.job for event in events if isinstance(event, NodeStarted)}


def _nodes(round_: Round, rows: Iterable[Member], jobs: Mapping[str, str]) -> Iterable[NodeState]:
    in_round = round_.members if round_.state == "sealed" else ()
    for rank, member in enumerate(in_round):
        state = f"in round {round_.number}"
        yield NodeState(member.node, state, rank, round_.number, job=jobs.get(member.node, ""))
    names = {member.node for member in in_round}
    for member in sorted(rows, key=lambda member: member.node):
        if member.node not in names:
            job, alive = jobs.get(member.node, ""), member.state != "left"
            yield NodeState(member.node, member.state, None, member.round, alive=alive, job=job, reason=member.reason)


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
        round_ = _read_round(self._table.get(ROUND_KEY))
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
        # Always round 0, in which each node starts, and the round before: its last events are written while the next
        # one forms.
        numbers = [0, *range(max(1, self._round - 1), newest + 1)]
        return [f"{EVENT_PREFIX}{number:06d}." for number in numbers]


def _parse(rows: Iterable[Row]) -> tuple[list[Event], int]:
    events, skipped = [], 0
    # By key, then by time: of events at the same moment those of one node keep their order.
    for row in sorted(rows, key=lambda row: row.key):
        try:
            events.append(read_event_value(row.value))
        except ValueError:
            skipped += 1
    return sorted(events, key=lambda event: event.time), skipped
