"""Folders that a training stack writes: on their device, complete on all ranks, and the position that they hold."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

import torch.distributed as dist

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


def save(
    folder: Path, place: Place, write: Callable[[], Any], *, rank: int, together: bool = True, make: bool = False
) -> Any:
    """Have a folder written with its position in the data, marked as incomplete meanwhile.

    Args:
        together: whether all ranks write it, in a collective: the mark vouches for the files of all. Otherwise rank 0
            may be the only one, and the mark vouches for what rank 0 has written
        make: whether a folder that does not exist is made first, and not by the stack
    """

    def begin() -> None:
        if folder.is_dir():
            _write(folder, place)
            for unfinished in folder.parent.glob(_temporary(Path(escape(str(folder))), "*")):
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed while it made the folder
        elif make:
            _make(folder, place, rank)

    complete = functools.partial(_write, folder, replace(place, complete=True))
    if together:
        return write_together(folder, write, begin, complete, is_main=rank == 0)
    if rank == 0:
        return _write_between(folder, write, begin, complete)
    if make and not folder.is_dir():  # before rank 0 has come to it, or on a disk that rank 0 does not write to
        _make(folder, place, rank)
    return write()


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
        _complete(folder, complete)
    all_arrive()  # were the others to go on and rank 0 lost before this, nobody would write the folder again
    return result


def _write_between(
    folder: Path, write: Callable[[], Any], begin: Callable[[], Any], complete: Callable[[], Any]
) -> Any:
    begin()
    result = write()
    _complete(folder, complete)
    return result


def _complete(folder: Path, complete: Callable[[], Any]) -> None:
    # A machine that ends at once must not keep the mark and lose a file that it vouches for.
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another rank may be replacing a file of its own
            flush(path)
    complete()


def set_aside(folder: Path, *, is_main: bool) -> Path:
    """Rename a folder that is not complete, and return its new path. A collective."""
    aside = folder.with_name(f"incomplete-{folder.name}")
    all_arrive()  # all ranks have read that it is not complete
    if is_main:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    return aside


def remove(folder: Path, *, is_main: bool) -> None:
    """Remove a folder, if it is there. A collective."""
    all_arrive()  # all ranks have looked at it
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
    all_arrive()


def _make(folder: Path, place: Place, rank: int) -> None:
    """Make a folder that has its position from the beginning: a script would take one without for another library's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(_temporary(folder, rank))
    try:
        temporary.mkdir(exist_ok=True)
        _write(temporary, place)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(temporary, ignore_errors=True)  # another rank has made it meanwhile
        if not rank:
            _write(folder, place)


def _temporary(folder: Path, rank: int | str) -> str:
    """Return the name of a folder that is being made; the same each time, so that the next process takes it over."""
    return f".{folder.name}.new-{rank}"


def _write(folder: Path, place: Place) -> None:
    temporary = folder / f".{_NAME}"
    temporary.write_text(json.dumps(asdict(place)), encoding="utf-8")
    flush(temporary)
    os.replace(temporary, folder / _NAME)  # noqa: PTH105
    flush(folder)
