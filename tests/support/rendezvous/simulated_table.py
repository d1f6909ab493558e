"""A simulated table: a queue in front of it, rows with versions, and faults on demand."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.table import Row
from azureml_elastic.node.table.values import read_value, write_value

if TYPE_CHECKING:
    from simulation import Cluster, Node

_PAGE = 1000
_CUT_OFF_SECONDS = 10.0  # as long as a table is asked again and again before it counts as away
_START = datetime(2020, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Fault:
    """The failure of one call of the table.

    Args:
        done: whether the call is carried out although it fails.
        seconds: time until the call fails.
    """

    done: bool
    seconds: float


@dataclass(frozen=True)
class Write:
    """One write that was tried."""

    when: float
    node: str
    key: str
    value: Mapping[str, Any]
    done: bool


class SimulatedStorage:
    """What all tables share; a call takes its place in the queue, has its effect, and is answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._costs = cluster.costs
        self._rows: dict[str, Row] = {}
        self._free_at = 0.0
        self._versions = itertools.count(1)
        self.calls: Counter[str] = Counter()
        self.writes: list[Write] = []

    def call(self, node: Node, kind: str, key: str, effect: Callable[[], Any]) -> Any:
        """Carry a call out in simulated time."""
        scheduler, costs = self._scheduler, self._costs
        node.step()
        self.calls[kind] += 1
        pages = 1
        if kind == "query":
            pages = max(1, -(-sum(name.startswith(key) for name in self._rows) // _PAGE))
            self.calls["query"] += pages - 1
        answer: list[Any] = []

        def happen() -> None:
            try:
                answer.append(effect())
            except (RowExists, RowChanged) as error:
                answer.append(error)

        start = max(scheduler.now, self._free_at)
        self._free_at = start + pages / costs.calls_per_second
        end = start + pages * costs.call
        fault = self._cluster.fault(self._cluster.random, scheduler.now, kind, node)
        if node.cut:
            fault = Fault(done=False, seconds=_CUT_OFF_SECONDS)
        if fault is None or fault.done:
            scheduler.at((start + end) / 2, happen)
        if fault is not None:
            scheduler.wait(max(end, scheduler.now + fault.seconds))
            raise TableUnavailable(f"{kind} of {key!r}: {'the answer was lost' if fault.done else 'not carried out'}")
        scheduler.wait(end)
        node.step()
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def query(self, prefix: str) -> list[Row]:
        return [row for key, row in sorted(self._rows.items()) if key.startswith(prefix)]

    def write(self, node: Node, key: str, value: Mapping[str, Any], etag: str | None) -> str:
        stored = read_value(key, write_value(key, value))
        row = self._rows.get(key)
        done = (row.etag if row else None) == etag
        self.writes.append(Write(self._scheduler.now, node.name, key, stored, done))
        if not done:
            raise (RowExists if etag is None else RowChanged)(f"Row {key!r} is not as expected.")
        new = Row(key, stored, str(next(self._versions)), _START + timedelta(seconds=self._scheduler.now))
        self._rows[key] = new
        return new.etag


class SimulatedTable:
    """One node's table; implements ``Table``."""

    def __init__(self, storage: SimulatedStorage, node: Node) -> None:
        self._storage = storage
        self._node = node

    def get(self, key: str) -> Row | None:
        return self._storage.call(self._node, "get", key, lambda: self._storage.get(key))

    def insert(self, key: str, value: Mapping[str, Any]) -> str:
        write_value(key, value)
        effect = functools.partial(self._storage.write, self._node, key, value, None)
        return self._storage.call(self._node, "insert", key, effect)

    def replace(self, key: str, value: Mapping[str, Any], etag: str) -> str:
        write_value(key, value)
        effect = functools.partial(self._storage.write, self._node, key, value, etag)
        return self._storage.call(self._node, "replace", key, effect)

    def delete(self, key: str, etag: str | None = None) -> None:
        raise NotImplementedError("the rendezvous deletes nothing")

    def query(self, prefix: str) -> Iterator[Row]:
        return iter(self._storage.call(self._node, "query", prefix, lambda: self._storage.query(prefix)))

    def close(self) -> None:
        pass
