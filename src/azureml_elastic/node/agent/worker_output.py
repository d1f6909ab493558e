"""What workers print into files, copied to the console while the files grow."""

from __future__ import annotations

import codecs
import errno
import io
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_INTERVAL_SECONDS = 0.1

_MOST_BYTES = 1 << 20
"""Size of one read, so that a worker that prints without end cannot fill the agent's memory."""

_STALE_SECONDS = 1.0
"""Time after which a line without an end, such as a prompt, is copied as it is."""


class OutputCopier:
    """A thread that copies files to the console while they grow.

    As under torchrun, a carriage return ends a line, too: each state of a progress bar is a line.

    Args:
        files: path of each file, prefix of its lines, and stream to which they are copied.
    """

    def __init__(self, files: Sequence[tuple[Path, str, TextIO]]) -> None:
        self._files = [_File(*each) for each in files]
        self._ended = threading.Event()
        # One thread for all files: the agent of a node with eight workers has sixteen of them.
        self._thread = threading.Thread(target=self._copy, name="worker-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what is left in the files, and end the thread."""
        self._ended.set()
        self._thread.join()

    def _copy(self) -> None:
        while True:
            ended = self._ended.is_set()  # before the reads: what was written until then is copied
            more = False
            for file in self._files:
                more |= file.copy(last=ended)
            if ended and not more:
                break
            if not more:
                self._ended.wait(_INTERVAL_SECONDS)
        for file in self._files:
            file.close()


class _File:
    """One growing file."""

    def __init__(self, path: Path, prefix: str, console: TextIO) -> None:
        self._file = path.open("rb", buffering=0)
        self._prefix = prefix
        self._console: TextIO | None = console
        self._decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8")(errors="replace"), translate=True
        )
        self._rest = ""
        self._rest_since = 0.0

    def copy(self, *, last: bool) -> bool:
        """Copy the new lines, and with ``last`` also one that has no end; return whether there may be more."""
        try:
            data = self._file.read(_MOST_BYTES) or b""
        except OSError:  # a mount that is gone for a moment: the thread must not end, nor must it wait at the end
            data = b""
        now = time.monotonic()
        if data:
            self._rest_since = now
        self._rest += self._decoder.decode(data, final=last and not data)
        *lines, self._rest = self._rest.split("\n")
        if self._rest and not data and (last or now - self._rest_since >= _STALE_SECONDS):
            lines.append(self._rest)
            self._rest = ""
        if lines:
            self._write("".join(f"{self._prefix}{line}\n" for line in lines))
        return bool(data)

    def close(self) -> None:
        self._file.close()

    def _write(self, text: str) -> None:
        console = self._console
        if console is None:
            return
        try:
            console.write(_encodable(text, console.encoding or "utf-8"))
            console.flush()
        except OSError as error:
            # A disk that is full may have space later. A pipe whose reader has ended has none: training goes on.
            if error.errno != errno.ENOSPC:
                self._console = None
        except Exception:  # noqa: BLE001 - closed, or a stream of another kind: this thread never ends by one
            self._console = None


def _encodable(text: str, encoding: str) -> str:
    """Return the text with escapes for the characters that the encoding lacks, whatever the stream does with them."""
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except (LookupError, UnicodeError):  # the name of no encoding, or one of another kind than of text
        return text.encode("ascii", "backslashreplace").decode()
