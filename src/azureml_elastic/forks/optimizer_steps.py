"""Counts of the steps that a script's optimizers take, and the first one after a save, for the node's agent.

A script without a session reports nothing, but one that trains with torch takes steps of an optimizer, of which torch
informs hooks. Each optimizer has a count of its own: one that begins when the training is over, to calibrate what was
trained or to fit a head for its evaluation, is not the training's. While a process group that steps were taken in is
closed, nothing is counted: what follows is the work of one rank. Of a script with optimizers that are not torch's own,
as fastai's, backward passes are counted instead.

The counts are in a file that the worker has mapped, so that a step costs no system call. Where other nodes wait, the
agent asks in it that the worker waits, too, in the first step after its next save: there, and nowhere else, the program
has certainly saved what it continues from and not left its training loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from wrapt import register_post_import_hook

_OPTIMIZERS = 64
"""Number of counts of a process. Further optimizers share them: some scripts have one for each parameter."""

_COUNTS = struct.Struct(f"={_OPTIMIZERS}Q")
_COUNT = struct.Struct("=Q")
_SAVED_AT = struct.Struct("=d")
_WHOLE = struct.Struct(f"{_COUNTS.format}d??")
_ASKED, _HELD = _WHOLE.size - 2, _WHOLE.size - 1
"""Where the last two bytes are: what the agent asks for, and what the worker does."""

_POLL_SECONDS = 0.001

_QUIET_SECONDS = 2.0
"""Time after which a thread that saves beside the training has opened the next file of its save, if there is one."""


@dataclass(frozen=True)
class WorkerTraining:
    """What a worker's own process has seen of its training.

    Args:
        steps: number of steps of each optimizer, 0 where there is none yet.
        saved_at: when it last began to save, in seconds since the epoch; 0 if it has not.
        held: whether it waits in the first step after a save, as it was asked to.
    """

    steps: tuple[int, ...] = ()
    saved_at: float = 0.0
    held: bool = False


def read_training(folder: Path, pid: int) -> WorkerTraining:
    """Return what a worker has seen of its training so far.

    Args:
        folder: folder of the agent's socket.
    """
    try:
        *counts, saved_at, _, held = _WHOLE.unpack(_path(folder, pid).read_bytes())
    except (OSError, struct.error):  # of a worker that is about to begin
        return WorkerTraining()
    return WorkerTraining(tuple(counts), saved_at, held)


def ask_to_hold(folder: Path, pids: Iterable[int], *, ask: bool = True) -> None:
    """Ask workers to wait in the first step after their next save, or no longer; those that wait go on."""
    for pid in pids:
        with contextlib.suppress(OSError), _path(folder, pid).open("r+b") as file:  # else it is about to begin
            file.seek(_ASKED)
            file.write(bytes([ask]))


def _path(folder: Path, pid: int) -> Path:
    return folder / f"steps-{pid}"


class StepCounter:
    """Writer of what one process does; its forks write nothing.

    Args:
        folder: folder of the agent's socket.
        begun: function that is called at each step that is counted, and perhaps at others.
    """

    def __init__(self, folder: Path, begun: Callable[[], None]) -> None:
        self._pid = os.getpid()
        self._begun = begun
        with _path(folder, self._pid).open("w+b") as file:
            file.write(bytes(_WHOLE.size))
            file.flush()
            self._shared = mmap.mmap(file.fileno(), _WHOLE.size)
        self._places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._free = itertools.count()
        self._opened = self._steps_are_seen = False
        self._at_save = b""
        self._saving: set[str] = set()
        self._kept: set[int] = set()
        self._quiet_from = 0.0
        register_post_import_hook(lambda m: m.register_optimizer_step_post_hook(self._on_step), "torch.optim.optimizer")
        register_post_import_hook(self._count_backward_passes, "torch.autograd")

    def saves(self, path: str | None) -> None:
        """The script saves what it continues from.

        Args:
            path: file that it is about to open for writing, ``None`` where it has saved.
        """
        if path is not None:
            self._saving.add(os.path.realpath(path))
            if threading.current_thread() is not threading.main_thread():
                self._quiet_from = time.monotonic() + _QUIET_SECONDS
        self._at_save = self._shared[: _COUNTS.size]
        _SAVED_AT.pack_into(self._shared, _COUNTS.size, time.time())

    def _count_backward_passes(self, autograd: ModuleType) -> None:
        plain = autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            if not self._steps_are_seen:
                self._count(self)

        autograd.backward = backward  # type: ignore[attr-defined]  # where Tensor.backward() looks for it

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self._steps_are_seen = True
        self._count(optimizer)

    def _count(self, of: Any) -> None:
        self._begun()
        if os.getpid() != self._pid:
            return
        distributed = sys.modules.get("torch.distributed")
        is_open = distributed is not None and distributed.is_available() and distributed.is_initialized()
        self._opened = self._opened or is_open
        if self._opened and not is_open:
            return
        place = self._places.get(of)
        if place is None:
            place = self._places[of] = next(self._free) % _OPTIMIZERS * _COUNT.size
            if is_open:
                self._keep_groups()
        _COUNT.pack_into(self._shared, place, _COUNT.unpack_from(self._shared, place)[0] + 1)
        # Not an optimizer that begins after the save: the training may be over by then.
        if self._at_save and _COUNT.unpack_from(self._at_save, place)[0]:
            self._trains_on()

    def _keep_groups(self) -> None:
        """Keep the script's groups of gloo until the process ends, also once it has destroyed them.

        A model of ``DistributedDataParallel`` that is released after ``destroy_process_group()`` waits, with the GIL,
        for the threads of its group. In torch 2.13 these need the GIL to release the collectives of a backward pass:
        the script would never end.
        """
        groups = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map  # noqa: SLF001 - no other list of them
        for group, (backend, _) in groups.items():
            if "gloo" in str(backend) and id(group) not in self._kept:
                self._kept.add(id(group))
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # not in a list, which the interpreter would clear

    def _trains_on(self) -> None:
        """The script has taken a step after a save."""
        asked = self._shared[_ASKED]
        if asked and (time.monotonic() < self._quiet_from or any(map(self._saving.__contains__, open_paths()))):
            return  # other threads may save during steps
        self._at_save = b""  # who comes later waits for the next save, after which less is lost
        self._saving.clear()
        if asked:
            self._shared[_HELD] = True
            while self._shared[_ASKED]:  # handlers of signals run meanwhile
                time.sleep(_POLL_SECONDS)
            self._shared[_HELD] = False


def open_paths() -> Iterator[str]:
    """Yield the paths of the files that this process has open."""
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
