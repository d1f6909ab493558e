"""The fork server: imports modules once, then forks processes on request of its client.

It is started as ``python -u -c <code> <descriptor> <imports> <excluded>`` and uses the ``SOCK_SEQPACKET`` socket with
that descriptor, on which each message is sent or received whole::

    server: {"ready": 2.1}  or  {"refusal": "..."}       once its imports are done
    client: -                                            with descriptors: the request, a gate, those of the process
    server: {"pid": 4711}  or  {"reason": "..."}         or a refusal of this and all further requests

The request has the function that makes the fork the wanted process, and what it needs::

    {"become": "azureml_elastic.local.fork_server.node:become_node", "request": {}, "environment": {},
     "folder": "/home"}

The function is called with the request, the descriptors and the :class:`Server`, and returns the call that runs the
process. A process is forked twice, so that it becomes a child of the client, the subreaper, and waits at the gate until
the client knows its id.

The server has one thread, and is never forked with more. It ends when the client's end of the socket closes, also in
the middle of an import; its forks go on.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from azureml_elastic.environment import names as variables
from azureml_elastic.forks import import_loader, script_runner, stack_imports
from azureml_elastic.forks.import_loader import leftover_threads, trial_fork, why_unsafe
from azureml_elastic.forks.import_scan import find_imports
from azureml_elastic.local.fork_server.client import GO
from azureml_elastic.local.processes import MARKER
from azureml_elastic.program.command import Program
from azureml_elastic.program.source import opens_session, program_modules

__all__ = ["Become", "Server", "serve"]

_AGENT = (
    "azureml_elastic.node.__main__",
    "azureml_elastic.node.startup.entry",
    "azureml_elastic.node.agent.agent",
    "azureml_elastic.node.agent.worker_processes",
    "azureml_elastic.node.table.sqlite",
    "azureml_elastic.ipc.tls",
    "azureml_elastic.forks.store_server",
    "torch.distributed",
)
"""What agents with a table in a file import, also late and in functions; and torch, for their preload servers."""

_MOST_DESCRIPTORS = 8

Become = Callable[[dict[str, Any], list[int], "Server"], Callable[[], Any]]
"""Function that makes a fork of the server the wanted process, and returns the call that runs it."""


def serve() -> Callable[[], Any]:
    """Serve the client's requests. Returns only in forks: the call that runs the process."""
    descriptor, imports, excluded = sys.argv[1:]
    server = Server(socket.socket(fileno=int(descriptor)), json.loads(imports), json.loads(excluded))
    try:
        server.make_imports()
    except Exception as error:  # noqa: BLE001 - reported to the client, which starts its nodes by their command
        server.refuse(f"{type(error).__name__}: {error}")
    while True:
        run = server.handle_one()
        if run is not None:
            return run


class Server:
    """The server, and what its forks take over from it.

    Args:
        imports: fields of the client's ``Imports``.

    Attributes:
        excluded: packages that are left to the workers, with the reasons.
        printed: what the imports have printed on standard output and standard error, for each worker to repeat.
        variables_set: environment variables that the imports have set, likewise; ``None`` for removed ones.
        attached: whether the integrations of training stacks were attached before the imports.
    """

    def __init__(self, link: socket.socket, imports: dict[str, Any], excluded: dict[str, str]) -> None:
        self._link = link
        self._imports = imports
        self.excluded = excluded
        self.printed: tuple[bytes, bytes] = (b"", b"")
        self.variables_set: Mapping[str, str | None] = {}
        self.attached = False
        # /proc shows the memory that the kernel has filled at the start. The server's variable is in it as long as
        # nobody sets it again, which would take other memory.
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._marker: int = getenv(MARKER.encode())
        self._marker_bytes = len(os.environ[MARKER])
        self._environment = dict(os.environ)
        # A signal, as a thread that watches the socket would forbid all forks, and the imports may take a minute.
        self._usual = signal.signal(signal.SIGIO, self._end_with_client)
        # Python repeats interrupted system calls, but libraries that are imported may not.
        signal.siginterrupt(signal.SIGIO, False)
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
        self._end_with_client()  # it may have ended before there was a handler

    def mark(self, marker: str) -> None:
        """Write a process's marker into the environment that ``/proc`` shows, that of the server's start."""
        text = marker.encode()
        assert len(text) <= self._marker_bytes, f"{marker!r} is longer than the {self._marker_bytes} bytes for it"
        ctypes.memset(self._marker, 0, self._marker_bytes)
        ctypes.memmove(self._marker, text, len(text))

    # --- imports -----------------------------------------------------------------------------------------------------

    def make_imports(self) -> None:
        """Make the imports and report to the client whether processes can be forked."""
        start = time.monotonic()
        given = self._imports["program"]
        program = None if given is None else Program(**{**given, "arguments": tuple(given["arguments"])})
        output = import_loader.Output()
        usual = sys.path[:]
        if program is not None:
            import_loader.prepare(program.kind, program.target, program.arguments)
            findings = find_imports(program.kind, program.target)
            if obstacle := self.excluded.get("torch") or findings.obstacle or _shadow():
                self.refuse(obstacle)
            self._attach_integrations(program)
        of_program = sys.path[:]
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() opens no GPU then
        before = dict(os.environ)
        # The forks turn it on again. What the imports make stays, and each collection would look at all of it.
        gc.disable()
        if program is not None:
            # First, as the program makes them without anything imported before: their order may matter.
            try:
                import_loader.import_all((*findings.imports, *import_loader.BASICS), list(self.excluded), output)
            except import_loader.Unsuitable as error:
                self._start_again({**self.excluded, error.package: str(error)}, output)
        self.variables_set = import_loader.difference(before, os.environ)
        self.printed = output.read()
        sys.path[:] = [*self._imports["path"], *usual]
        for name in self._imports["modules"]:
            importlib.import_module(name)
        sys.path[:] = usual
        if self._imports["agent"]:
            for name in _AGENT:
                importlib.import_module(name)
        if program is not None:
            sys.path[:] = of_program
            self._import_later(output)
            if obstacle := _shadow():  # by what the agent has imported
                self.refuse(obstacle)
            sys.path[:] = usual
        gc.collect()
        gc.freeze()  # a collection in a fork would copy the pages of all objects
        if reason := trial_fork():
            self.refuse(f"the imports {reason}")
        self._send({"ready": round(time.monotonic() - start, 3)})

    def _import_later(self, output: import_loader.Output) -> None:
        """Import what torch and packages import after the program's start; those among them that have such modules."""
        for name in import_loader.LATER:
            import_loader.import_later(name, output)
        tried: set[str] = set()
        while names := [name for name in import_loader.later_of_packages(self.excluded) if name not in tried]:
            name = names[0]
            tried.add(name)
            with import_loader.watched(os.environ) as read:
                import_loader.import_later(name, output)
            if reason := f"reads {read[0]}" if read else trial_fork():
                excluded = {name.partition(".")[0]: f"{name} {reason} while it is imported"}
                self._start_again({**self.excluded, **excluded}, output)

    def refuse(self, reason: str) -> NoReturn:
        """Refuse all forks, and end."""
        self._send({"refusal": reason})
        os._exit(0)

    def _attach_integrations(self, program: Program) -> None:
        """Attach the integrations before the stack is imported, where the node's agent will want them."""
        off = program.kind == "script" and opens_session(program_modules(program))
        environ = {variables.INTEGRATIONS: "off" if off else "", **os.environ, variables.CHANNEL: ""}
        stack_imports.register(environ)
        self.attached = not stack_imports.is_off(environ)

    def _start_again(self, excluded: dict[str, str], output: import_loader.Output) -> NoReturn:
        """Replace this process by a new one that imports less."""
        words = list(sys.orig_argv)
        words[-1] = json.dumps(excluded)
        output.truncate((0, 0))
        signal.signal(signal.SIGIO, self._usual)  # which ends the process, too, if the client ends meanwhile
        self._link.set_inheritable(True)
        os.execvpe(words[0], words, self._environment)  # noqa: S606

    # --- the client's requests ---------------------------------------------------------------------------------------

    def handle_one(self) -> Callable[[], Any] | None:
        """Handle one request; in a new process, return what runs it."""
        data, descriptors, _, _ = socket.recv_fds(self._link, 1, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        if reason := why_unsafe():
            self.refuse(f"the imports {reason}")
        content, gate, *others = descriptors
        reading, writing = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            answer: dict[str, Any] = {"reason": f"the fork server cannot fork: {error.strerror}"}
        else:
            if middle == 0:
                return self._fork_again(content, gate, others, reading, writing)
            threads = leftover_threads()
            os.waitpid(middle, 0)
            pid = os.read(reading, 64)
            if threads is not None:  # the process still waits at the gate, and ends when the client closes it
                self.refuse(f"the imports {threads}")
            answer = {"pid": int(pid)} if pid.isdigit() else {"reason": "the fork server cannot fork"}
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)
        self._send(answer)
        return None

    def _fork_again(self, content: int, gate: int, others: list[int], reading: int, writing: int) -> Callable[[], Any]:
        try:
            process = os.fork()
        except OSError:
            os.write(writing, b"-")
            os._exit(1)
        if process:
            os.write(writing, str(process).encode())
            os._exit(0)
        signal.signal(signal.SIGIO, self._usual)
        for descriptor in (reading, writing):
            os.close(descriptor)
        self._link.close()
        if os.read(gate, 1) != GO:
            os._exit(1)
        os.close(gate)
        document = script_runner.read_json(content)
        os.chdir(document["folder"])
        script_runner.adopt_environment(document["environment"])
        module, _, name = document["become"].partition(":")
        become: Become = getattr(importlib.import_module(module), name)
        return become(document["request"], others, self)

    def _end_with_client(self, *_signal: object) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLRDHUP)
        if poll.poll(0):
            os._exit(0)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._link.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)


def _shadow() -> str | None:
    shadow = import_loader.shadowed()
    return shadow and f"{shadow} has the name of a module that is imported before the script's folder is known"
