"""Which of the files that a program has looked for at its start it has saved since, completely."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from azureml_elastic.forks.state_lookups import Lookups

_STATE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".distcp", ".h5", ".keras", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"}
)
_OTHER_SUFFIXES = frozenset({".csv", ".html", ".incomplete", ".json", ".jsonl", ".lock", ".log", ".md", ".part"}) | {
    ".png", ".py", ".pyc", ".svg", ".tmp", ".txt", ".yaml", ".yml"
}  # fmt: skip
_SKIPPED_FOLDERS = frozenset({"__pycache__", "lost+found", "node_modules", "site-packages"})

_QUIET_SECONDS = 2.0
"""Time without a change after which the new files of a folder are complete."""

_MAX_ENTRIES = 2000
_MAX_DEPTH = 4
_MAX_SECONDS = 5.0

_STOP_SECONDS = 0.5
"""Time for a process to stop; one that waits for a disk takes longer."""

Stamp = tuple[int, int, int]
"""Time of the last change in nanoseconds, size and inode number of a file."""


def is_state_file(name: str) -> bool:
    """Return whether a file with this name holds a program's state, rather than a log, metrics or settings."""
    name = name.lower()
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - a name, not a path
    if name.startswith(".") or suffix in _OTHER_SUFFIXES:
        return False
    return suffix in _STATE_SUFFIXES or "checkpoint" in name or "ckpt" in name


@dataclass(frozen=True)
class Scan:
    """What was found at one of the paths that a program has looked for.

    Args:
        files: when each file changed, by its path.
        complete: whether a folder was read to its end.
    """

    files: Mapping[str, Stamp] = field(default_factory=dict)
    complete: bool = True


def scan(
    lookups: Lookups, excluded: Path | None = None, *, clock: Callable[[], float] = time.monotonic
) -> dict[str, Scan]:
    """Read the files, and the folders for files of state: 4 levels, 2,000 entries of each and 5 s in total.

    Args:
        lookups: where the program has looked. A file may have any name, as it was looked for by it.
        excluded: folder that is not read, unless the program has looked into it.

    Returns:
        What was found, by the path that was looked for.
    """
    until = clock() + _MAX_SECONDS
    found: dict[str, Scan] = {}
    for path in sorted(lookups.files):
        found[path] = Scan(_file(path))
    for path in sorted(lookups.folders):
        files: dict[str, Stamp] = {}
        complete = _scan_folder(path, str(excluded), files, lambda: clock() < until)
        before = found.get(path, Scan())
        found[path] = Scan({**before.files, **files}, complete)
    return found


def _file(path: str) -> dict[str, Stamp]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a text
    except (OSError, ValueError):
        return {}
    is_file = stat.S_ISREG(found.st_mode)
    return {path: _stamp(found)} if is_file and found.st_size else {}


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
        # The folders that changed last come first: where the limit of entries cuts the scan off, the newest checkpoint
        # has been seen.
        level = [path for _, path in sorted(below)]
    return not level


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in _SKIPPED_FOLDERS


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass
class SavedFiles:
    """Decides from successive scans whether the program has saved since the first scan of a path.

    A save is a file that is new or changed since then, and complete. That is so when the files of its folder have not
    changed for two seconds, as a checkpoint of several files is one folder; or when the file was seen to be *replaced*
    by another version, or written from its start again, so that the version before was complete. One that only grows
    is not.

    Attributes:
        saved: the file that was found first to be saved, ``None`` before.
    """

    saved: str | None = None
    _before: dict[str, Scan] = field(default_factory=dict)
    _changed: dict[str, Stamp] = field(default_factory=dict)
    _folders: dict[str, tuple[dict[str, Stamp], float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Scan], now: float) -> None:
        """Add a scan."""
        changed: dict[str, Stamp] = {}
        for path, seen in found.items():
            # The first scan is the state before: its times alone do not distinguish a new file from an old one,
            # as storage has another clock than this machine.
            before = self._before.setdefault(path, seen)
            # Where not all files were found, a file that is seen for the first time may be old.
            newest = max((stamp[0] for stamp in before.files.values()), default=0)
            after = -1 if before.complete else newest
            changed |= {
                file: stamp
                for file, stamp in seen.files.items()
                if stamp != before.files.get(file) and stamp[0] > after
            }
        replaced = (file for file, stamp in changed.items() if _is_replaced(self._changed.get(file), stamp))
        self.saved = self.saved or next(replaced, None)
        self._changed |= changed  # also of files that are gone or empty at this moment, as they are written anew
        folders: dict[str, dict[str, Stamp]] = {}
        for file, stamp in changed.items():
            folders.setdefault(os.path.dirname(file), {})[file] = stamp  # noqa: PTH120 - thousands of them
        quiet: dict[str, tuple[dict[str, Stamp], float]] = {}
        for folder, files in folders.items():
            known = self._folders.get(folder)
            since = known[1] if known is not None and known[0] == files else now
            quiet[folder] = files, since
            if now - since >= _QUIET_SECONDS:
                self.saved = self.saved or next(iter(files))
        self._folders = quiet


def _is_replaced(earlier: Stamp | None, stamp: Stamp) -> bool:
    """Return whether a changed file is another version, rather than the same one that is still written."""
    if earlier is None or earlier == stamp:
        return False
    return stamp[2] != earlier[2] or stamp[1] <= earlier[1]


def resume(pids: Iterable[int]) -> None:
    """Have stopped processes go on."""
    _send(pids, signal.SIGCONT)


def stop_between_saves(pids: Collection[int], paths: Collection[str]) -> bool:
    """Stop processes that are about to be ended, unless one of them has one of the files open for writing.

    A process that is ended while it saves leaves a torn file; one that saves all the time would soon do so between a
    look at its files and its end. So it is stopped before the look, and goes on only if it saves at that moment.

    Args:
        paths: files, and folders with files.

    Returns:
        Whether they are stopped now; signals that are sent to them wait for SIGCONT.
    """
    if not _is_writing(pids, paths):
        _send(pids, signal.SIGSTOP)
        until = time.monotonic() + _STOP_SECONDS
        while not (stopped := all(map(is_stopped, pids))) and time.monotonic() < until:
            time.sleep(0.001)
        if stopped and not _is_writing(pids, paths):
            return True
    resume(pids)
    return False


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the agent notices
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped, or have ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [
            (thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            for thread in threads
        ]
    except OSError:
        return not psutil.pid_exists(pid)  # else a thread has just ended
    return set(states) <= set("TtZX")


def _is_writing(pids: Iterable[int], paths: Collection[str]) -> bool:
    for pid in pids:
        try:
            files = psutil.Process(pid).open_files()
        except (psutil.Error, OSError):
            continue
        for file in files:
            if file.mode != "r" and any(file.path == path or file.path.startswith(f"{path}/") for path in paths):
                return True
    return False
