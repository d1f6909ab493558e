"""Client of the preload server: starts it, requests forked workers, and receives their exit codes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from azureml_elastic.forks.command import Imports, server_command
from azureml_elastic.forks.import_variables import READ_BY_TORCH, changed, lasting, without_threads
from azureml_elastic.forks.process import ForkedProcess, ForkRefused, ServerClient, ServerProcess, document
from azureml_elastic.program.command import Program

_LOG = logging.getLogger(__name__)

_END_SECONDS = 2.0
"""Limit of the wait for the ends of workers, which the kernel kills with their server."""


class ForkedWorker(ForkedProcess):
    """A worker, or the process of a round's store, whose exit code its server reports.

    Args:
        argv: command for a plain start of the same worker.
        changes: condition that is notified when a worker ends.
        reap: function called once the exit code was read; afterwards the kernel may reuse the process id.
    """

    def __init__(
        self, pid: int, argv: Sequence[str], changes: threading.Condition, reap: Callable[[int], None]
    ) -> None:
        super().__init__(pid, argv)
        self._changes = changes
        self._reap = reap
        self._reported: int | None = None
        self.ended_with_server = False
        """Whether its server has ended, and this with it."""

    def poll(self) -> int | None:
        """Return the exit code, ``None`` while the worker runs."""
        with self._changes:
            if self.returncode is None and self._reported is not None:
                self.returncode = self._reported
                self._reap(self.pid)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the worker has ended; on another thread nobody polls meanwhile."""
        with self._changes:
            super().send_signal(number)

    @property
    def running(self) -> bool:
        """Whether no exit code has been reported yet."""
        return self._reported is None

    def end(self, code: int, *, with_server: bool = False) -> None:
        """Record the exit code; the caller holds the condition."""
        self._reported, self.ended_with_server = code, with_server
        self._changes.notify_all()


class PreloadServer(ServerClient):
    """Handle of a process that has imported a program's modules, and whose forks become that program.

    The process starts at once. It imports torch, where the program allows that, and from :meth:`begin` on the modules
    of the program. It ends with this process, and its workers end with it. Another one takes its place if it is killed
    once it has made the imports. Thread-safe.

    Args:
        environ: environment of the process until :meth:`begin`; without secrets, since each worker can read it.
        popen: function that starts the process, with the arguments of ``subprocess.Popen``.
    """

    def __init__(
        self,
        program: Program,
        environ: Mapping[str, str],
        *,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.program = program
        """Program of the workers."""
        self.excluded: dict[str, str] = {}
        """Packages that each worker imports itself, with the reasons."""
        self._environ = self._started_in = lasting(environ)
        self._settled = self._begun = False
        self._workers: dict[int, ForkedWorker] = {}
        command = partial(server_command, Imports(program), begins=False)
        super().__init__(partial(ServerProcess, command, without_threads(self._started_in), popen), "it")

    def begin(self, environ: Mapping[str, str]) -> None:
        """Have the process import the modules of the program.

        Args:
            environ: environment of the workers; variables of single workers (``RANK``) are ignored.
        """
        self._environ, self._begun = lasting(environ), True
        if self.refusal is not None:
            return
        with document(without_threads(self._environ)) as content, contextlib.suppress(ForkRefused):
            self._send({"op": "begin"}, [content])

    def suits(self, program: Program, environ: Mapping[str, str]) -> bool:
        """Return whether the process can go on with this program and environment, as torch may be imported already."""
        return self.program == program and not any(
            map(READ_BY_TORCH.match, changed(self._started_in, lasting(environ)))
        )

    @property
    def importing(self) -> bool:
        """Whether the imports are under way, so that a worker can be forked later."""
        with self._changes:
            return not self._ready and self._refusal is None

    @property
    def settled(self) -> bool:
        """Whether the modules that torch imports in its first steps are imported too, or cannot be."""
        with self._changes:
            return self._settled or self._refusal is not None

    def wait_ready(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the imports to finish or fail; return :attr:`ready`."""
        with self._changes:
            self._changes.wait_for(lambda: self._ready or self._refusal is not None, timeout)
            return self.ready

    def start(self, environ: Mapping[str, str], stdout: Path | None, stderr: Path | None) -> ForkedWorker:
        """Fork a worker.

        Args:
            stdout: file for standard output, truncated; ``None`` inherits that of this process.

        Raises:
            ForkRefused: the worker must be started plainly.
            OSError: a file cannot be written.
        """
        if names := changed(self._environ, environ):
            raise ForkRefused(f"{', '.join(names)} in the environment changed after the imports")
        with contextlib.ExitStack() as files:
            descriptors = [files.enter_context(document(dict(environ)))]
            for path, inherited in ((stdout, 1), (stderr, 2)):
                descriptors.append(inherited if path is None else files.enter_context(path.open("wb")).fileno())
            return self._workers[self._request("fork", descriptors, folder=os.getcwd())]  # noqa: PTH109

    def fork_store(self, host: str, port: int, listener: int, control: int) -> ForkedWorker | None:
        """Fork a process that serves the store of a round; return ``None`` if that is not possible.

        Args:
            control: descriptor of the connection with which the process ends.
        """
        try:
            return self._workers[self._request("store", [listener, control], host=host, port=port)]
        except ForkRefused as refusal:
            _LOG.info("The round's store is started plainly: %s.", refusal)
            return None

    def _reap(self, pid: int) -> None:
        self._workers.pop(pid, None)
        with contextlib.suppress(ForkRefused):
            self._send({"op": "reap", "pid": pid})

    def _refuse(self, reason: str) -> None:
        if self.refusal is None:
            _LOG.warning("Workers are started without the preload server, which takes some seconds longer: %s.", reason)
        super()._refuse(reason)

    def _receive(self, message: dict[str, Any]) -> None:
        super()._receive(message)
        match message:
            case {"op": "ready", "seconds": seconds, "imports": imports}:
                _LOG.debug("The preload server is ready after %s s (%s imports).", seconds, imports)
                self.excluded = message["excluded"]
                for reason in self.excluded.values():
                    _LOG.info("Imported by each worker: %s.", reason)
            case {"op": "settled"}:
                self._settled = True
            case {"op": "started", "pid": pid}:
                self._workers[pid] = ForkedWorker(pid, self.program.command, self._changes, self._reap)
            case {"op": "ended", "pid": pid, "code": code} if pid in self._workers:
                self._workers[pid].end(code)

    def _end(self, process: ServerProcess) -> bool:
        """Record the end of the process and of its workers, which the kernel ends with it.

        Returns:
            Whether another one was started in its place.
        """
        code, reason = process.wait()
        with self._changes:
            running = [worker for worker in self._workers.values() if worker.running]
        until = time.monotonic() + _END_SECONDS
        for worker in running:
            _end_orphan(worker.pid, until)
        with self._changes:
            # One that a worker's import kills would be killed again: it was never ready.
            again = self._ready and code < 0 and self._refusal is None
            self._ready = self._settled = False
            self._lost_requests = self._requests
            self._changes.notify_all()
        if again:
            _LOG.warning("The preload server is started again: it %s.", reason)
            again = self._start()
            if again and self._begun:
                self.begin(self._environ)
        elif not self._closed:
            self._refuse(f"it {reason}")
        with self._changes:
            for worker in running:
                # Only once they are gone: an exit code tells the agent that ports and memory are free.
                worker.end(-signal.SIGKILL, with_server=True)
        return again


def _end_orphan(pid: int, until: float) -> None:
    """Ensure that a worker of a dead preload server is gone; the kernel kills it, too."""
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # as the init process of a container, this process adopts orphans
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            process.kill()
        except psutil.NoSuchProcess:
            return
        time.sleep(0.002)
