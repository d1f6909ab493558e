"""A file of JSON lines that people and reports read: to write it never delays or ends what it tells of."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from azureml_elastic.private_folder import make_private

_LOG = logging.getLogger(__name__)

DROPPED = "dropped"
"""Key of a line with the number of lines that could not be written before it."""


class LineFile:
    """Lines appended to a file, each by one system call, so that they survive the death of the process.

    A line that cannot be written is dropped and counted; the next one that can is preceded by their number.

    Args:
        path: path of the file, made with its folder, as soon as that is possible.
        what: what the lines are, for the log.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._descriptor = -1
        self._dropped = 0
        self._torn = self._closed = False
        self._write("")

    def append(self, text: str) -> None:
        """Append a line, unless the file is closed."""
        dropped = f"{json.dumps({DROPPED: self._dropped})}\n" if self._dropped else ""
        error = self._write(f"{dropped}{text}\n")
        if error is not None:
            if not self._dropped:
                _LOG.warning("%s cannot be written (%s); %s are dropped meanwhile.", self._path, error, self._what)
            self._dropped += 1
        elif dropped:
            _LOG.warning("%s can be written again; %d %s were dropped.", self._path, self._dropped, self._what)
            self._dropped = 0

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        if self._dropped:
            _LOG.warning("%d %s were dropped at the end of %s.", self._dropped, self._what, self._path)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, text: str) -> OSError | None:
        """Write, opening the file first if it is not open, and return why that is not possible."""
        if self._closed:
            return None
        data = f"\n{text}".encode() if self._torn else text.encode()
        try:
            if self._descriptor < 0:
                make_private(self._path.parent)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            written = os.write(self._descriptor, data)
        except OSError as error:  # a full disk, a stale mount
            return error
        # A disk that fills up takes the beginning of a line.
        self._torn = written < len(data)
        return OSError(f"{written} of {len(data)} bytes were written") if self._torn else None
