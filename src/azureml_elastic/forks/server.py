"""The preload server: imports the modules of the script, then forks workers on request of the agent.

It is started as ``python <options> -c <OUTERMOST> <descriptor> <excluded> <kind> <target> <arguments>`` and uses the
``SOCK_SEQPACKET`` socket with that descriptor, on which each message is sent or received whole::

    agent:  {"op": "begin"}                              with a descriptor: the workers' environment as JSON
    agent:  {"op": "fork", "id": 7, "folder": "/home"}   with three descriptors: start as JSON, stdout, stderr
    agent:  {"op": "store", "id": 7, "host": "10.0.0.4", "port": 29400}   with two: listening socket, control connection
    server: {"op": "started", "id": 7, "pid": 4711}  or  {"op": "serving", "id": 7, "pid": 4711}  for a store,
            or  {"op": "declined", "id": 7, "reason": "..."}
    server: {"op": "ended", "pid": 4711, "code": -9}     the worker stays a zombie, which reserves its id, until
    agent:  {"op": "reap", "pid": 4711}
    server: {"op": "ready", "seconds": 2.1, "imports": 12, "excluded": {}}  or  {"op": "unsafe", "reason": "..."}

The start of a worker has its environment, and its arguments where they differ between workers::

    {"environment": {"RANK": "0"}, "arguments": null}

The agent starts the server before its own imports and sends the environment once it has joined. Until then the server
imports torch, where the script does so first and does not set variables that torch reads; ``excluded`` is ``null``. A
server that replaces itself by one that imports less has the environment already, and its reasons in ``excluded``.

A process that serves a round's store is a fork, too (see :mod:`~azureml_elastic.forks.store_server`). It ends
with its control connection, and nobody asks for its exit code. All workers of a round wait for it, so that a server
which has been asked for one forks the next one in advance, while it is idle.

When the agent's end of the socket closes, the server kills its workers and exits. If the server is killed, the kernel
kills the workers (``PR_SET_PDEATHSIG``).

The server has one thread. An import may take seconds, and only forks wait for it: the exits of workers and of the agent
are handled by signal handlers, which Python also runs during an import.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from azureml_elastic.forks import import_loader, optimizer_steps, script_runner, stack_imports, state_lookups
from azureml_elastic.forks.command import plain_command, replace_excluded
from azureml_elastic.forks.import_loader import Rehearsal, leftover_threads, trial_fork, why_unsafe
from azureml_elastic.forks.import_scan import early_imports, find_imports

__all__ = ["EarlierImports", "serve"]

_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 16
_DESCRIPTORS = 3
_IDLE_SECONDS = 0.1
"""Idle time after which the server imports the modules that torch imports later."""

_REST_SECONDS = 2.0
"""Idle time after a fork, as new workers need the processors until their first step."""

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class EarlierImports:
    """What is known of imports that the process that became this server has made.

    Args:
        excluded: packages that are left to the workers, with the reasons.
        printed: output on standard output and standard error.
        variables_set: environment variables that were set, ``None`` for removed ones.
    """

    excluded: Mapping[str, str] = field(default_factory=dict)
    printed: Sequence[bytes] = ()
    variables_set: Mapping[str, str | None] = field(default_factory=dict)


def serve(earlier: EarlierImports | None = None) -> Callable[[], Any]:
    """Serve the agent's requests. Returns only in workers, with the function that runs the script.

    Args:
        earlier: imports that this process has made before; ``None`` for a new process.
    """
    descriptor, excluded, kind, target, *arguments = sys.argv[1:]
    link = socket.socket(fileno=int(descriptor))
    server = _Server(link, json.loads(excluded), kind, target, earlier or EarlierImports())
    try:
        import_loader.prepare(kind, target, arguments)
        server.begin()
        server.make_imports()
    except Exception as error:  # noqa: BLE001 - reported to the agent, which starts its workers plainly
        server.refuse(f"{type(error).__name__}: {error}")
    while True:
        run = server.handle_one()
        if run is not None:
            return run


class _Server:
    def __init__(
        self, link: socket.socket, excluded: dict[str, str] | None, kind: str, target: str, earlier: EarlierImports
    ) -> None:
        self._link = link
        self._waits = excluded is None
        self._excluded = {**earlier.excluded, **(excluded or {})}
        self._kind = kind
        self._target = target
        self._command = plain_command(sys.orig_argv)
        self._environment = dict(os.environ)
        self._variables_set = dict(earlier.variables_set)
        self._printed = tuple(earlier.printed)
        self._output = import_loader.Output()
        self._workers: dict[int, bool] = {}
        """Whether the end was reported, by process id."""
        self._stores: set[int] = set()
        self._spare_store: tuple[int, socket.socket] | None = None
        self._serves_stores = False
        self._unsafe: str | None = None
        self._later = list(import_loader.LATER)
        self._later_packages: list[str] = []
        self._rehearsal: Rehearsal | None = None
        self._quiet_until = time.monotonic() + _IDLE_SECONDS
        self._prctl = ctypes.CDLL(None).prctl
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._usual = {number: signal.getsignal(number) for number in (*_IGNORED, signal.SIGCHLD, signal.SIGIO)}
        # A signal that arrives just before poll() does not interrupt it, and its handler would run after the next
        # request: the agent may wait for nothing but the end of a worker. Each signal also writes here.
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._usual_wake = -1
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._take_signals()
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
        # Its end may have been closed before a signal was asked for.
        self._end_with_agent()

    # --- imports -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the first imports of the program, as far as nothing is known to them, and wait for the environment."""
        if not self._waits:
            return
        unsuitable: dict[str, str] = {}
        if "torch" not in self._excluded and import_loader.shadowed() is None:
            imports = early_imports(find_imports(self._kind, self._target))
            if imports:
                self._prepare_torch()
            before = dict(os.environ)
            try:
                import_loader.import_all(imports, list(self._excluded), self._output)
            except import_loader.Unsuitable as error:
                unsuitable = {**self._excluded, error.package: str(error)}
            except ImportError:
                pass  # of torch, and raised again once the agent listens
            self._variables_set |= import_loader.difference(before, os.environ)
        data, descriptors, _, _ = socket.recv_fds(self._link, _MOST_BYTES, 1)
        if not data:
            self._end()
        self._adopt_environment(script_runner.read_json(descriptors[0]))
        self._environment = dict(os.environ)
        if unsuitable:
            self._start_again(unsuitable)
        script_runner.adopt_imports(self._printed, self._variables_set)

    def _adopt_environment(self, wanted: dict[str, str]) -> None:
        if "LC_CTYPE" in self._environment:
            wanted.setdefault("LC_CTYPE", self._environment["LC_CTYPE"])  # Python sets it in the C locale
        script_runner.adopt_environment(wanted)

    def _prepare_torch(self) -> None:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() opens no GPU then
        gc.disable()

    def make_imports(self) -> None:
        """Import the modules of the program, check that forking is safe, and report to the agent."""
        start = time.monotonic()
        if shadow := import_loader.shadowed():
            self.refuse(f"{shadow} has the name of a module that is imported before the script's folder is known")
            return
        findings = find_imports(self._kind, self._target)
        if obstacle := self._excluded.get("torch") or findings.obstacle:
            self.refuse(obstacle)
            return
        self._prepare_torch()
        stack_imports.register()
        before = dict(os.environ)
        try:
            made = import_loader.import_all(
                (*findings.imports, *import_loader.BASICS), list(self._excluded), self._output
            )
        except import_loader.Unsuitable as error:
            self._start_again({**self._excluded, error.package: str(error)})
        if self._kind == "module":
            sys.argv[0] = "-m"
        self._variables_set |= import_loader.difference(before, os.environ)
        self._printed = self._output.read()
        self._take_signals()
        gc.collect()
        # A child that collects garbage of its parent may destroy objects whose threads only the parent has, and each
        # collection would copy the pages that all workers share.
        gc.freeze()
        if reason := trial_fork():
            self.refuse(f"the script's imports {reason}")
            return
        self._later_packages = import_loader.later_of_packages(self._excluded)
        seconds = round(time.monotonic() - start, 3)
        self._send(op="ready", seconds=seconds, imports=made, excluded=self._excluded)
        self._quiet_until = time.monotonic() + _IDLE_SECONDS

    def refuse(self, reason: str) -> None:
        """Refuse all further forks."""
        self._unsafe, self._later, self._later_packages = reason, [], []
        self._send(op="unsafe", reason=reason)

    def _start_again(self, excluded: dict[str, str]) -> NoReturn:
        """Replace this process by a new one that imports less."""
        words = replace_excluded(sys.orig_argv, excluded)
        self._output.truncate((0, 0))
        self._restore_signals()
        self._link.set_inheritable(True)
        os.execvpe(words[0], words, self._environment)  # noqa: S606

    def _import_next(self) -> None:
        """Import one of the modules that the script's imports need later, or rehearse that of a package."""
        if self._later:
            name = self._later.pop(0)
        else:
            self._rehearsal = self._rehearsal or Rehearsal(self._later_packages[0])
            result = self._rehearsal.result()
            if result is None:
                self._quiet_until = time.monotonic() + _IDLE_SECONDS
                return
            self._rehearsal, name = None, self._later_packages.pop(0)
            if not result:
                return
        import_loader.import_later(name, self._output)
        gc.collect()
        gc.freeze()
        if reason := why_unsafe() or (None if self._later else trial_fork()):
            self.refuse(f"{name} {reason} while it was imported")
        elif not self._later:
            self._send(op="settled")

    # --- the agent's requests ----------------------------------------------------------------------------------------

    def handle_one(self) -> Callable[[], Any] | None:
        """Handle one request, or use the idle time for an import; in a new worker, return what runs the script."""
        needs_store = self._serves_stores and self._spare_store is None and self._unsafe is None
        is_busy = bool(self._later or self._later_packages or needs_store)
        milliseconds = max(0.0, self._quiet_until - time.monotonic()) * 1000 if is_busy else None
        ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, _MOST_BYTES)
        if not ready:
            if self._later or self._later_packages:
                self._import_next()
            else:
                self._fork_spare_store()
        if self._link.fileno() not in ready:
            return None
        data, descriptors, _, _ = socket.recv_fds(self._link, _MOST_BYTES, _DESCRIPTORS)
        if not data:
            self._end()
        request = json.loads(data)
        if request["op"] == "reap":
            # Only one whose end was reported: the agent reaps once it has the code, and another process cannot have its
            # id before.
            if self._workers.pop(request["pid"], False):
                os.waitpid(request["pid"], 0)
            return None
        run = None
        if request["op"] == "store":
            self._fork_store(request, *descriptors)
        elif request["op"] == "fork":  # not "begin", which comes too late where the first imports have failed
            run = self._fork(request, descriptors)
        if run is None:
            for descriptor in descriptors:
                os.close(descriptor)
        return run

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Callable[[], Any] | None:
        if reason := self._obstacle(request["folder"]):
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
            try:
                return self._become_worker(server, *descriptors)
            except Exception as error:  # noqa: BLE001 - a plain start is always possible
                os.write(2, f"The forked start failed ({type(error).__name__}: {error}); starting plainly.\n".encode())
                script_runner.execute(self._command)
        # Counted only now: pools with fork handlers have stopped for the fork, and any other thread may have held a
        # lock that the child has for ever.
        threads = leftover_threads()
        if threads is None:
            self._workers[worker] = False
            self._send(op="started", id=request["id"], pid=worker)
        else:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            self.refuse(f"the script's imports {threads}")
            self._decline(request, f"the script's imports {threads}")
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._quiet_until = time.monotonic() + _REST_SECONDS
        return None

    def _fork_store(self, request: dict[str, Any], listener: int, control: int) -> None:
        """Have a process serve the store of a round: the one that was forked in advance, or a new one."""
        self._serves_stores = True
        order = json.dumps({"host": request["host"], "port": request["port"]}).encode()
        spare, self._spare_store = self._spare_store, None
        if spare is not None:
            child, link = spare
            with link, contextlib.suppress(OSError):
                socket.send_fds(link, [order], [listener, control])
                self._send(op="serving", id=request["id"], pid=child)
                return
        try:
            child, link = self._fork_waiting_store()
        except OSError as error:
            self._decline(request, f"it cannot fork: {error.strerror or error}")
            return
        with link:
            socket.send_fds(link, [order], [listener, control])
        self._send(op="serving", id=request["id"], pid=child)

    def _fork_spare_store(self) -> None:
        """Fork the process that will serve the store of the next round."""
        with contextlib.suppress(OSError):
            self._spare_store = self._fork_waiting_store()
        self._quiet_until = time.monotonic() + _REST_SECONDS  # before the next attempt

    def _fork_waiting_store(self) -> tuple[int, socket.socket]:
        """Fork a process that will serve a store; return it with the socket that takes the address and descriptors.

        Raises:
            OSError: it cannot be forked.
        """
        if reason := self._unsafe or why_unsafe():
            raise OSError(reason)
        server = os.getpid()
        ours, theirs = socket.socketpair()
        try:
            child = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if child == 0:
            try:
                self._end_with(server)
                ours.close()
                self._restore_signals()
                self._close_descriptors()
                for number in _IGNORED:
                    signal.signal(number, signal.SIG_IGN)  # for the agent to act on, which ends this process
                from azureml_elastic.forks.store_server import serve_when_asked

                serve_when_asked(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self._stores.add(child)
        return child, ours

    def _decline(self, request: dict[str, Any], reason: str) -> None:
        self._send(op="declined", id=request["id"], reason=reason)

    def _obstacle(self, folder: str) -> str | None:
        """Return why a worker for this working directory cannot be forked, or ``None``."""
        if self._unsafe is None and (reason := why_unsafe()):
            self.refuse(f"the script's imports {reason}")
        if self._unsafe is not None:
            return self._unsafe
        here = os.getcwd()  # noqa: PTH109
        return None if here == folder else f"the working directory was {here!r} and is {folder!r} now"

    def _become_worker(self, server: int, start: int, stdout: int, stderr: int) -> Callable[[], Any]:
        self._end_with(server)
        # The agent signals the whole group, so that it reaches what the worker has started; the error file is written
        # by leaders of sessions alone.
        os.setsid()
        self._restore_signals()
        self._close_descriptors()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        document = script_runner.read_json(start)
        wanted, arguments = document["environment"], document["arguments"]
        if arguments is not None:
            sys.argv[1:] = arguments
            self._command[len(self._command) - len(arguments) :] = arguments
        self._adopt_environment(wanted)
        script_runner.adopt_descriptors(stdout, stderr)
        script_runner.reset_process_state()
        run = script_runner.become(self._kind, self._target, self._command)
        script_runner.adopt_imports(self._printed, self._variables_set)
        import_loader.set_rank(os.environ)
        state_lookups.record(os.environ)
        optimizer_steps.count_steps(os.environ)
        return run

    def _close_descriptors(self) -> None:
        """Close the server's own descriptors, in a fork."""
        self._link.close()
        if self._spare_store is not None:
            self._spare_store[1].close()
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)

    def _end_with(self, server: int) -> None:
        """Have the kernel end this fork when the server ends."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:  # it has ended before that
            os._exit(1)

    # --- signals -----------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """Ignore signals meant for the workers; install handlers for the exits of workers and agent.

        Handlers installed by imports are kept for the workers.
        """
        wanted: dict[int, Any] = dict.fromkeys(_IGNORED, signal.SIG_IGN)
        wanted |= {signal.SIGCHLD: self._on_child, signal.SIGIO: self._end_with_agent}
        for number, handler in wanted.items():
            current = signal.getsignal(number)
            if current not in (handler, self._usual[signal.Signals(number)]):
                self._usual[signal.Signals(number)] = current
            signal.signal(number, handler)
        wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._usual_wake = self._usual_wake if wake == self._wake else wake
        for number in (signal.SIGCHLD, signal.SIGIO):
            # Calls of libraries that the handlers interrupt during an import go on: C code seldom expects EINTR.
            signal.siginterrupt(number, False)

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(self._usual_wake)
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def _on_child(self, *_signal: object) -> None:
        for store in list(self._stores):
            ended_store, status = os.waitpid(store, os.WNOHANG)
            if ended_store:
                self._stores.discard(store)
                self._send(op="store ended", pid=store, code=os.waitstatus_to_exitcode(status))
        for worker, reported in list(self._workers.items()):
            if reported:
                continue
            ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                self._workers[worker] = True
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._send(op="ended", pid=worker, code=code)

    def _end_with_agent(self, *_signal: object) -> None:
        poll = select.poll()  # self._poll may be in use
        poll.register(self._link, select.POLLRDHUP)
        if poll.poll(0):
            self._end()

    def _end(self) -> NoReturn:
        """Kill the workers and exit; the kernel kills the stores, which the agent may need no longer than this."""
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
