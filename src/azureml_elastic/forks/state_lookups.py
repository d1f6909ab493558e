"""Notes for which files a script looks before its first training step: those that it may continue from.

A script without a session does not tell whether it continues from what it has saved, and nothing that it writes tells:
many save and never read. So its reads are noted at each start: files that it opens, or asks for, whether they are there
or not, and folders that it lists. The node's agent reads the notes; see :mod:`~azureml_elastic.node.agent.saved_files`.

Opened files and listed folders are seen by an audit hook. No event tells of a question such as ``os.path.exists()``,
all of which ask :func:`os.stat`; it is wrapped until the first backward pass or step of an optimizer, where the notes
end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from types import FrameType, ModuleType
from typing import Any

from wrapt import register_post_import_hook

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.optimizer_steps import on_backward

_FILE, _FOLDER = b"f", b"d"
_END = b"\0"
_LONGEST_PATH = 4096

_MOST_PATHS = 1000
"""Number of paths after which a process notes no more: a script reads its state before most of its data."""

_NEVER_STATE = frozenset(
    {".arrow", ".cfg", ".conf", ".csv", ".gif", ".html", ".incomplete", ".ini", ".jpeg", ".jpg", ".jsonl", ".lock"}
) | {
    ".log", ".md", ".mp3", ".mp4", ".parquet", ".part", ".png", ".py", ".pyc", ".pyi", ".so", ".svg", ".tmp", ".toml",
    ".wav", ".yaml", ".yml"
}  # fmt: skip
"""Ends of names of files that are read at a start and hold no state, or are logs."""


_IMPORTLIB = os.path.dirname(importlib.__file__)  # noqa: PTH120 - a text, to be compared with others


@dataclass(frozen=True)
class Lookups:
    """Where a script has looked at its start.

    Args:
        files: absolute paths that it has opened for reading or asked for, present or not.
        folders: absolute paths that it has listed.
    """

    files: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


def record(environ: Mapping[str, str]) -> None:
    """Note the lookups of this process, a worker whose script is about to run."""
    if variables.CHANNEL not in environ:
        return
    with contextlib.suppress(OSError):
        path = _path(Path(environ[variables.CHANNEL]).parent, os.getpid())
        _Recorder(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)).begin()


def read_lookups(folder: Path, pids: Iterable[int]) -> Lookups:
    """Return the lookups of some workers together."""
    found: dict[bytes, set[str]] = {_FILE: set(), _FOLDER: set()}
    for pid in pids:
        with contextlib.suppress(OSError):
            for note in _path(folder, pid).read_bytes().split(_END)[:-1]:  # the last one may be torn
                found.get(note[:1], set()).add(os.fsdecode(note[1:]))
    return Lookups(frozenset(found[_FILE]), frozenset(found[_FOLDER]))


def _is_import(caller: FrameType) -> bool:
    """Return whether a folder is listed for modules: that of the script always is, in which many save."""
    return caller.f_code.co_filename.startswith(("<frozen importlib", _IMPORTLIB))


def _path(folder: Path, pid: int) -> Path:
    return folder / f"lookups-{pid}"


class _Recorder:
    """Writer of the notes of one process; its forks write none."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._seen: set[tuple[bytes, str]] = set()
        self._active = True
        self._stat: Callable[..., os.stat_result] = os.stat
        self._foreign = tuple(
            prefix.rstrip("/") + "/" for prefix in (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/etc")
        )
        """Folders with files that no script saves."""

    def begin(self) -> None:
        """Note lookups from now on."""
        sys.addaudithook(self._on_event)
        self._wrap_stat()
        register_post_import_hook(self._await_step, "torch.optim.optimizer")
        on_backward(self.end)

    def end(self) -> None:
        """Note nothing more."""
        if not self._active:
            return
        self._active = False
        if os.stat is not self._stat:
            self._set_stat(self._stat)

    def _await_step(self, optimizer: ModuleType) -> None:
        def on_step(*_: Any) -> None:
            handle.remove()
            self.end()

        handle = optimizer.register_optimizer_step_pre_hook(on_step)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return  # a hook cannot be taken away, and some events are frequent
        if event == "open":
            path, _, flags = arguments
            if flags & os.O_ACCMODE == os.O_RDONLY:
                self._note(_FILE, path)
        elif event in ("os.listdir", "os.scandir") and not _is_import(sys._getframe(1)):  # noqa: SLF001
            self._note(_FOLDER, arguments[0])

    def _wrap_stat(self) -> None:
        plain = self._stat

        @functools.wraps(plain)
        def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
            try:
                found = plain(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
            except FileNotFoundError:
                if dir_fd is None:
                    self._note(_FILE, path)
                raise
            if dir_fd is None and S_ISREG(found.st_mode):
                self._note(_FILE, path)
            return found

        for features in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if plain in features:
                # Libraries look there for the function itself before they pass it a descriptor, as shutil.rmtree does.
                features.add(stat)
        self._set_stat(stat)

    @staticmethod
    def _set_stat(stat: Callable[..., os.stat_result]) -> None:
        os.stat = stat
        accessor = getattr(pathlib, "_NormalAccessor", None)
        if accessor is not None:  # Python 3.10 keeps the function
            accessor.stat = staticmethod(stat)

    def _note(self, kind: bytes, path: Any) -> None:
        if not self._active or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # whatever a script passes, it gets its own error for it
            text = os.fsdecode("." if path is None else path)
            if kind == _FILE and os.path.splitext(text)[1].lower() in _NEVER_STATE:  # noqa: PTH122 - a hot path
                return
            absolute = os.path.abspath(text)  # noqa: PTH100 - as above
            note = kind, absolute
            if note in self._seen or absolute.startswith(self._foreign) or len(absolute) > _LONGEST_PATH:
                return
            self._seen.add(note)
            os.write(self._descriptor, kind + os.fsencode(absolute) + _END)
            if len(self._seen) >= _MOST_PATHS:
                self.end()
