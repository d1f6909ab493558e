"""Folders that a training stack writes: on their device, complete on all ranks, and the position that they hold."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Place", "flush", "read", "save", "set_aside", "write_together"]

_NAME = "azureml-elastic.json"


def all_arrive() -> None:
    """Wait until all ranks have called this. A collective."""
    if dist.is_initialized():
        dist.barrier()


def flush(path: Path) -> None:
    """Have the kernel write a file or folder to its device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Place:
    """The position in the data of a folder.

    Args:
        steps: optimizer steps completed
        epoch: epoch of the next one
        windows: number of steps of that epoch which are completed
    """

    steps: int
    epoch: int
    windows: int
    complete: bool = False


def read(folder: Path) -> Place | None:
    """Return the position that a folder holds, ``None`` if it was written without this library."""
    try:
        return Place(**json.loads((folder / _NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def save(folder: Path, place: Place, write: Callable[[], Any], *, is_main: bool, make: bool = False) -> Any:
    """Have a folder written with its position in the data, marked as incomplete meanwhile. A collective.

    Args:
        make: whether a folder that does not exist is made first, and not by the stack
    """

    def begin() -> None:
        if folder.is_dir():
            _write(folder, place)
        elif make:
            _make(folder, place)

    complete = functools.partial(_write, folder, replace(place, complete=True))
    return write_together(folder, write, begin, complete, is_main=is_main)


def write_together(
    folder: Path, write: Callable[[], Any], begin: Callable[[], Any], complete: Callable[[], Any], *, is_main: bool
) -> Any:
    """Have a folder written by all ranks; before and after it, rank 0 marks it. A collective."""
    if is_main:
        begin()
    all_arrive()
    result = write()
    all_arrive()
    if is_main:
        for path in folder.rglob("*"):
            flush(path)  # a machine that ends at once must not keep the mark and lose a file that it vouches for
        complete()
    all_arrive()  # were the others to go on and rank 0 lost before this, nobody would write the folder again
    return result


def set_aside(folder: Path, *, is_main: bool) -> Path:
    """Rename a folder that is not complete, and return its new path. A collective."""
    aside = folder.with_name(f"incomplete-{folder.name}")
    all_arrive()  # all ranks have read that it is not complete
    if is_main:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return aside


def _make(folder: Path, place: Place) -> None:
    """Make a folder that has its position from the beginning: a script would take one without for another library's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The same name each time: where this process is killed before the new name is there, the next one takes the folder.
    temporary = folder.with_name(f".{folder.name}.new")
    temporary.mkdir(exist_ok=True)
    _write(temporary, place)
    temporary.rename(folder)


def _write(folder: Path, place: Place) -> None:
    temporary = folder / f".{_NAME}"
    temporary.write_text(json.dumps(asdict(place)), encoding="utf-8")
    flush(temporary)
    os.replace(temporary, folder / _NAME)  # noqa: PTH105
    flush(folder)
