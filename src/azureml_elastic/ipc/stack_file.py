"""The file into which a worker's stacks are written when its node's agent asks for them.

The worker makes the file when its session starts, with one line of JSON that says who it is and which signal makes it
dump. The agent, which has given the folder, needs to know nothing else. The text of the dumps follows that line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SUFFIX = ".stacks"
_LONGEST_LINE_BYTES = 4096


@dataclass(frozen=True)
class StackFile:
    """Who writes the file, and how to make it write.

    Args:
        signal: number of the signal that makes it dump the stacks of all its threads.
        main_thread: ``threading.get_ident()`` of its main thread, as which the dump names it.
    """

    pid: int
    rank: int
    local_rank: int
    signal: int
    main_thread: int

    def path(self, folder: Path) -> Path:
        """Return the file's path in the folder that all workers of a node share."""
        return folder / f"worker-{self.pid}{SUFFIX}"

    def to_line(self) -> bytes:
        """Return the first line of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> StackFile | None:
        """Read the first line of a file; ``None`` where it is not there, torn or of another form."""
        try:
            with path.open("rb") as file:
                line = file.readline(_LONGEST_LINE_BYTES)
            fields = json.loads(line) if line.endswith(b"\n") else {}
            return cls(**{name: int(fields[name]) for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def stack_files(folder: Path) -> Iterator[tuple[Path, StackFile]]:
    """Yield the files of a folder that can be read, with what their first lines say, by rank."""
    found = [(path, entry) for path in folder.glob(f"*{SUFFIX}") if (entry := StackFile.read(path)) is not None]
    yield from sorted(found, key=lambda pair: (pair[1].local_rank, pair[1].pid))
