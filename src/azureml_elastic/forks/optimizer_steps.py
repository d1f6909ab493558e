"""Counts of the steps that a script's optimizers take, which the node's agent reads.

A script without a session reports nothing, but one that trains with torch takes steps of an optimizer, of which torch
informs hooks. Each optimizer has a count of its own: one that begins when the training is over, to calibrate what was
trained or to fit a head for its evaluation, is not the training's. While a process group that steps were taken in is
closed, nothing is counted: what follows is the work of one rank. Of a script with optimizers that are not torch's own,
as fastai's, backward passes are counted instead.

The counts are in a file that the worker has mapped, so that a step costs no system call. In it the agent asks the
worker to stop after its next step: there, and nowhere else, the program has certainly not left its training loop.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from wrapt import register_post_import_hook

from azureml_elastic.environment import names as variables

Steps = tuple[int, ...]
"""Number of steps of each optimizer of each worker, always in the same order; 0 where there is none yet."""

_OPTIMIZERS = 64
"""Number of counts of a process. Further optimizers share them: some scripts have one for each parameter."""

_COUNTS = struct.Struct(f"={_OPTIMIZERS}Q")
_COUNT = struct.Struct("=Q")
_ASKED = _COUNTS.size
"""Where the byte is that asks the worker to stop, behind the counts."""


def count_steps(environ: Mapping[str, str]) -> None:
    """Count the steps of this process, a worker whose script is about to run."""
    if variables.CHANNEL not in environ:
        return
    with contextlib.suppress(OSError):
        path = _path(Path(environ[variables.CHANNEL]).parent, os.getpid())
        with path.open("w+b") as file:
            file.write(bytes(_COUNTS.size + 1))
            file.flush()
            counter = _Counter(mmap.mmap(file.fileno(), _COUNTS.size + 1))
        register_post_import_hook(counter.begin, "torch.optim.optimizer")
        on_backward(counter.passed_backward)


def on_backward(callback: Callable[[], None]) -> None:
    """Have a function called after each backward pass of this process."""

    def wrap(autograd: ModuleType) -> None:
        plain = autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            callback()

        autograd.backward = backward  # type: ignore[attr-defined]  # where Tensor.backward() looks for it

    register_post_import_hook(wrap, "torch.autograd")


def read_steps(folder: Path, pids: Iterable[int]) -> Steps:
    """Return the counts of some workers together."""
    return tuple(count for pid in pids for count in _read(_path(folder, pid)))


def ask_to_stop(folder: Path, pid: int, *, ask: bool = True) -> None:
    """Ask a worker to stop itself by SIGSTOP after its next step, or no longer."""
    with contextlib.suppress(OSError), _path(folder, pid).open("r+b") as file:
        file.seek(_ASKED)
        file.write(bytes([ask]))


def _read(path: Path) -> Steps:
    try:
        return _COUNTS.unpack_from(path.read_bytes())
    except (OSError, struct.error):  # of a worker that is about to begin
        return (0,) * _OPTIMIZERS


def _path(folder: Path, pid: int) -> Path:
    return folder / f"steps-{pid}"


class _Counter:
    """Writer of the counts of one process; its forks write none."""

    def __init__(self, counts: mmap.mmap) -> None:
        self._counts = counts
        self._pid = os.getpid()
        self._places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._free = itertools.count()
        self._opened = self._steps_are_seen = False

    def begin(self, optimizer: ModuleType) -> None:
        """Count from now on."""
        optimizer.register_optimizer_step_post_hook(self._on_step)

    def passed_backward(self) -> None:
        """Count a backward pass, unless the steps of optimizers can be counted."""
        if not self._steps_are_seen:
            self._count(self)

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        self._steps_are_seen = True
        self._count(optimizer)

    def _count(self, of: Any) -> None:
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
        _COUNT.pack_into(self._counts, place, _COUNT.unpack_from(self._counts, place)[0] + 1)
        if self._counts[_ASKED]:
            self._counts[_ASKED] = 0
            os.kill(self._pid, signal.SIGSTOP)
