"""What a worker does with the exception that ends it: names the file that could not be read, and writes the error file.

**The error file** is the one that ``TORCHELASTIC_ERROR_FILE`` names, in the form of torch's ``record`` decorator, which
torchrun and others can read, and beside it the chain of exceptions, the one that ended the program last::

    {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback...", "timestamp": "179"}},
     "rank": "3",
     "chain": [{"type": "ValueError", "message": "no", "caused": false, "frames": [["train.py", 3, "main"]]}]}

The agent classifies the failure by it. What a program prints is another thing: hooks of other packages print it in
their own form, and threads and child processes print errors that end no worker.

**The name of the file that could not be read.** Readers of checkpoints say what is wrong with a file (``Ran out of
input``) but not which file it is. The file is found in the frames of the traceback, whose local variables still hold
it. Only the names of regular files are added.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
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
_PLAIN = frozenset({"__main__", "builtins"})
"""Modules that a traceback leaves out before the name of a type."""
_WORD = re.compile(r"[^\W\d]\w*")


def add_file_name(error: BaseException) -> None:
    """Put the name of the unreadable file before the message of the exception of the chain that says so."""
    for each in _chain(error):
        path = find_file(each)
        if path is not None:
            _extend(each, path)
            return


def find_file(error: BaseException) -> Path | None:
    """Return the path of the regular file at whose reading an exception was raised, ``None`` if it was none."""
    if not isinstance(error, Exception):
        return None
    frames = _frames(error)
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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and those it was raised from, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def install(environ: Mapping[str, str]) -> None:
    """Record each exception that :data:`sys.excepthook` shows from now on.

    Args:
        environ: environment of this process, read when there is one.
    """
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record(error, environ)
        shown_by(kind, error, trace)

    sys.excepthook = show


def record(error: BaseException, environ: Mapping[str, str]) -> None:
    """Name the unreadable file in the error's message, and write the error file. Never raises.

    Called before the exception is shown, by whatever hook the script has: one that fails, or that exits, loses nothing.
    """
    with contextlib.suppress(Exception):  # an error without the name is better than none
        add_file_name(error)
    with contextlib.suppress(Exception):
        path = environ.get("TORCHELASTIC_ERROR_FILE")
        # Forks and child processes of a worker inherit the variable and the hook. Each worker leads a session, they do
        # not: the error of one of them, which the worker may survive, must not count as the worker's.
        if path and os.getsid(0) == os.getpid():
            _write(Path(path), _document(error, environ.get("RANK")))


def _write(path: Path, document: Mapping[str, Any]) -> None:
    # Replaced in one step: the worker may be killed while it writes, with others of its round. A file that torch's
    # decorator has written is replaced, too: the exception got past it, and the message names the unreadable file now.
    unnamed = path.with_name(f"{path.name}.{os.getpid()}")
    unnamed.write_text(json.dumps(document), encoding="utf-8")
    unnamed.replace(path)


def _document(error: BaseException, rank: str | None) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error)).strip("\n")
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "rank": rank,
        "chain": [_description(each) for each in reversed(list(_chain(error)))],
    }


def _description(error: BaseException) -> dict[str, Any]:
    """Describe one exception as a traceback does; a group as its first exception, below the frames of the group."""
    caused = error.__cause__ is not None
    frames = _places(error)
    while isinstance(inner := next(iter(getattr(error, "exceptions", ())), None), BaseException):
        error = inner
        frames += _places(error)
    kind = type(error)
    text = str(error)
    if isinstance(error, SyntaxError):
        text = error.msg
        frames.append((error.filename or "?", error.lineno or 0, ""))
    return {
        "type": kind.__qualname__ if kind.__module__ in _PLAIN else f"{kind.__module__}.{kind.__qualname__}",
        "message": "\n".join([text, *getattr(error, "__notes__", ())]).strip(),
        "caused": caused,
        "frames": frames,
    }


def _places(error: BaseException) -> list[tuple[str, int, str]]:
    return [(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in _frames(error)]
