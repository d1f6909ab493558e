"""The name of the file that could not be read, in the message of the exception that ends a worker.

Readers of checkpoints say what is wrong with a file (``Ran out of input``) but not which file it is. The file is found
in the frames of the traceback, whose local variables still hold it. Only the names of regular files are added.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_READERS = {
    ("json", "load"): "fp",
    ("numpy", "load"): "file",
    ("safetensors", "load_file"): "filename",
    ("torch", "load"): "f",
}
"""Variable with the file in functions that read one, by package and name of the function."""
_PACKAGES = frozenset({"_pickle", "numpy", "pickle", "safetensors", "zipfile"})
"""Packages whose frames are passed over to find the caller of a reader that has no frame or no name of the file."""
_UNREADABLE = frozenset({"BadZipFile", "EOFError", "SafetensorError", "UnpicklingError"})
"""Exceptions of readers of which the caller knows the file."""
_WORD = re.compile(r"[^\W\d]\w*")


def add_file_name(error: BaseException) -> None:
    """Put the name of the unreadable file before the message of the exception of the chain that says so."""
    for each in chain(error):
        path = find_file(each)
        if path is not None:
            _extend(each, path)
            return


def find_file(error: BaseException) -> Path | None:
    """Return the path of the regular file at whose reading an exception was raised, ``None`` if it was none."""
    if not isinstance(error, Exception):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, _ in reversed(frames):
        variable = _READERS.get((_package(frame), frame.f_code.co_name))
        path = _path_of(frame.f_locals.get(variable)) if variable else None
        if path is not None:
            return path
    if type(error).__name__ not in _UNREADABLE:
        return None
    caller = next(((frame, line) for frame, line in reversed(frames) if _package(frame) not in _PACKAGES), None)
    return _only_file(*caller) if caller else None


def _only_file(frame: FrameType, line: int) -> Path | None:
    """Return the one file among the variables of a line; of several, each may be the one that could not be read."""
    names = _WORD.findall(linecache.getline(frame.f_code.co_filename, line, frame.f_globals))
    paths = {path for name in names if (path := _path_of(frame.f_locals.get(name, frame.f_globals.get(name))))}
    return paths.pop() if len(paths) == 1 else None


def _path_of(value: Any) -> Path | None:
    """Return the absolute path of a regular file that a variable is, names, or has open."""
    name = value if isinstance(value, (str, os.PathLike)) else getattr(value, "name", None)
    if isinstance(value, type) or not isinstance(name, (str, os.PathLike)):
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        path = Path(os.fsdecode(name)).absolute()
        return path if path.is_file() else None
    return None


def _extend(error: BaseException, path: Path) -> None:
    """Put the file before the first line of the message, which is what tables and signatures show."""
    found = path.stat()
    modified = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
    where = f"while reading {path} ({found.st_size} bytes, modified {modified} UTC; remove it if it is incomplete)"
    if where in str(error):
        return
    if isinstance(error, UnicodeDecodeError):
        error.reason = f"{error.reason}, {where}"
        return
    before = error.args
    text = before[0] if before and isinstance(before[0], str) else str(error)
    error.args = (f"{where}: {text}" if text else where, *before[1:])
    if where not in str(error):  # the message is not made from the arguments
        error.args = before
        if sys.version_info >= (3, 11):
            error.add_note(where)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and those it was raised from, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
