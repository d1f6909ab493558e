"""For which files a script looks before its first training step, and its saves: it writes one of them later.

A script without a session does not tell whether it continues from what it has saved, and nothing that it writes tells:
many save and never read. So its reads are noted at each start: files that it opens, or asks for, whether they are there
or not, and folders that it lists. The node's agent reads the notes, to name them.

An audit hook sees what is opened or renamed, and listed folders. No event tells of a question such as
``os.path.exists()``, all of which ask :func:`os.stat`; it is wrapped until the first backward pass or step of an
optimizer, where the notes end. Nor of files that compiled code opens: functions of torch and safetensors that write by
it are wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_ISREG
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook, wrap_function_wrapper

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.optimizer_steps import StepCounter

_END = b"\0"
_LONGEST_PATH = 4096

_MOST_PATHS = 1000
"""Number of paths after which a process notes no more: a script reads its state before most of its data."""

_MAX_DEPTH = 4
"""Number of levels of a listed folder in which files of state are saves."""

_STATE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".distcp", ".h5", ".keras", ".msgpack", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"}
)
_NEVER_STATE = frozenset(
    {".arrow", ".cfg", ".conf", ".csv", ".gif", ".html", ".incomplete", ".ini", ".jpeg", ".jpg", ".jsonl", ".lock"}
) | {
    ".log", ".md", ".mp3", ".mp4", ".parquet", ".part", ".png", ".py", ".pyc", ".pyi", ".so", ".svg", ".tmp", ".toml",
    ".wav", ".yaml", ".yml"
}  # fmt: skip
"""Ends of names of files that are read at a start and hold no state, or are logs."""

_WRITERS = {"torch.serialization": ("_open_zipfile_writer", 0)} | dict.fromkeys(
    ("safetensors.torch", "safetensors.numpy"), ("serialize_file", 1)
)
"""Functions by which compiled code opens files for writing, with the position of the path among their arguments."""

_IMPORTERS = "<frozen importlib", os.path.dirname(importlib.__file__)  # noqa: PTH120 - a text
"""Beginnings of the files of functions that list a folder for modules: that of the script, in which many save."""


def record(environ: Mapping[str, str]) -> None:
    """See what this process, a worker whose script is about to run, looks for, saves and trains."""
    if variables.CHANNEL in environ:
        with contextlib.suppress(OSError):
            _RECORDERS.append(_Recorder(Path(environ[variables.CHANNEL]).parent))


def saved() -> None:
    """Say, in a script without a session, that it has saved what it continues from.

    Needed only where that is not seen: see docs/how-to/stacks/index.md. A new node may come in the next step of an
    optimizer. Elsewhere it does nothing.
    """
    for recorder in _RECORDERS:
        recorder.saved()


def read_lookups(folder: Path, pids: Iterable[int]) -> frozenset[str]:
    """Return the absolute paths for which some workers have looked at their start; of folders with a slash behind.

    Args:
        folder: folder of the agent's socket.
    """
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(
                map(os.fsdecode, (folder / f"lookups-{pid}").read_bytes().split(_END)[:-1])
            )  # the last may be torn
    return frozenset(found)


def is_state_file(path: str) -> bool:
    """Return whether a file with this path holds a program's state, rather than a log, metrics or settings."""
    name = os.path.basename(path).lower()  # noqa: PTH119 - for each file that is written
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - as above
    if name.startswith(".") or suffix in _NEVER_STATE or suffix in {".json", ".txt"}:
        return False
    return suffix in _STATE_SUFFIXES or "checkpoint" in name or "ckpt" in name


class _Recorder:
    """Writer of the notes of one process; its forks write none."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._notes = (folder / f"lookups-{self._pid}").open("wb", buffering=0)
        self._steps = StepCounter(folder, self._end)
        self._seen: set[str] = set()
        self._looking = True
        self._stat: Callable[..., os.stat_result] = os.stat
        self._foreign = tuple(
            prefix.rstrip("/") + "/" for prefix in (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/etc")
        )
        """Folders with files that no script saves."""
        sys.addaudithook(self._on_event)
        self._wrap_stat()
        for module in _WRITERS:
            register_post_import_hook(self._wrap_writer, module)

    def saved(self) -> None:
        if os.getpid() == self._pid:
            self._steps.saves(None)

    def _end(self) -> None:
        """Note nothing more."""
        if self._looking:
            self._looking = False
            self._set_stat(self._stat)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & os.O_ACCMODE != os.O_RDONLY:
                self._writes(path)
            else:
                self._note(path)
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._writes(arguments[1])
        elif self._looking and event in ("os.listdir", "os.scandir"):
            by = sys._getframe(1).f_code.co_filename  # noqa: SLF001
            if not by.startswith(_IMPORTERS):
                self._note("." if arguments[0] is None else arguments[0], "/")

    def _wrap_writer(self, module: ModuleType) -> None:
        name, position = _WRITERS[module.__name__]

        def write(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
            self._writes(args[position])
            return wrapped(*args, **kwargs)

        wrap_function_wrapper(module, name, write)

    def _wrap_stat(self) -> None:
        plain = self._stat

        @functools.wraps(plain)
        def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
            try:
                found = plain(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
            except FileNotFoundError:
                if dir_fd is None:
                    self._note(path)
                raise
            if dir_fd is None and S_ISREG(found.st_mode):
                self._note(path)
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

    def _note(self, path: Any, end: str = "") -> None:
        if not self._looking or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # whatever a script passes, it gets its own error for it
            text = os.fsdecode(path)
            if not end and os.path.splitext(text)[1].lower() in _NEVER_STATE:  # noqa: PTH122 - a hot path
                return
            absolute = os.path.abspath(text) + end  # noqa: PTH100 - as above
            if absolute in self._seen or absolute.startswith(self._foreign) or len(absolute) > _LONGEST_PATH:
                return
            self._seen.add(absolute)
            self._notes.write(os.fsencode(absolute) + _END)
            if len(self._seen) >= _MOST_PATHS:
                self._end()

    def _writes(self, path: Any) -> None:
        """The script is about to write a file, of any kind, or has renamed one."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # as above
            absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as above
            listed = is_state_file(absolute) and any(
                f"{parent}/" in self._seen for parent in list(Path(absolute).parents)[:_MAX_DEPTH]
            )
            if listed or absolute in self._seen:
                self._steps.saves(absolute)


_RECORDERS: list[_Recorder] = []
"""Of this process, at most one."""
