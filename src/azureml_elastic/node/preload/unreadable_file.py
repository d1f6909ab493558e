"""Names the file that could not be read in the message of an uncaught exception.

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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["add_file_name", "find_file", "install"]

_READERS = {
    ("json", "load"): "fp",
    ("numpy", "load"): "file",
    ("safetensors", "load_file"): "filename",
    ("torch", "load"): "f",
}
"""Variable with the file in functions that read one, by package and name of the function."""
_PACKAGES = frozenset({"_pickle", "codecs", "json", "numpy", "pathlib", "pickle", "safetensors", "zipfile"})
"""Packages whose frames are passed over to find the caller of a reader that has no frame or no name of the file."""
_UNREADABLE = frozenset(
    {"BadZipFile", "EOFError", "JSONDecodeError", "SafetensorError", "UnicodeDecodeError", "UnpicklingError"}
)
"""Exceptions of readers of which the caller knows the file."""
_MOST_BYTES_PER_CHARACTER = 4
_WORD = re.compile(r"[^\W\d]\w*")


def install() -> None:
    """Name the file in the message of each exception that :data:`sys.excepthook` shows."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        add_file_name(error)
        shown_by(kind, error, traceback)

    sys.excepthook = show


def add_file_name(error: BaseException) -> None:
    """Put the name of the unreadable file before the message of the exception of the chain that says so."""
    with contextlib.suppress(Exception):  # an error without the name is better than none
        for each in _chain(error):
            path = find_file(each)
            if path is not None:
                _extend(each, path)
                return


def find_file(error: BaseException) -> Path | None:
    """Return the path of the regular file at whose reading an exception was raised, ``None`` if it was none."""
    if not isinstance(error, Exception):
        return None
    frames = list(_frames(error.__traceback__))
    for frame, _ in reversed(frames):
        variable = _READERS.get((_package(frame), frame.f_code.co_name))
        path = _path_of(frame.f_locals.get(variable)) if variable else None
        if path is not None:
            return path
    if type(error).__name__ not in _UNREADABLE:
        return None
    caller = next(((frame, line) for frame, line in reversed(frames) if _package(frame) not in _PACKAGES), None)
    return _only_file(*caller, read=_text_of(error)) if caller else None


def _only_file(frame: FrameType, line: int, read: str | bytes | None) -> Path | None:
    """Return the one file among the variables of a line, or, where its content is known, among those of a function."""
    names = set(_WORD.findall(linecache.getline(frame.f_code.co_filename, line, frame.f_globals)))
    if read is not None and frame.f_locals is not frame.f_globals:
        names |= set(frame.f_locals)
    paths = {path for name in names if (path := _path_of(frame.f_locals.get(name, frame.f_globals.get(name))))}
    if read is not None:
        paths = {path for path in paths if _contains(path, read)}
    return paths.pop() if len(paths) == 1 else None


def _text_of(error: Exception) -> str | bytes | None:
    """Return the text that an exception carries, of which a file with another content is not the source."""
    text = getattr(error, "doc", error.object if isinstance(error, UnicodeDecodeError) else None)
    return text if isinstance(text, (str, bytes)) else None


def _contains(path: Path, text: str | bytes) -> bool:
    if isinstance(text, bytes):
        return text in path.read_bytes()
    if path.stat().st_size > _MOST_BYTES_PER_CHARACTER * (len(text) + 1):
        return False
    return path.read_text(encoding="utf-8", errors="replace") == text


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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and those it was raised from, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
