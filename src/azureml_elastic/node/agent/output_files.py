"""Where a program writes its state, and which files there are new and complete."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["SavedFiles", "Scan", "is_state_file", "output_paths", "scan"]

_OUTPUT_VARIABLES = "AZURE_ML_OUTPUT_"
_INPUT_VARIABLES = "AZURE_ML_INPUT_"
"""Beginnings of the variables in which Azure ML gives the paths of a job's outputs and inputs."""

_STATE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".distcp", ".h5", ".keras", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"}
)
_OTHER_SUFFIXES = frozenset({".csv", ".html", ".incomplete", ".json", ".jsonl", ".lock", ".log", ".md", ".part"}) | {
    ".png", ".py", ".pyc", ".svg", ".tmp", ".txt", ".yaml", ".yml"
}  # fmt: skip
_SKIPPED_FOLDERS = frozenset({"__pycache__", "lost+found", "node_modules", "site-packages"})

_LONGEST_PATH = 4096

_QUIET_SECONDS = 2.0
"""Time without a change after which the new files of a folder are complete."""

_MAX_ENTRIES = 2000
_MAX_DEPTH = 4
_MAX_SECONDS = 5.0

Stamp = tuple[int, int, int]
"""Time of the last change in nanoseconds, size and inode number of a file."""


def output_paths(
    environ: Mapping[str, str], arguments: Sequence[str], checkpoints: str | None, folder: Path
) -> tuple[Path, ...]:
    """Return the files and folders that a program may save to; not all of them need to exist.

    These are the checkpoint folder, Azure ML's outputs, the values of the program's arguments, ``outputs`` in the
    working directory, and the working directory itself.

    Args:
        environ: environment of the program.
        arguments: arguments of the program.
        checkpoints: the run's folder for checkpoints, ``None`` for none.
        folder: absolute path of the working directory.
    """
    inputs = {value.rstrip("/") for name, value in environ.items() if name.startswith(_INPUT_VARIABLES)}
    named = [checkpoints or ""]
    named += [value for name, value in sorted(environ.items()) if name.startswith(_OUTPUT_VARIABLES)]
    named += [value for word in arguments for value in _values(word)]
    usable = [
        value
        for value in named
        if value and "://" not in value and "\0" not in value and len(value) < _LONGEST_PATH
        if value.rstrip("/") not in inputs
    ]
    paths = [Path(os.path.normpath(folder / value)) for value in usable]
    above = {folder, *folder.parents}
    return tuple(dict.fromkeys([path for path in paths if path not in above] + [folder / "outputs", folder]))


def _values(word: str) -> Iterator[str]:
    """Yield what may be a path in a word of the command line, such as ``--output=x``, ``output_dir=x`` or ``x``."""
    if not word.startswith("-"):
        yield word
    if "=" in word:
        yield word.partition("=")[2]


def is_state_file(name: str) -> bool:
    """Return whether a file with this name holds a program's state, rather than a log, metrics or settings."""
    name = name.lower()
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - a name, not a path
    if name.startswith(".") or suffix in _OTHER_SUFFIXES:
        return False
    return suffix in _STATE_SUFFIXES or "checkpoint" in name or "ckpt" in name


@dataclass(frozen=True)
class Scan:
    """Files of state that were found.

    Args:
        files: when each file changed, by its path.
        complete: whether all folders were read to their end.
    """

    files: Mapping[str, Stamp]
    complete: bool = True


def scan(paths: Sequence[Path], excluded: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> Scan:
    """Read files and folders, newest folders first, up to a depth of 4, 2,000 entries each and 5 s in total.

    Args:
        paths: files and folders; those that do not exist are left out.
        excluded: folder that is not read, unless it is one of the paths.
        clock: clock in monotonic seconds.
    """
    until = clock() + _MAX_SECONDS
    files: dict[str, Stamp] = {}
    complete = True
    for path in paths:
        try:
            if not path.is_dir():
                found = path.stat()
                if is_state_file(path.name) and found.st_size:
                    files[str(path)] = _stamp(found)
                continue
        except (OSError, ValueError):
            continue
        complete &= _scan_folder(str(path), str(excluded), files, lambda: clock() < until)
    return Scan(files, complete)


def _scan_folder(root: str, excluded: str, files: dict[str, Stamp], in_time: Callable[[], bool]) -> bool:
    """Add the files of state below a folder; return whether all of them were found."""
    level, entries = [root], 0
    for _ in range(_MAX_DEPTH):
        below: list[tuple[int, str]] = []
        for folder in level:
            try:
                with os.scandir(folder) as listing:
                    for entry in listing:
                        entries += 1
                        if entries > _MAX_ENTRIES or not in_time():
                            return False
                        if entry.is_dir(follow_symlinks=False):
                            if not _is_skipped(entry.name) and entry.path != excluded:
                                below.append((-entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
                        elif is_state_file(entry.name) and (found := entry.stat(follow_symlinks=False)).st_size:
                            files[entry.path] = _stamp(found)
            except OSError:
                continue  # removed meanwhile, or not readable
        level = [path for _, path in sorted(below)]
    return not level


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in _SKIPPED_FOLDERS


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass
class SavedFiles:
    """Decides from successive scans when the program has saved since the first of them.

    A save is a file that is new or changed since the first scan, in a folder whose files of state have not changed for
    two seconds: a checkpoint of several files is one folder.

    Attributes:
        saved_at: time of the scan that first had the last save, in monotonic seconds; ``None`` before the first save.
    """

    saved_at: float | None = None
    _before: Scan | None = None
    _folders: dict[str, tuple[dict[str, Stamp], float]] = field(default_factory=dict)

    @property
    def saved(self) -> bool:
        """Whether the program has saved."""
        return self.saved_at is not None

    def add(self, found: Scan, now: float) -> None:
        """Add a scan.

        Args:
            found: files that were found.
            now: time of the scan in monotonic seconds.
        """
        if self._before is None:
            self._before = found
            return
        # Where not all files were found, a file that is seen for the first time may be old.
        newest = max((stamp[0] for stamp in self._before.files.values()), default=0)
        after = -1 if self._before.complete else newest
        changed: dict[str, dict[str, Stamp]] = {}
        for path, stamp in found.files.items():
            if stamp != self._before.files.get(path) and stamp[0] > after:
                changed.setdefault(os.path.dirname(path), {})[path] = stamp  # noqa: PTH120 - thousands of them
        folders: dict[str, tuple[dict[str, Stamp], float]] = {}
        for folder, files in changed.items():
            known = self._folders.get(folder)
            since = known[1] if known is not None and known[0] == files else now
            folders[folder] = files, since
            if now - since >= _QUIET_SECONDS:
                self.saved_at = since if self.saved_at is None else max(since, self.saved_at)
        self._folders = folders
