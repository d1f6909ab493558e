"""The fence of checkpoints: rounds take the row over and commit in a random order, with a table that fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from azureml_elastic.errors import Fenced, RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.table import Row
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY, CheckpointPointer

_FAILS = 0.15
"""Share of the calls that fail before they are carried out, and of those whose answer is lost."""


class _Rows:
    """A table of one row, some of whose calls fail before or after they are carried out."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._row: Row | None = None
        self._version = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Row | None:
        return self._do(lambda: self._row)

    def insert(self, key: str, value: dict[str, Any]) -> str:
        return self._do(lambda: self._write(value, None))

    def replace(self, key: str, value: dict[str, Any], etag: str) -> str:
        return self._do(lambda: self._write(value, etag))

    def _do(self, effect: Callable[[], Any]) -> Any:
        kind = self._rng.random()
        if kind < _FAILS:
            raise TableUnavailable("not carried out")
        with self._lock:
            result = effect()
        if kind > 1.0 - _FAILS:
            raise TableUnavailable("carried out, not answered")
        return result

    def _write(self, value: dict[str, Any], etag: str | None) -> str:
        if (self._row.etag if self._row else None) != etag:
            raise (RowExists if etag is None else RowChanged)("changed")
        self._version += 1
        self._row = Row(CHECKPOINT_KEY, value, str(self._version), None)
        return self._row.etag


def check_fence(seed: int) -> None:
    """Check that a committed checkpoint is never replaced by that of an older round, nor forgotten by a newer one.

    Raises:
        AssertionError: it is.
    """
    rng = random.Random(f"fence, {seed}")
    rows, rounds = _Rows(rng), list[CheckpointPointer]()
    newest, committed = 0, 0
    for step in range(1, 41):
        if not rounds or rng.random() < 0.15:
            rounds.append(CheckpointPointer(rows, len(rounds) + 1, f"owner {len(rounds)}"))
        number = len(rounds) if rng.random() < 0.6 else rng.randint(1, len(rounds))
        with suppress(Fenced, TableUnavailable):
            if rng.random() < 0.4:
                found = (rounds[number - 1].take_over() or {}).get("step", 0)
                if number >= newest:  # an older round has what it knew, and has written nothing
                    assert found >= committed, f"fence, seed {seed}: {committed} is committed, {number} found {found}"
                    newest = number
            else:
                rounds[number - 1].commit({"step": step})
                assert number >= newest, f"fence, seed {seed}: round {number} commits after {newest} has taken over"
                newest, committed = number, step
