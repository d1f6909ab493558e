"""The row ``checkpoint``: which checkpoint is *the* checkpoint.

The row carries the number of the round that may write it. The agent of rank 0 takes the row over when its round begins;
from then on a commit by an older round fails at the compare-and-swap, whatever that round believes. A stale mount or a
torn file can therefore never lead anyone astray: readers follow this row alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import Fenced, RowChanged, RowExists
from azureml_elastic.node.table import Table

__all__ = ["CHECKPOINT_KEY", "CheckpointPointer"]

CHECKPOINT_KEY = "checkpoint"


class CheckpointPointer:
    """The pointer as one round sees it. Thread-safe.

    Args:
        table: opened for the run.
        number: of the round, whose rank 0 this node is.
        owner: this agent's incarnation.
    """

    def __init__(self, table: Table, number: int, owner: str) -> None:
        self._table = table
        self._number = number
        self._owner = owner
        self._etag: str | None = None
        self._pointer: Mapping[str, Any] | None = None
        self._lock = threading.Lock()

    def take_over(self) -> Mapping[str, Any] | None:
        """Fence off all older rounds and return the checkpoint that they committed last.

        Raises:
            Fenced: a newer round has taken over.
            TableUnavailable: the table is away; call again.
        """
        with self._lock:
            while self._etag is None:
                row = self._table.get(CHECKPOINT_KEY)
                if row is not None and row.value["round"] > self._number:
                    newer = row.value["round"]
                    raise Fenced(f"Round {newer} has taken over the checkpoints; round {self._number} must not write.")
                self._pointer = row.value["pointer"] if row is not None else None
                if row is not None and (row.value["round"], row.value["owner"]) == (self._number, self._owner):
                    self._etag = row.etag
                    break
                value = {"round": self._number, "owner": self._owner, "pointer": self._pointer}
                try:
                    if row is None:
                        self._etag = self._table.insert(CHECKPOINT_KEY, value)
                    else:
                        self._etag = self._table.replace(CHECKPOINT_KEY, value, row.etag)
                except (RowExists, RowChanged):
                    continue
            return self._pointer

    def commit(self, pointer: Mapping[str, Any]) -> None:
        """Make this checkpoint the one that everyone restores.

        Raises:
            Fenced: a newer round has taken over; nothing was written.
            TableUnavailable: the table is away; the commit may or may not have happened and may be repeated.
        """
        while True:
            self.take_over()
            with self._lock:
                etag, self._etag = self._etag, None
                if etag is None:
                    continue
                value = {"round": self._number, "owner": self._owner, "pointer": dict(pointer)}
                try:
                    self._etag = self._table.replace(CHECKPOINT_KEY, value, etag)
                except RowChanged:
                    continue
                self._pointer = pointer
                return
