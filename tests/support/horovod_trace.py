"""What the program ``horovod_program.py`` has recorded: where training has started each time, and the commits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support.waiting import until


class Entry(NamedTuple):
    """A start of training: the first batch, the number of workers, and their processes."""

    batch: int
    size: int
    pids: frozenset[int]


class Trace:
    """The records of a program in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trace"

    def entries(self) -> list[Entry]:
        """Return the starts of training that all workers have recorded, in order."""
        found: list[Entry] = []
        for word, *values in self._lines():
            if word == "enter":
                batch, size, pid = map(int, values)
                if not found or len(found[-1].pids) == found[-1].size:
                    found.append(Entry(batch, size, frozenset()))
                assert found[-1][:2] == (batch, size), "the workers do not agree"
                found[-1] = Entry(batch, size, found[-1].pids | {pid})
        return [entry for entry in found if len(entry.pids) == entry.size]

    def last_commit(self, before: Entry | None = None) -> int:
        """Return the batch of the last commit, or of the last one before an entry; 0 without one."""
        last = 0
        for word, batch, *values in self._lines():
            if word == "commit":
                last = int(batch)
            elif before is not None and int(batch) == before.batch and int(values[1]) in before.pids:
                break
        return last

    def wait_for(self, size: int, entries: int, batches: int = 25) -> None:
        """Wait for so many workers to have trained some batches after so many starts of training."""
        until(lambda: len(self.entries()) >= entries and self.entries()[-1].size == size, timeout=180)
        self.wait_for_commit(self.entries()[-1].batch + batches)

    def wait_for_commit(self, batch: int) -> None:
        """Wait for a batch to be committed."""
        until(lambda: self.last_commit() >= batch, timeout=60)

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []
