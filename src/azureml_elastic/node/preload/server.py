"""The preload server: imports the modules of the script, then forks workers on request of the agent.

It is started as ``python <options> -c <OUTERMOST> <descriptor> <excluded> <kind> <target> <arguments>`` and uses the
``SOCK_SEQPACKET`` socket with that descriptor, on which each message is sent or received whole::

    agent:  {"op": "fork", "id": 7, "folder": "/home"}   with three descriptors: environment as JSON, stdout, stderr
    server: {"op": "started", "id": 7, "pid": 4711}  or  {"op": "declined", "id": 7, "reason": "..."}
    server: {"op": "ended", "pid": 4711, "code": -9}     the worker stays a zombie, which reserves its id, until
    agent:  {"op": "reap", "pid": 4711}
    server: {"op": "ready", "seconds": 2.1, "imports": 12, "excluded": {}}  or  {"op": "unsafe", "reason": "..."}

When the agent's end of the socket closes, the server kills its workers and exits. If the server is killed, the kernel
kills the workers (``PR_SET_PDEATHSIG``).

The server has one thread. An import may take seconds, and only forks wait for it: ends of workers and of the agent are
handled by signal handlers, which Python also runs during an import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from azureml_elastic.node.preload import script_runner as running
from azureml_elastic.node.preload.fork_safety import leftover_threads, trial_fork, why_unsafe
from azureml_elastic.node.preload.import_loader import (
    LATER,
    Output,
    ReadsRank,
    difference,
    import_all,
    import_later,
    prepare,
    shadowed,
)
from azureml_elastic.node.preload.import_scan import find_imports

__all__ = ["serve"]

_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 16
_DESCRIPTORS = 3
_IDLE_SECONDS = 0.1
"""Idle time after which the server imports the modules that torch imports later."""

_REST_SECONDS = 2.0
"""Idle time after a fork, as new workers need the processors until their first step."""

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def serve() -> Callable[[], Any]:
    """Serve the agent. Returns only in workers, with the function that runs the script."""
    descriptor, excluded, kind, target, *arguments = sys.argv[1:]
    process = _Server(socket.socket(fileno=int(descriptor)), json.loads(excluded), kind, target)
    try:
        process.make_imports(arguments)
    except Exception as error:  # noqa: BLE001 - reported to the agent, which starts its workers plainly
        process.refuse(f"{type(error).__name__}: {error}")
    while True:
        run = process.turn()
        if run is not None:
            return run


class _Server:
    """State of the preload server.

    Args:
        link: socket to the agent.
        excluded: packages that are not imported, with the reasons.
        kind: ``"script"`` or ``"module"``.
        target: path of the script or name of the module.
    """

    def __init__(self, link: socket.socket, excluded: dict[str, str], kind: str, target: str) -> None:
        self._link = link
        self._excluded = excluded
        self._kind = kind
        self._target = target
        self._command = _plain_command(sys.orig_argv, kind)
        self._environment = dict(os.environ)
        self._of_imports: dict[str, str | None] = {}
        self._printed: tuple[bytes, bytes] = (b"", b"")
        self._output = Output()
        self._workers: dict[int, bool] = {}
        """Whether the end was reported, by process id."""
        self._unsafe: str | None = None
        self._later = list(LATER)
        self._quiet_until = time.monotonic() + _IDLE_SECONDS
        self._prctl = ctypes.CDLL(None).prctl
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._usual = {number: signal.getsignal(number) for number in (*_IGNORED, signal.SIGCHLD, signal.SIGIO)}
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._take_signals()
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
        self._end_with_agent()

    # --- imports -----------------------------------------------------------------------------------------------------

    def make_imports(self, arguments: list[str]) -> None:
        """Import the modules of the program, check that forking is safe, and report to the agent."""
        start = time.monotonic()
        prepare(self._kind, self._target, arguments)
        if shadow := shadowed():
            self.refuse(f"{shadow} has the name of a module that is imported before the script's folder is known")
            return
        if "torch" in self._excluded:
            self.refuse(self._excluded["torch"])
            return
        findings = find_imports(self._kind, self._target)
        if findings.obstacle is not None:
            self.refuse(findings.obstacle)
            return
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() opens no GPU then
        before = dict(os.environ)
        gc.disable()
        try:
            made = import_all(findings.imports, list(self._excluded), self._output)
        except ReadsRank as error:
            self._start_again({**self._excluded, error.package: str(error)})
        if self._kind == "module":
            sys.argv[0] = "-m"
        self._of_imports = difference(before, os.environ)
        self._printed = self._output.read()
        self._take_signals()
        gc.collect()
        gc.freeze()
        reason = trial_fork()
        if reason is not None:
            self.refuse(reason)
            return
        seconds = round(time.monotonic() - start, 3)
        self._send(op="ready", seconds=seconds, imports=made, excluded=self._excluded)
        self._quiet_until = time.monotonic() + _IDLE_SECONDS

    def refuse(self, reason: str) -> None:
        """Refuse all further forks."""
        self._unsafe, self._later = reason, []
        self._send(op="unsafe", reason=reason)

    def _start_again(self, excluded: dict[str, str]) -> NoReturn:
        """Replace this process by a new one that imports less."""
        words = list(sys.orig_argv)
        words[words.index(running.OUTERMOST) + 2] = json.dumps(excluded)
        self._output.forget_after((0, 0))
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._link.set_inheritable(True)
        os.execvpe(words[0], words, self._environment)  # noqa: S606

    def _import_one(self) -> None:
        name = self._later.pop(0)
        import_later(name, self._output)
        gc.collect()
        gc.freeze()
        reason = why_unsafe() or (None if self._later else trial_fork())
        if reason is not None:
            self.refuse(f"{name}: {reason}")
        elif not self._later:
            self._send(op="settled")

    # --- the agent's requests ----------------------------------------------------------------------------------------

    def turn(self) -> Callable[[], Any] | None:
        """Handle one request, or use the idle time for an import."""
        wait = None
        if self._later:
            wait = max(0.0, self._quiet_until - time.monotonic()) * 1000
        if not self._poll.poll(wait):
            self._import_one()
            return None
        data, descriptors, _, _ = socket.recv_fds(self._link, _MOST_BYTES, _DESCRIPTORS)
        if not data:
            self._end()
        request = json.loads(data)
        if request["op"] == "reap":
            self._reap(request["pid"])
            return None
        run = self._fork(request, descriptors)
        if run is None:
            for descriptor in descriptors:
                os.close(descriptor)
        return run

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Callable[[], Any] | None:
        reason = self._why_not(request["folder"])
        if reason is not None:
            self._decline(request, reason)
            return None
        server = os.getpid()
        # Signals to the worker, even those ignored here, stay pending until it has restored its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            worker = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._decline(request, f"it cannot fork: {error.strerror}")
            return None
        if worker == 0:
            return self._become_worker(server, descriptors)
        threads = leftover_threads()
        if threads is None:
            self._workers[worker] = False
            self._send(op="started", id=request["id"], pid=worker)
        else:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            self.refuse(threads)
            self._decline(request, threads)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._quiet_until = time.monotonic() + _REST_SECONDS
        return None

    def _decline(self, request: dict[str, Any], reason: str) -> None:
        self._send(op="declined", id=request["id"], reason=reason)

    def _why_not(self, folder: str) -> str | None:
        if self._unsafe is not None:
            return self._unsafe
        reason = why_unsafe()
        if reason is not None:
            self.refuse(reason)
            return reason
        here = os.getcwd()  # noqa: PTH109
        return None if here == folder else f"the working directory was {here!r} and is {folder!r} now"

    def _become_worker(self, server: int, descriptors: list[int]) -> Callable[[], Any]:
        try:
            return self._worker(server, descriptors)
        except Exception as error:  # noqa: BLE001 - a plain start is always possible
            os.write(2, f"The forked start failed ({type(error).__name__}: {error}); starting plainly.\n".encode())
            running.execute(self._command)

    def _worker(self, server: int, descriptors: list[int]) -> Callable[[], Any]:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)
        os.setsid()
        self._link.close()
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        environment, stdout, stderr = descriptors
        wanted = running.read_environment(environment)
        if "LC_CTYPE" in self._environment:
            wanted.setdefault("LC_CTYPE", self._environment["LC_CTYPE"])  # Python sets it in the C locale
        running.adopt_environment(wanted)
        running.adopt_descriptors(stdout, stderr)
        running.reset_process_state()
        run = running.become(self._kind, self._target, self._command)
        running.adopt_imports(self._printed, self._of_imports)
        return run

    def _reap(self, worker: int) -> None:
        if self._workers.pop(worker, False):
            os.waitpid(worker, 0)

    # --- signals -----------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """Ignore signals meant for the workers; install handlers for the ends of workers and agent.

        Handlers installed by imports are kept for the workers.
        """
        wanted: dict[int, Any] = dict.fromkeys(_IGNORED, signal.SIG_IGN)
        wanted |= {signal.SIGCHLD: self._on_child, signal.SIGIO: self._on_link}
        for number, handler in wanted.items():
            current = signal.getsignal(number)
            if current not in (handler, self._usual[signal.Signals(number)]):
                self._usual[signal.Signals(number)] = current
            signal.signal(number, handler)
        for number in (signal.SIGCHLD, signal.SIGIO):
            signal.siginterrupt(number, False)

    def _on_child(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        for worker, reported in list(self._workers.items()):
            if reported:
                continue
            ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                self._workers[worker] = True
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._send(op="ended", pid=worker, code=code)

    def _on_link(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        self._end_with_agent()

    def _end_with_agent(self) -> None:
        poll = select.poll()  # self._poll may be in use
        poll.register(self._link, select.POLLRDHUP)
        if poll.poll(0):
            self._end()

    def _end(self) -> NoReturn:
        for worker in self._workers:
            for kill in (os.killpg, os.kill):  # a worker that leads no group yet is killed alone
                with contextlib.suppress(OSError):
                    kill(worker, signal.SIGKILL)
        os._exit(0)

    def _send(self, **message: Any) -> None:
        try:
            self._link.send(json.dumps(message).encode())
        except OSError:
            self._end()


def _plain_command(words: list[str], kind: str) -> list[str]:
    """Return the command of a plain start, from the command of this process."""
    position = words.index(running.OUTERMOST)
    return [*words[: position - 1], *(["-m"] if kind == "module" else []), *words[position + 4 :]]
