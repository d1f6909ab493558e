"""Folders that a training stack writes: on their device, complete on all ranks, and the position that they hold.

Those of a script's own loop are saved and loaded only where that is needed.
"""

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
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from azureml_elastic.train.integrations.script_loop.repeated_steps import HISTORY
from azureml_elastic.train.session.stack_session import StackSession

if TYPE_CHECKING:
    from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop

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
        begin()
        result = write()
        _complete(folder, complete)
        return result
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


class ScriptFolders:
    """The folders of a loop.

    Attributes:
        place: position of the folder that the script has loaded
    """

    def __init__(self, loop: ScriptLoop, session: StackSession) -> None:
        self.place: Place | None = None
        self._loop = loop
        self._session = session
        self._reload: Callable[[], Any] | None = None

    @property
    def here(self) -> Place:
        """The position in the data after the last step."""
        return Place(self._session.steps, *self._session.place)

    def save(self, folder: Path, place: Place, write: Callable[[], Any], **options: bool) -> Any:
        """Have a folder written by :func:`save`, unless the state is that of a later step."""
        if self.is_saved(folder):
            return None
        return save(folder, place, write, rank=self._session.rank, **options)

    def is_saved(self, folder: Path) -> bool:
        """Return whether a folder that the script saves again, in a step that is trained, is left as it is.

        The round may have ended between a step and the script's saving of it: that of the last step is saved then.
        """
        if not (self._loop.repeating or self._loop.repeats):
            return False
        saved = read(folder)
        return self._loop.is_past() or (saved is not None and saved.complete)

    def load(self, folder: Path | None, load: Callable[[], Any], *, holds_more: bool = False) -> Any:
        """Have a folder loaded where it is further than the state of the run, and take over its position.

        Args:
            holds_more: whether it is loaded in any case, as it holds what the state does not: the steps since then are
                repeated, and change that once more

        Raises:
            ValueError: the folder is not complete, and needed.
        """
        if self._loop.begun:
            return load()
        steps = self._session.find(HISTORY, "steps")
        # What rank 0 has read: it alone writes these files, perhaps to a disk of its own.
        place: Place | None = self._session.from_main(None if folder is None else read(folder))
        self.place = place
        if place is not None:
            self._loop.next_epoch, self._loop.first_window = place.epoch, place.windows
            self._loop.skippable = place.windows * self._loop.accumulation
        further = steps is None or (place is not None and place.steps > steps)
        if not further and (place is None or not holds_more):
            return None
        if folder is not None and place is not None and not place.complete:
            if further:
                done = f"{set_aside(folder, is_main=self._session.is_main)} now"
            else:  # nothing of it is needed: the state of the run is as far
                remove(folder, is_main=self._session.is_main)
                done = "removed"
            raise ValueError(
                f"{folder} is not complete: the process that wrote it ended meanwhile. It is {done}, so that the "
                "script finds the folder before it when it starts again."
            )
        if further:
            self._reload = load
        return load()

    def restored(self) -> Place | None:
        """Load the folder once more that is further than what was restored; return its position, if there is one."""
        if self._reload is None:
            return None
        if self._session.has_state():
            self._reload()
        if self.place is not None:
            self._session.begin_at(self.place.steps, self.place.epoch, self.place.windows)
        return self.place
