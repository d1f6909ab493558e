"""The folders that a script has its stack write: whether they are complete, and the position that they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from azureml_elastic.train.integrations.durable_files import all_arrive, flush

__all__ = ["Place", "read", "save"]

_NAME = "azureml-elastic.json"


@dataclass(frozen=True)
class Place:
    """The position in the data of a folder.

    Args:
        steps: optimizer steps completed
        epoch: epoch of the next one
        windows: number of steps of that epoch which are completed
        complete: whether all files of the folder are written
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


def save(folder: Path, place: Place, write: Callable[[], Any], *, is_main: bool) -> Any:
    """Have a folder written, marked as incomplete meanwhile. A collective.

    Args:
        folder: folder
        place: position in the data
        write: function that writes the other files
        is_main: whether this process is the one of rank 0
    """
    if is_main and folder.is_dir():
        _write(folder, place)
    all_arrive()
    result = write()
    all_arrive()
    if is_main:
        for path in folder.rglob("*"):
            flush(path)
        _write(folder, replace(place, complete=True))
    return result


def _write(folder: Path, place: Place) -> None:
    temporary = folder / f".{_NAME}"
    temporary.write_text(json.dumps(asdict(place)), encoding="utf-8")
    flush(temporary)
    os.replace(temporary, folder / _NAME)  # noqa: PTH105
    flush(folder)
