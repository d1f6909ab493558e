"""Client of the preload server: starts it, requests forked workers, and receives their exit codes."""

from __future__ import annotations

import contextlib
import json
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

from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.forks.command import (
    Imports,
    changed,
    changed_for_torch,
    lasting,
    server_command,
    without_threads,
)
from azureml_elastic.forks.link import send
from azureml_elastic.forks.process import ForkedProcess, ForkRefused, ServerProcess, document
from azureml_elastic.program.command import Program


class ForkedWorker(ForkedProcess):
    """A worker, whose exit code its server reports.

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

    def end(self, code: int) -> None:
        """Record the exit code; the caller holds the condition."""
        self._reported = code
        self._changes.notify_all()


_LOG = logging.getLogger(__name__)

_ANSWER_SECONDS = 15.0
"""Time limit of a request, which waits for at most one import; see ``LATER`` in :mod:`.import_loader`."""

_END_SECONDS = 2.0
"""Limit of the wait for the ends of workers, which the kernel kills with their server."""


class PreloadServer:
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
        self._changes = threading.Condition(threading.RLock())
        self._popen = popen
        self._ready = self._settled = self._begun = self._closed = False
        self._refusal: str | None = None
        self._requests = 0
        self._lost_requests = 0  # those up to this one were sent to a process that has ended
        self._answers: dict[int, dict[str, Any]] = {}
        self._workers: dict[int, ForkedWorker] = {}
        self._stores: set[int] = set()
        self._ended_stores: dict[int, int | None] = {}
        self._process: ServerProcess | None = None
        self.since = time.monotonic()
        """Monotonic seconds at which the process was started."""
        if self._start():
            self._reader = threading.Thread(target=self._read, name="preload-server", daemon=True)
            self._reader.start()

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
        return self.program == program and not changed_for_torch(self._started_in, lasting(environ))

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` if the process could not be started."""
        return None if self._process is None else self._process.pid

    @property
    def ready(self) -> bool:
        """Whether a worker can be forked now."""
        with self._changes:
            return self._ready and self._refusal is None

    @property
    def importing(self) -> bool:
        """Whether the imports are under way, so that a worker can be forked later."""
        with self._changes:
            return not self._ready and self._refusal is None

    @property
    def refusal(self) -> str | None:
        """Reason why no worker can be forked any more, or ``None``; logged once."""
        with self._changes:
            return self._refusal

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
            stderr: file for standard error, likewise.

        Raises:
            ForkRefused: the worker must be started plainly.
            OSError: a file cannot be written.
        """
        number = self._new_request()
        if names := changed(self._environ, environ):
            raise ForkRefused(f"{', '.join(names)} in the environment changed after the imports")
        with contextlib.ExitStack() as files:
            descriptors = [files.enter_context(document(dict(environ)))]
            for path, inherited in ((stdout, 1), (stderr, 2)):
                descriptors.append(inherited if path is None else files.enter_context(path.open("wb")).fileno())
            self._send({"op": "fork", "id": number, "folder": os.getcwd()}, descriptors)  # noqa: PTH109
            return self._workers[self._answer(number)]

    def fork_store(self, host: str, port: int, listener: int, control: int) -> int | None:
        """Fork a process that serves the store of a round; return its id, ``None`` if that is not possible.

        Args:
            host: address of the store, as its clients know it.
            control: descriptor of the connection with which the process ends.
        """
        try:
            number = self._new_request()
            self._send({"op": "store", "id": number, "host": host, "port": port}, [listener, control])
            return self._answer(number)
        except ForkRefused as refusal:
            _LOG.info("The round's store is started plainly: %s.", refusal)
            return None

    def exit_code_of_store(self, pid: int) -> int | None:
        """Return the exit code of a process that serves no store any more, ``None`` if this one has ended with it."""
        with self._changes:
            self._changes.wait_for(lambda: pid in self._ended_stores or self._refusal is not None, _END_SECONDS)
            return self._ended_stores.pop(pid, None)

    def close(self) -> None:
        """End the process and its running workers."""
        with self._changes:
            self._closed = True
            if self._refusal is None:
                self._refusal = "it was closed"
            self._changes.notify_all()
        if self._process is not None:
            self._process.disconnect()
            self._reader.join()  # which ends with the server
            self._process.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _new_request(self) -> int:
        with self._changes:
            if not self.ready:
                raise ForkRefused(self._refusal or "its imports are not done")
            self._requests += 1
            return self._requests

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._process is not None
        try:
            send(self._process.link, message, descriptors)
        except OSError as error:
            raise ForkRefused(self.refusal or f"it cannot be reached: {error}") from error

    def _answer(self, number: int) -> int:
        """Return the process id of the fork that was requested."""
        with self._changes:
            in_time = self._changes.wait_for(
                lambda: number in self._answers or number <= self._lost_requests or self._refusal is not None,
                _ANSWER_SECONDS,
            )
            answer = self._answers.pop(number, {})
            if not in_time:
                self._refuse(f"it did not answer within {_ANSWER_SECONDS:g} s")
                assert self._process is not None
                # It might still fork, and nobody would know of that worker.
                self._process.kill()
            if "pid" not in answer:
                raise ForkRefused(answer.get("reason") or self._refusal or "it has ended")
            return int(answer["pid"])

    def _reap(self, pid: int) -> None:
        self._workers.pop(pid, None)
        with contextlib.suppress(ForkRefused):
            self._send({"op": "reap", "pid": pid})

    def _refuse(self, reason: str) -> None:
        with self._changes:
            if self._refusal is not None:
                return
            self._refusal = reason
            self._changes.notify_all()
        _LOG.warning("Workers are started without the preload server, which takes some seconds longer: %s.", reason)

    # --- the process -------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Start the process, and return whether it runs."""
        command = partial(server_command, Imports(self.program), begins=False)
        try:
            process = ServerProcess(command, without_threads(self._started_in), self._popen)
        except ForkRefused as refusal:
            self._refuse(str(refusal))
            return False
        with self._changes:
            if self._process is not None:
                self._process.close()
            self._process, self.since = process, time.monotonic()
            if self._closed:  # meanwhile
                process.disconnect()
        return True

    def _read(self) -> None:
        running = True
        while running:
            assert self._process is not None
            while message := self._process.receive():
                self._receive(message)
            running = self._end(self._process)

    def _receive(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        with self._changes:
            if operation == "ready":
                self._ready = True
                _LOG.debug(
                    "The preload server is ready after %s s (%s imports).", message["seconds"], message["imports"]
                )
                self.excluded = message["excluded"]
                for reason in self.excluded.values():
                    _LOG.info("Imported by each worker: %s.", reason)
            elif operation == "settled":
                self._settled = True
            elif operation == "unsafe":
                self._refuse(message["reason"])
            elif operation == "ended":
                if message["pid"] in self._workers:
                    self._workers[message["pid"]].end(message["code"])
                else:
                    self._stores.discard(message["pid"])
                    self._ended_stores[message["pid"]] = message["code"]
                    self._reap(message["pid"])
            else:
                if operation == "started":
                    worker = ForkedWorker(message["pid"], self.program.command, self._changes, self._reap)
                    self._workers[worker.pid] = worker
                elif operation == "serving":
                    self._stores.add(message["pid"])
                self._answers[message["id"]] = message
            self._changes.notify_all()

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
            self._ended_stores |= dict.fromkeys(self._stores)
            self._stores.clear()
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
                worker.end(-signal.SIGKILL)
        return again


def _end_orphan(pid: int, until: float) -> None:
    """Ensure that a worker of a dead preload server is gone; the kernel kills it, too."""
    while time.monotonic() < until:
        try:
            state = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            )
        except OSError:
            return
        if state in "ZX":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # as the init process of a container, this process adopts orphans
            return
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def start_early(
    program: Program, environment: NodeEnvironment, start: Callable[..., PreloadServer] = PreloadServer
) -> PreloadServer | None:
    """Start the preload server as far as the plan can be read without its models.

    Args:
        start: function that starts the preload server, with the arguments of :class:`PreloadServer`.

    Returns:
        The server, or ``None`` where the plan does without one or does not say; it is validated later.
    """
    try:
        plan = json.loads(environment.variables[variables.PLAN])
        distribution = plan["distribution"]
        wanted = distribution["preload_workers"] and distribution["framework"] == "pytorch"
        secret = plan["rendezvous"]["connection_string_variable"]
    except (KeyError, TypeError, ValueError):
        return None
    if not wanted:
        return None
    # The workers are forks and could read the server's first environment, so that has no secret in it. Whether they get
    # the variable is decided once the table is open.
    withheld = {secret, variables.AZURE_STORAGE_CONNECTION_STRING}
    return start(program, {name: value for name, value in environment.variables.items() if name not in withheld})


def begin_preload(
    early: PreloadServer | None,
    program: Program,
    environ: Mapping[str, str],
    start: Callable[..., PreloadServer] = PreloadServer,
) -> PreloadServer:
    """Give the preload server the workers' environment, in a new process where the early one does not suit.

    Args:
        start: function that starts the preload server, with the arguments of :class:`PreloadServer`.
    """
    server = early
    if early is not None and not early.suits(program, environ):
        early.close()
        server = None
    if server is None:
        server = start(program, environ)
    server.begin(environ)
    return server
