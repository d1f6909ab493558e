"""The row ``checkpoint``: which checkpoint is *the* checkpoint.

The row carries the number of the round that may write it. The agent of rank 0 takes the row over when its round begins;
from then on a commit by an older round fails at the compare-and-swap, whatever that round believes. A stale mount or a
torn file can therefore never lead anyone astray: readers follow this row alone.

Training waits for a commit, so a table that is away must not hold it up. The row is written on a thread of its own.
Whoever commits waits for it, but not for long: a later commit takes the place of this one. Only who asks again for the
same checkpoint shows that there will be no later one, and is given more time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.errors import Fenced, RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.table import Table

__all__ = ["CHECKPOINT_KEY", "CheckpointPointer"]

CHECKPOINT_KEY = "checkpoint"

_FIRST_WAIT_SECONDS = 1.0
_AGAIN_WAIT_SECONDS = 12.0  # a table call gives up after 10


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
        self._turn = threading.Lock()
        self._current: _Commit | None = None
        self._asked: Mapping[str, Any] | None = None

    def take_over(self) -> Mapping[str, Any] | None:
        """Fence off all older rounds and return the checkpoint that they committed last.

        Raises:
            Fenced: a newer round has taken over.
            TableUnavailable: the table is away; call again.
        """
        with self._lock:
            self._require_row()
            return self._pointer

    def commit(self, pointer: Mapping[str, Any]) -> None:
        """Make this checkpoint the one that everyone restores.

        Asked for a checkpoint for the first time, it gives the table a second; asked again for the same one, as long
        as a call to the table takes. Nothing is written twice.

        Raises:
            Fenced: a newer round has taken over; nothing was written.
            TableUnavailable: the table is away; the commit may still happen, and may be repeated.
        """
        with self._turn:
            again, self._asked = self._asked == pointer, dict(pointer)
            timeout = _AGAIN_WAIT_SECONDS if again else _FIRST_WAIT_SECONDS
            current = self._current
            if current is not None and current.pointer != pointer and current.running:
                # The table does not even answer what it was asked before: training is not held up for it once more.
                if not again:
                    raise TableUnavailable(f"{current.trouble} The commit of {_name(pointer)} was not begun.")
                current.wait(timeout)
            if current is None or current.pointer != pointer or current.failed:
                current = self._current = _Commit(pointer)
                current.start(self._write)
            current.result(timeout)

    def _write(self, pointer: Mapping[str, Any]) -> None:
        with self._lock:
            while True:
                self._require_row()
                if self._pointer == pointer:
                    return  # an earlier attempt, whose answer was lost, has written it
                assert self._etag is not None
                etag, self._etag = self._etag, None
                try:
                    self._etag = self._table.replace(CHECKPOINT_KEY, self._value(pointer), etag)
                except RowChanged:
                    continue
                self._pointer = pointer
                return

    def _require_row(self) -> None:
        """Have the row's version, of a row that is this round's."""
        while self._etag is None:
            row = self._table.get(CHECKPOINT_KEY)
            if row is not None and row.value["round"] > self._number:
                newer = row.value["round"]
                raise Fenced(f"Round {newer} has taken over the checkpoints; round {self._number} must not write.")
            self._pointer = row.value["pointer"] if row is not None else None
            if row is not None and (row.value["round"], row.value["owner"]) == (self._number, self._owner):
                self._etag = row.etag
                return
            value = self._value(self._pointer)
            try:
                if row is None:
                    self._etag = self._table.insert(CHECKPOINT_KEY, value)
                else:
                    self._etag = self._table.replace(CHECKPOINT_KEY, value, row.etag)
            except (RowExists, RowChanged):
                continue

    def _value(self, pointer: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"round": self._number, "owner": self._owner, "pointer": None if pointer is None else dict(pointer)}


class _Commit:
    """One commit on its way to the table."""

    def __init__(self, pointer: Mapping[str, Any]) -> None:
        self.pointer = dict(pointer)
        self._error: Exception | None = None
        self._done = threading.Event()
        self._since = time.monotonic()

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    @property
    def failed(self) -> bool:
        return self._done.is_set() and self._error is not None

    @property
    def trouble(self) -> str:
        since = time.monotonic() - self._since
        return f"The table has not answered the commit of {_name(self.pointer)} for {since:.1f} s."

    def start(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Write on a thread, which may be cut off at any time: the row changes in one step or not at all."""
        threading.Thread(target=self._run, args=(write,), name="commit", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, well or not.

        Raises:
            TableUnavailable: it takes longer.
        """
        if not self._done.wait(timeout_s):
            raise TableUnavailable(f"{self.trouble} It may still be carried out, and may be repeated.")

    def result(self, timeout_s: float) -> None:
        """Return when the row is written, or raise why not."""
        self.wait(timeout_s)
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        try:
            write(self.pointer)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
        finally:
            self._done.set()


def _name(pointer: Mapping[str, Any]) -> str:
    return f"step {pointer.get('step', '?')}"
