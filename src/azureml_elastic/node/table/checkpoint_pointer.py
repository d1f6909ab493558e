"""The row ``checkpoint``, which names the committed checkpoint.

The row carries the number of the round that may write it, as a fencing token. The agent of rank 0 takes the row over
when its round begins; from then on the compare-and-swap of an older round fails. Only this row decides which checkpoint
is restored, so that a stale mount or a torn file has no effect.

Training waits for a commit, so an unavailable table must not delay it. The row is written on a separate thread, and a
commit waits for it briefly: a later commit replaces it. A repeated commit of the same checkpoint means that none
follows, and waits longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from azureml_elastic.errors import Fenced, RowChanged, RowExists, TableUnavailable
from azureml_elastic.node.table import Table

CHECKPOINT_KEY = "checkpoint"

_FIRST_WAIT_SECONDS = 1.0
_REPEATED_WAIT_SECONDS = 12.0  # a table call ends after 10


class CheckpointPointer:
    """Checkpoint pointer of one round. Thread-safe.

    Args:
        number: number of the round in which this node has rank 0.
        owner: incarnation of this agent.
    """

    def __init__(self, table: Table, number: int, owner: str) -> None:
        self._table = table
        self._number = number
        self._owner = owner
        self._etag: str | None = None
        self._held = False
        self._pointer: Mapping[str, Any] | None = None
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._current: _Commit | None = None
        self._requested: Mapping[str, Any] | None = None

    def take_over(self) -> Mapping[str, Any] | None:
        """Fence off older rounds and return the checkpoint that they committed last.

        Raises:
            Fenced: a newer round has taken over.
            TableUnavailable: the table is not available; the call may be repeated.
        """
        with self._lock:
            self._require_row()
            return self._pointer

    def commit(self, pointer: Mapping[str, Any]) -> None:
        """Make this checkpoint the one that is restored.

        The first call for a checkpoint waits a second for the table, a repeated one as long as a table call takes.
        Nothing is written twice.

        Raises:
            Fenced: a newer round has taken over; nothing was written.
            TableUnavailable: the table is not available; the commit may still happen, and may be repeated.
        """
        with self._commit_lock:
            again, self._requested = self._requested == pointer, dict(pointer)
            timeout = _REPEATED_WAIT_SECONDS if again else _FIRST_WAIT_SECONDS
            current = self._current
            if current is not None and current.pointer != pointer and not current.outcome.done():
                # The previous write is still unanswered: training does not wait for another one.
                if not again:
                    raise TableUnavailable(f"{current.trouble} The commit of {_name(pointer)} was not begun.")
                current.wait(timeout)
            failed = current is not None and current.outcome.done() and current.outcome.exception() is not None
            if current is None or current.pointer != pointer or failed:
                current = self._current = _Commit(pointer, self._write)
            current.wait(timeout)
            current.outcome.result()

    def _write(self, pointer: Mapping[str, Any]) -> None:
        with self._lock:
            while True:
                self._require_row()
                if self._pointer == pointer:
                    return  # written by an attempt whose answer was lost
                assert self._etag is not None
                # Forgotten before the call: if it fails, it may have been carried out, and the version is another one
                # then.
                etag, self._etag = self._etag, None
                try:
                    self._etag = self._table.replace(CHECKPOINT_KEY, self._value(pointer), etag)
                except RowChanged:
                    continue
                self._pointer = pointer
                return

    def _require_row(self) -> None:
        """Read or create the row of this round, and keep its version."""
        while self._etag is None:
            row = self._table.get(CHECKPOINT_KEY)
            if row is not None and not (
                isinstance(row.value.get("round"), int) and {"owner", "pointer"} <= {*row.value}
            ):
                raise TableUnavailable(
                    f"The row {CHECKPOINT_KEY!r} holds {str(row.value)[:60]}, which no node has written: another "
                    "program writes to the run's table. Nothing was written."
                )
            if row is not None and row.value["round"] > self._number:
                newer = row.value["round"]
                raise Fenced(f"Round {newer} has taken over the checkpoints; round {self._number} must not write.")
            if not self._held or (row is not None and row.value["round"] == self._number):
                self._pointer = row.value["pointer"] if row is not None else None
            # Otherwise the row that this round has held is gone or older: rows went back in time, and are put back.
            if row is not None and (row.value["round"], row.value["owner"]) == (self._number, self._owner):
                self._etag, self._held = row.etag, True
                return
            value = self._value(self._pointer)
            try:
                if row is None:
                    self._etag = self._table.insert(CHECKPOINT_KEY, value)
                else:
                    self._etag = self._table.replace(CHECKPOINT_KEY, value, row.etag)
            except (RowExists, RowChanged):
                continue
            self._held = True

    def _value(self, pointer: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"round": self._number, "owner": self._owner, "pointer": None if pointer is None else dict(pointer)}


class _Commit:
    """Write of one commit on a daemon thread, which may be cut off at any time, as the row changes atomically."""

    def __init__(self, pointer: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
        self.pointer = dict(pointer)
        self.outcome: Future[None] = Future()
        self._write = write
        self._since = time.monotonic()
        # Not a pool's thread, which the interpreter would wait for at its exit.
        threading.Thread(target=self._run, name="commit", daemon=True).start()

    @property
    def trouble(self) -> str:
        since = time.monotonic() - self._since
        return f"The table has not answered the commit of {_name(self.pointer)} for {since:.1f} s."

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the write.

        Raises:
            TableUnavailable: the write takes longer than the timeout.
        """
        if not wait([self.outcome], timeout_s).done:
            raise TableUnavailable(f"{self.trouble} It may still be carried out, and may be repeated.")

    def _run(self) -> None:
        try:
            self._write(self.pointer)
            self.outcome.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by outcome.result()
            self.outcome.set_exception(error)


def _name(pointer: Mapping[str, Any]) -> str:
    return f"step {pointer.get('step', '?')}"
