"""Client of a fork server whose forks become children of this process and go on without the server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from azureml_elastic.forks.command import Imports, server_command
from azureml_elastic.forks.import_variables import difference, read_early, without_threads
from azureml_elastic.forks.link import GO
from azureml_elastic.forks.process import ForkedProcess, ForkRefused, ServerClient, ServerProcess, document

_IMPORT_SECONDS = 120.0
"""Limit of the imports in processor time, and of a time in which they hardly get any."""

_PROGRESS_SECONDS = 1.0
"""Processor time in :data:`_IMPORT_SECONDS` by which imports differ from those that wait for something."""

_POLL_SECONDS = 0.05


class ForkServer(ServerClient):
    """Handle of a process that has imported modules once, and is forked on request.

    The process starts at once and imports in the background. It ends with this one; its forks do not end with it.
    Forked processes become children of this one, which must be a subreaper meanwhile.

    Args:
        environ: environment of the imports. Processes whose variables differ in those that are read early are refused.
    """

    def __init__(self, imports: Imports, environ: Mapping[str, str]) -> None:
        self.began = time.time()
        """Seconds since the epoch: files that were changed later may differ from what was imported."""
        self._early = read_early(environ)
        command = partial(server_command, imports)
        start = partial(ServerProcess, command, without_threads(environ), stdin=subprocess.DEVNULL)
        super().__init__(start, "the fork server")

    def wait_ready(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the imports are done or have failed; return whether processes can be forked.

        Args:
            stop: condition that ends the waiting early.
        """
        limit, used = time.monotonic() + _IMPORT_SECONDS, self._processor_seconds()
        while not self._ready and self.refusal is None and not stop():
            with self._changes:
                self._changes.wait(_POLL_SECONDS)
            if time.monotonic() > limit:
                # On a busy machine it is waited for: nodes that import for themselves instead keep that busier still.
                before, used = used, self._processor_seconds()
                if used - before < _PROGRESS_SECONDS or used > _IMPORT_SECONDS:
                    self._refuse(f"the imports of the fork server were not done within {_IMPORT_SECONDS:g} s")
                limit = time.monotonic() + _IMPORT_SECONDS
        return self.ready

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
            folder: working directory of the process; ``None`` for that of this one.

        Raises:
            ForkRefused: the process must be started by its command.
        """
        self.wait_ready()
        if names := difference(self._early, read_early(environ)):
            raise ForkRefused(
                self.refusal or f"{', '.join(names)} in the environment may have been read by the imports"
            )
        place = str(folder or Path.cwd())
        reading, writing = os.pipe()
        try:
            with document({"request": dict(request), "environment": dict(environ), "folder": place}) as content:
                pid = self._request("detach", [content, reading, *descriptors], become=become)
            with contextlib.suppress(BrokenPipeError):  # killed already
                os.write(writing, GO)
        finally:
            os.close(reading)
            os.close(writing)  # without the word the process ends
        return ForkedProcess(pid, request.get("argv", [become]))

    def _processor_seconds(self) -> float:
        """Return the processor time of the process so far, 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def close(self) -> None:
        """End the process, but not its forks."""
        self._refuse("the fork server was closed")
        super().close()

    def _refuse(self, reason: str) -> None:
        super()._refuse(reason)
        if self._process is not None:
            self._process.kill()
