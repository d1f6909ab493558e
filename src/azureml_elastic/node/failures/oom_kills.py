"""Detection of processes of this container that the kernel killed because memory was exhausted."""

from __future__ import annotations

from pathlib import Path

__all__ = ["OomKillCounter"]

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class OomKillCounter:
    """Counter of the kernel's out-of-memory kills, from this process's control group.

    Both generations of control groups count them: ``memory.events`` in the unified hierarchy, ``memory.oom_control``
    in the older one. Where neither can be read, no kill is reported.

    Args:
        root: mount point of the control group hierarchies.
        own: path of the file that lists this process's groups.
    """

    def __init__(self, root: Path = _ROOT, own: Path = _OWN) -> None:
        self._files = _counters(root, own)
        self._seen = self._count()

    def more(self) -> bool:
        """Return whether there were kills since the last call, or since construction."""
        count, before = self._count(), self._seen
        self._seen = count
        return count is not None and before is not None and count > before

    def _count(self) -> int | None:
        for file in self._files:
            try:
                lines = [line.split() for line in file.read_text().splitlines()]
            except OSError:
                continue
            for words in lines:
                if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():  # noqa: PLR2004
                    return int(words[1])
        return None


def _counters(root: Path, own: Path) -> list[Path]:
    """Return where the counter may be: in this process's own group, or at the top of what the container sees."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    unified = [path.lstrip("/") for number, _, path in groups if number == "0"]
    older = [path.lstrip("/") for _, names, path in groups if "memory" in names.split(",")]
    files = [root / path / "memory.events" for path in (*unified, "")]
    return files + [root / "memory" / path / "memory.oom_control" for path in (*older, "")]
