"""Client of a fork server whose forks become children of this process and go on without the server."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from azureml_elastic.forks.command import Imports, read_early, server_command, without_threads
from azureml_elastic.forks.link import GO, send
from azureml_elastic.forks.process import ForkedProcess, ForkRefused, ServerProcess, document

_IMPORT_SECONDS = 120.0
"""Limit of the imports in processor time, and of a time in which they hardly get any."""

_PROGRESS_SECONDS = 1.0
"""Processor time in :data:`_IMPORT_SECONDS` by which imports differ from those that wait for something."""

_ANSWER_SECONDS = 15.0
_POLL_SECONDS = 0.05


class ForkServer:
    """Handle of a process that has imported modules once, and is forked on request.

    The process starts at once and imports in the background. It ends with this one; its forks do not end with it.
    Forked processes become children of this one, which must be a subreaper meanwhile. Used by one thread at a time.

    Args:
        imports: what is imported.
        environ: environment of the imports. Processes whose variables differ in those that are read early are refused.
    """

    def __init__(self, imports: Imports, environ: Mapping[str, str]) -> None:
        self.began = time.time()
        """Seconds since the epoch: files that were changed later may differ from what was imported."""
        self.refusal: str | None = None
        """Reason why nothing can be forked any more, or ``None``."""
        self._early = read_early(environ)
        self._ready = False
        self._process: ServerProcess | None = None
        command = partial(server_command, imports)
        try:
            self._process = ServerProcess(command, without_threads(environ), stdin=subprocess.DEVNULL)
        except ForkRefused as refusal:
            self.refusal = str(refusal)

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` where there is no process."""
        return None if self._process is None else self._process.pid

    def wait_ready(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the imports are done or have failed; return whether processes can be forked.

        Args:
            stop: condition that ends the waiting early.
        """
        limit, used = time.monotonic() + _IMPORT_SECONDS, self._processor_seconds()
        while not self._ready and self.refusal is None and not stop():
            if self._receive(_POLL_SECONDS):
                continue
            if time.monotonic() > limit:
                # On a busy machine it is waited for: nodes that import for themselves instead keep that busier still.
                before, used = used, self._processor_seconds()
                if used - before < _PROGRESS_SECONDS or used > _IMPORT_SECONDS:
                    self._refuse(f"the imports of the fork server were not done within {_IMPORT_SECONDS:g} s")
                limit = time.monotonic() + _IMPORT_SECONDS
        return self._ready and self.refusal is None

    def fork(
        self,
        become: str,
        request: Mapping[str, Any],
        environ: Mapping[str, str],
        descriptors: Sequence[int],
        folder: Path | None = None,
    ) -> ForkedProcess:
        """Fork a process.

        Args:
            become: function that makes the fork the wanted process, as ``module:name``; see ``Become`` in
                :mod:`.server`.
            request: what the function needs, as JSON; ``argv`` names the process.
            descriptors: file descriptors for the function.
            folder: working directory of the process; ``None`` for that of this one.

        Raises:
            ForkRefused: the process must be started by its command.
        """
        if not self.wait_ready() or self._process is None:
            raise ForkRefused(self.refusal)
        early = read_early(environ)
        if names := sorted(name for name in {*early, *self._early} if early.get(name) != self._early.get(name)):
            raise ForkRefused(f"{', '.join(names)} in the environment may have been read by the imports")
        place = str(folder or Path.cwd())
        reading, writing = os.pipe()
        try:
            with document({"request": dict(request), "environment": dict(environ), "folder": place}) as content:
                message = {"op": "detach", "id": 0, "become": become}
                with contextlib.suppress(OSError):  # its end is received below
                    send(self._process.link, message, [content, reading, *descriptors])
            answer: dict[str, Any] = {}
            while not answer and self.refusal is None:
                answer = self._receive(_ANSWER_SECONDS)
                if not answer:
                    self._refuse(f"the fork server did not answer within {_ANSWER_SECONDS:g} s")
            if "pid" not in answer:
                raise ForkRefused(self.refusal or f"the fork server: {answer['reason']}")
            with contextlib.suppress(BrokenPipeError):  # killed already
                os.write(writing, GO)
        finally:
            os.close(reading)
            os.close(writing)  # without the word the process ends
        return ForkedProcess(answer["pid"], request.get("argv", [become]))

    def close(self) -> None:
        """End the process, but not its forks."""
        self._refuse("the fork server was closed")
        if self._process is not None:
            self._process.wait()
            self._process.close()

    def _processor_seconds(self) -> float:
        """Return the processor time of the process so far, 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message and return it; return an empty one if none comes or the process has ended."""
        assert self._process is not None
        poll = select.poll()
        poll.register(self._process.link, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return {}
        message = self._process.receive()
        if message is None:
            self._refuse(f"the fork server {self._process.wait()[1]}")
        elif message["op"] == "unsafe":
            self._refuse(message["reason"])
        self._ready = self._ready or (message is not None and message["op"] == "ready")
        return message or {}

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason
        if self._process is not None:
            self._process.kill()
