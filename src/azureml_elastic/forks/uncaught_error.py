"""The error file, in which a worker writes the exception that ends it.

It is the one that ``TORCHELASTIC_ERROR_FILE`` names, in the form of torch's ``record`` decorator, which
torchrun and others can read, and beside it the chain of exceptions, the one that ended the program last::

    {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback...", "timestamp": "179"}},
     "rank": "3",
     "chain": [{"type": "ValueError", "message": "no", "caused": false, "frames": [["train.py", 3, "main"]]}]}

The agent classifies the failure by it. What a program prints is another thing: hooks of other packages print it in
their own form, and threads and child processes print errors that end no worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from azureml_elastic.forks.unreadable_file import add_file_name, chain

_PLAIN = frozenset({"__main__", "builtins"})
"""Modules that a traceback leaves out before the name of a type."""


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
        "chain": [_description(each) for each in reversed(list(chain(error)))],
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
    return [
        (frame.f_code.co_filename, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
