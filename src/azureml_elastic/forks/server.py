"""A fork server: imports modules, then forks processes on request of its client; see :mod:`.link` for the messages.

It is started as ``python <options> -c <OUTERMOST> <descriptor> <imports> <excluded>``. A node's agent has one, the
*preload server*, which imports what the script imports and forks its workers. A local cluster has one that imports what
all its nodes and their preload servers would import, and from which these are forked.

An agent starts its server before its own imports and sends the environment once it has joined. Until then the server
imports torch, where the script does so first and does not set variables that torch reads; ``excluded`` is ``null``. A
server that replaces itself by one that imports less has the environment already, and its reasons in ``excluded``.

A process that serves a round's store is a fork, too (see :mod:`~azureml_elastic.forks.store_server`). All workers of a
round wait for it, so that a server which has been asked for one forks the next one in advance, while it is idle.

When the client's end of the link closes, the server kills its workers and exits. If the server is killed, the kernel
kills the workers (``PR_SET_PDEATHSIG``).

The server has one thread. An import may take seconds, and only forks wait for it: the exits of workers and of the
client are handled by signal handlers, which Python also runs during an import.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
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

from azureml_elastic.environment import names as variables
from azureml_elastic.forks import import_loader, script_runner, stack_imports, state_files
from azureml_elastic.forks.command import Imports
from azureml_elastic.forks.fork_checks import end_with, leftover_threads, trial_fork, why_unsafe
from azureml_elastic.forks.import_loader import rehearse
from azureml_elastic.forks.import_scan import Findings, early_imports, find_imports
from azureml_elastic.forks.import_variables import difference
from azureml_elastic.forks.link import GO, MOST_BYTES, read_document, receive, send
from azureml_elastic.program.command import Program
from azureml_elastic.program.source import opens_session, program_modules

_IDLE_SECONDS = 0.1
"""Idle time after which the server imports the modules that torch imports later."""

_REST_SECONDS = 2.0
"""Idle time after a fork, as new workers need the processors until their first step."""

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class EarlierImports:
    """What is known of imports that the process that became this one has made.

    Args:
        excluded: packages that are left to the workers, with the reasons.
        printed: output on standard output and standard error, for each worker to repeat.
        variables_set: environment variables that were set, likewise; ``None`` for removed ones.
        attached: whether the integrations of training stacks were attached before the imports.
    """

    excluded: Mapping[str, str] = field(default_factory=dict)
    printed: Sequence[bytes] = ()
    variables_set: Mapping[str, str | None] = field(default_factory=dict)
    attached: bool = False


Become = Callable[[Mapping[str, Any], list[int], EarlierImports], Callable[[], Any]]
"""Function that makes a detached fork the wanted process, and returns the call that runs it."""


def serve(earlier: EarlierImports | None = None) -> Callable[[], Any]:
    """Serve the client's requests. Returns only in forks, with the function that runs the process.

    Args:
        earlier: imports that this process has made before; ``None`` for a new process.
    """
    descriptor, imports, excluded = sys.argv[1:]
    link = socket.socket(fileno=int(descriptor))
    server = _Server(link, Imports.from_json(imports), json.loads(excluded), earlier or EarlierImports())
    try:
        server.begin()
        server.make_imports()
    except Exception as error:  # noqa: BLE001 - reported to the client, which starts its processes plainly
        server.refuse(f"{type(error).__name__}: {error}")
    while True:
        run = server.handle_one()
        if run is not None:
            return run


class _Server:
    def __init__(
        self, link: socket.socket, imports: Imports, excluded: dict[str, str] | None, earlier: EarlierImports
    ) -> None:
        self._link = link
        self._imports = imports
        self._program = imports.program
        self._waits = excluded is None
        self._excluded = {**earlier.excluded, **(excluded or {})}
        self._environment = dict(os.environ)
        self._path = sys.path[:]
        self._variables_set = dict(earlier.variables_set)
        self._printed = tuple(earlier.printed)
        self._attached = False
        self._output = import_loader.Output()
        self._workers: dict[int, bool] = {}
        """Whether the end was reported, by process id; of workers and stores."""
        self._spare_store: tuple[int, socket.socket] | None = None
        self._serves_stores = False
        self._unsafe: str | None = None
        self._later = [] if self._program is None and not imports.at_once else list(import_loader.LATER)
        self._later_packages: list[str] = []
        self._rehearsal = 0
        """Process that imports the next one of these, 0 for none."""
        self._quiet_until = time.monotonic() + _IDLE_SECONDS
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        # Detached processes take over from the client what it ignores; signals that are meant for workers go to all.
        self._ignored = () if imports.at_once else _IGNORED
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
        self._end_with_client()

    # --- imports -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the first imports of the program, as far as nothing is known to them, and wait for the environment."""
        if self._program is not None:
            import_loader.prepare(self._program.kind, self._program.target, self._program.arguments)
        if not self._waits:
            return
        unsuitable: dict[str, str] = {}
        if "torch" not in self._excluded and import_loader.shadowed() is None:
            imports = early_imports(self._find_imports())
            if imports:
                self._prepare_torch()
            before = dict(os.environ)
            try:
                import_loader.import_all(imports, list(self._excluded), self._output)
            except import_loader.Unsuitable as error:
                unsuitable = {**self._excluded, error.package: str(error)}
            except ImportError:
                pass  # of torch, and raised again once the agent listens
            self._variables_set |= difference(before, os.environ)
        request, descriptors = receive(self._link)
        if request is None:
            self._end()
        self._adopt_environment(read_document(descriptors[0]))
        self._environment = dict(os.environ)
        if unsuitable:
            self._start_again(unsuitable)
        script_runner.adopt_imports(self._printed, self._variables_set)

    def _find_imports(self) -> Findings:
        return Findings((), None) if self._program is None else find_imports(self._program.kind, self._program.target)

    def _adopt_environment(self, wanted: dict[str, str]) -> None:
        if "LC_CTYPE" in self._environment:
            wanted.setdefault("LC_CTYPE", self._environment["LC_CTYPE"])  # Python sets it in the C locale
        script_runner.adopt_environment(wanted)

    def _prepare_torch(self) -> None:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() opens no GPU then
        gc.disable()

    def make_imports(self) -> None:
        """Make the imports, check that forking is safe, and report to the client."""
        start = time.monotonic()
        findings = self._find_imports()
        if obstacle := self._shadow() or self._excluded.get("torch") or findings.obstacle:
            self.refuse(obstacle)
            return
        self._prepare_torch()
        if self._program is not None:
            self._attach_integrations(self._program)
        before = dict(os.environ)
        made = 0
        if self._program is not None or self._imports.at_once:
            # First, as the program makes them without anything imported before: their order may matter.
            try:
                wanted = (*findings.imports, *import_loader.BASICS)
                made = import_loader.import_all(wanted, list(self._excluded), self._output)
            except import_loader.Unsuitable as error:
                self._start_again({**self._excluded, error.package: str(error)})
        if self._program is not None and self._program.kind == "module":
            sys.argv[0] = "-m"
        self._variables_set |= difference(before, os.environ)
        self._printed = self._output.read()
        self._import_modules()
        if self._imports.at_once:
            self._import_all_later()
        if self._imports.modules and (obstacle := self._shadow()):  # by what these have imported
            self.refuse(obstacle)
            return
        self._take_signals()
        gc.collect()
        # A child that collects garbage of its parent may destroy objects whose threads only the parent has, and each
        # collection would copy the pages that all workers share.
        gc.freeze()
        if reason := trial_fork():
            self.refuse(f"the imports {reason}")
            return
        if not self._imports.at_once:
            self._later_packages = import_loader.later_of_packages(self._excluded)
        seconds = round(time.monotonic() - start, 3)
        self._send(op="ready", seconds=seconds, imports=made, excluded=self._excluded)
        self._quiet_until = time.monotonic() + _IDLE_SECONDS

    def _shadow(self) -> str | None:
        shadow = None if self._program is None else import_loader.shadowed()
        return shadow and f"{shadow} has the name of a module that is imported before the script's folder is known"

    def _attach_integrations(self, program: Program) -> None:
        """Attach the integrations before the stack is imported; where nodes are forked, as their agents will want."""
        environ: Mapping[str, str] = os.environ
        if self._imports.at_once:
            off = program.kind == "script" and opens_session(program_modules(program))
            environ = {variables.INTEGRATIONS: "off" if off else "", **os.environ, variables.CHANNEL: ""}
        stack_imports.register(environ)
        self._attached = not stack_imports.is_off(environ)

    def _import_modules(self) -> None:
        """Import what is no import of the program, on the path without its folder."""
        of_program = sys.path[:]
        sys.path[:] = [*self._imports.path, *self._path]
        for name in self._imports.modules:
            importlib.import_module(name)
        sys.path[:] = of_program

    def _import_all_later(self) -> None:
        """Import what torch and packages import after the program's start; those among them that have such modules."""
        while self._later:
            import_loader.import_later(self._later.pop(0), self._output)
        tried: set[str] = set()
        while names := [name for name in import_loader.later_of_packages(self._excluded) if name not in tried]:
            name = names[0]
            tried.add(name)
            with import_loader.watched(os.environ) as read:
                import_loader.import_later(name, self._output)
            if reason := f"reads {read[0]}" if read else trial_fork():
                excluded = {name.partition(".")[0]: f"{name} {reason} while it is imported"}
                self._start_again({**self._excluded, **excluded})

    def refuse(self, reason: str) -> None:
        """Refuse all further forks."""
        self._unsafe, self._later, self._later_packages = reason, [], []
        self._send(op="unsafe", reason=reason)

    def _start_again(self, excluded: dict[str, str]) -> NoReturn:
        """Replace this process by a new one that imports less, and has the workers' environment."""
        words = [*sys.orig_argv[:-1], json.dumps(excluded)]
        self._output.truncate((0, 0))
        self._restore_signals()
        self._link.set_inheritable(True)
        os.execvpe(words[0], words, self._environment)  # noqa: S606

    def _import_next(self) -> None:
        """Import one of the modules that the script's imports need later, or rehearse that of a package."""
        if self._later:
            name = self._later.pop(0)
        else:
            self._rehearsal = self._rehearsal or rehearse(self._later_packages[0])
            process, status = os.waitpid(self._rehearsal, os.WNOHANG)
            if process == 0:
                self._quiet_until = time.monotonic() + _IDLE_SECONDS
                return
            self._rehearsal, name = 0, self._later_packages.pop(0)
            if status != 0:
                return
        import_loader.import_later(name, self._output)
        gc.collect()
        gc.freeze()
        if reason := why_unsafe() or (None if self._later else trial_fork()):
            self.refuse(f"{name} {reason} while it was imported")
        elif not self._later:
            self._send(op="settled")

    # --- the client's requests ---------------------------------------------------------------------------------------

    def handle_one(self) -> Callable[[], Any] | None:
        """Handle one request, or use the idle time for an import; in a new worker, return what runs the script."""
        needs_store = self._serves_stores and self._spare_store is None and self._unsafe is None
        is_busy = bool(self._later or self._later_packages or needs_store)
        milliseconds = max(0.0, self._quiet_until - time.monotonic()) * 1000 if is_busy else None
        ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, MOST_BYTES)
        if not ready:
            if self._later or self._later_packages:
                self._import_next()
            else:
                self._fork_spare_store()
        if self._link.fileno() not in ready:
            return None
        request, descriptors = receive(self._link)
        if request is None:
            self._end()
        if request["op"] == "reap":
            # Only one whose end was reported: the agent reaps once it has the code, and another process cannot have its
            # id before.
            if self._workers.pop(request["pid"], False):
                os.waitpid(request["pid"], 0)
            return None
        run = None
        if request["op"] == "store":
            self._fork_store(request, *descriptors)
        elif request["op"] in ("fork", "detach"):  # not "begin", which comes too late where the first imports failed
            run = self._fork(request, descriptors)
        if run is None:
            for descriptor in descriptors:
                os.close(descriptor)
        return run

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Callable[[], Any] | None:
        """Fork a worker or a detached process; in that, return what runs it."""
        if reason := self._obstacle(request.get("folder")):
            self._decline(request, reason)
            return None
        server, detached = os.getpid(), request["op"] == "detach"
        # Signals to the process, even those ignored here, stay pending until it has restored its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            child = _fork_twice() if detached else os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._decline(request, f"it cannot fork: {error.strerror}")
            return None
        if child == 0:
            if detached:
                return self._become_detached(request["become"], *descriptors)
            assert self._program is not None
            try:
                return self._become_worker(self._program, server, *descriptors)
            except Exception as error:  # noqa: BLE001 - a plain start is always possible
                os.write(2, f"The forked start failed ({type(error).__name__}: {error}); starting plainly.\n".encode())
                script_runner.execute(self._program.command_for(os.environ))
        # Counted only now: pools with fork handlers have stopped for the fork, and any other thread may have held a
        # lock that the child has for ever.
        threads = leftover_threads()
        if threads is None:
            if detached:  # before the answer, after which the client may look at what processes take over from this one
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            else:
                self._workers[child] = False
            self._send(op="started", id=request["id"], pid=child)
        else:
            os.kill(child, signal.SIGKILL)
            if not detached:
                os.waitpid(child, 0)
            self.refuse(f"the imports {threads}")
            self._decline(request, f"the imports {threads}")
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._quiet_until = time.monotonic() + _REST_SECONDS
        return None

    def _fork_store(self, request: dict[str, Any], listener: int, control: int) -> None:
        """Have a process serve the store of a round: the one that was forked in advance, or a new one."""
        self._serves_stores = True
        try:
            child, link = self._spare_store or self._fork_waiting_store()
            self._spare_store = None
            with link:
                send(link, {"host": request["host"], "port": request["port"]}, [listener, control])
        except OSError as error:  # it cannot be forked, or the one that was has ended
            self._decline(request, f"it cannot fork: {error.strerror or error}")
        else:
            self._send(op="started", id=request["id"], pid=child)

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
                end_with(server)
                ours.close()
                self._leave_server()
                for number in _IGNORED:
                    signal.signal(number, signal.SIG_IGN)  # for the agent to act on, which ends this process
                from azureml_elastic.forks.store_server import serve_when_asked

                serve_when_asked(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self._workers[child] = False
        self._on_child()  # it may have ended before
        return child, ours

    def _decline(self, request: dict[str, Any], reason: str) -> None:
        self._send(op="declined", id=request["id"], reason=reason)

    def _obstacle(self, folder: str | None) -> str | None:
        """Return why no worker for a working directory, or no process for any, can be forked, or ``None``."""
        if self._unsafe is None and (reason := why_unsafe()):
            self.refuse(f"the imports {reason}")
        if self._unsafe is not None:
            return self._unsafe
        here = os.getcwd()  # noqa: PTH109
        return None if folder in (None, here) else f"the working directory was {here!r} and is {folder!r} now"

    def _become_worker(
        self, program: Program, server: int, environment: int, stdout: int, stderr: int
    ) -> Callable[[], Any]:
        end_with(server)
        # The agent signals the whole group, so that it reaches what the worker has started; the error file is written
        # by leaders of sessions alone.
        os.setsid()
        self._leave_server()
        self._adopt_environment(read_document(environment))
        if program.placeholders is not None:
            sys.argv[1:] = program.arguments_for(os.environ)
        script_runner.adopt_descriptors(stdout, stderr)
        script_runner.reset_process_state()
        run = script_runner.become(program.kind, program.target, program.command_for(os.environ))
        script_runner.adopt_imports(self._printed, self._variables_set)
        import_loader.set_rank(os.environ)
        state_files.record(os.environ)
        return run

    def _become_detached(self, become: str, content: int, gate: int, *others: int) -> Callable[[], Any]:
        self._leave_server()
        if os.read(gate, 1) != GO:
            os._exit(1)
        os.close(gate)
        document = read_document(content)
        os.chdir(document["folder"])
        script_runner.adopt_environment(document["environment"])
        sys.path[:] = self._path
        module, _, name = become.partition(":")
        function: Become = getattr(importlib.import_module(module), name)
        made = EarlierImports(self._excluded, self._printed, self._variables_set, self._attached)
        return function(document["request"], list(others), made)

    def _leave_server(self) -> None:
        """Undo, in a fork, what the server has changed of its process."""
        self._restore_signals()
        self._link.close()
        if self._spare_store is not None:
            self._spare_store[1].close()
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    # --- signals -----------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        """Ignore signals meant for the workers; install handlers for the exits of workers and client.

        Handlers installed by imports are kept for the workers.
        """
        wanted: dict[int, Any] = dict.fromkeys(self._ignored, signal.SIG_IGN)
        wanted |= {signal.SIGCHLD: self._on_child, signal.SIGIO: self._end_with_client}
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
        for worker, reported in list(self._workers.items()):
            if reported:
                continue
            ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                self._workers[worker] = True
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._send(op="ended", pid=worker, code=code)

    def _end_with_client(self, *_signal: object) -> None:
        poll = select.poll()  # self._poll may be in use
        poll.register(self._link, select.POLLRDHUP)
        if poll.poll(0):
            self._end()

    def _end(self) -> NoReturn:
        """Kill the workers and the stores, and exit."""
        for worker in self._workers:
            for kill in (os.killpg, os.kill):  # what leads no group, or not yet, is killed alone
                with contextlib.suppress(OSError):
                    kill(worker, signal.SIGKILL)
        os._exit(0)

    def _send(self, **message: Any) -> None:
        try:
            send(self._link, message)
        except OSError:
            self._end()


def _fork_twice() -> int:
    """Fork a process that becomes a child of the nearest subreaper; return its id, and 0 in that process.

    Raises:
        OSError: it cannot be forked.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            process = -1
            with contextlib.suppress(OSError):
                process = os.fork()
            if process == 0:
                return 0
            os.write(writing, str(process).encode())
            os._exit(0)
        os.waitpid(between, 0)
        process = int(os.read(reading, MOST_BYTES))
    finally:
        os.close(reading)
        os.close(writing)
    if process < 0:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return process
