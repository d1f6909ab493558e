"""Client of the fork server: starts it, requests forked processes, and waits for their ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.forks.command import outermost, without_threads
from azureml_elastic.local.node_start import NODE_COMMAND, AgentProcess, CommandStart, NodeStart
from azureml_elastic.local.processes import MARKER
from azureml_elastic.program.command import Program

__all__ = [
    "COMMAND",
    "MARKER_BYTES",
    "ForkRefused",
    "ForkServer",
    "ForkStart",
    "ForkedProcess",
    "Imports",
    "are_forked",
    "open_fork_start",
    "read_early",
]

COMMAND = (sys.executable, "-u", "-c")
"""Beginning of the server's command: that of a preload server of a program without options of the interpreter, so that
the output of forks is unbuffered as well."""

MARKER_BYTES = 128
"""Space for a node's marker, which the node writes over the server's in the memory that ``/proc`` shows."""

GO = b"-"
"""What a new process waits for, so that none runs whose id its parent does not know."""

_CODE = outermost("azureml_elastic.local.fork_server")

_EARLY = (
    "ACCELERATE_",
    "DS_",
    "HF_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "TORCH",
    "TRANSFORMERS_",
)
"""Beginnings of variables that are read when the interpreter starts or a library is imported."""

_LATE = ("TORCHELASTIC_", "TORCH_NCCL_")
"""Beginnings of variables among them that are read when process groups are created."""

_IMPORT_SECONDS = 120.0
"""Limit of the imports in processor time, and of a time in which they hardly get any."""

_PROGRESS_SECONDS = 1.0
"""Processor time in :data:`_IMPORT_SECONDS` by which imports differ from those that wait for something."""

_ANSWER_SECONDS = 15.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MOST_BYTES = 1 << 16


class ForkRefused(Exception):
    """The server cannot fork this process, for the reason in the message; it must be started by its command."""


@dataclass(frozen=True)
class Imports:
    """What a server imports.

    Args:
        program: program whose own imports are made as its preload server would make them; ``None`` for no program.
        modules: further modules, for what is forked from this server alone.
        agent: whether the modules of a node's agent are imported.
        path: folders in which the further modules are searched, too.
    """

    program: Program | None = None
    modules: tuple[str, ...] = ()
    agent: bool = True
    path: tuple[str, ...] = ()


class ForkedProcess:
    """A child process of this one, with the methods of ``subprocess.Popen`` that its users call.

    Args:
        argv: words that name the process in errors.
    """

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._argv = list(argv)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code.

        Args:
            timeout: limit in seconds; ``None`` waits without limit.

        Raises:
            subprocess.TimeoutExpired: the process is still running.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        # waitpid() has no time limit.
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self._argv, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # Only before it was waited for: another process may have its id afterwards.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


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
        self._early = read_early(environ)
        self._ready = False
        self._refusal: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            self._refusal = f"{sys.platform} is not Linux"
            return
        self._link, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        words = [*COMMAND, _CODE, str(server_end.fileno()), json.dumps(asdict(imports)), "{}"]
        others = {name: value for name, value in without_threads(environ).items() if name != MARKER}
        with server_end, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                words,
                # The marker comes last: a shorter one ends with zero bytes, behind which readers look for nothing.
                env={**others, MARKER: "-" * MARKER_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._errors,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Process id; ``None`` where there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def refusal(self) -> str | None:
        """Reason why nothing can be forked any more, or ``None``."""
        return self._refusal

    def wait_ready(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the imports are done or have failed; return whether processes can be forked.

        Args:
            stop: condition that ends the waiting early.
        """
        limit, used = time.monotonic() + _IMPORT_SECONDS, self._processor_seconds()
        while not self._ready and self._refusal is None and not stop():
            if self._is_readable(_POLL_SECONDS):
                answer = self._receive()
                self._ready = "ready" in answer
                self._refusal = self._refusal or answer.get("refusal")
            elif time.monotonic() > limit:
                # On a busy machine it is waited for: nodes that import for themselves instead keep that busier still.
                before, used = used, self._processor_seconds()
                if used - before < _PROGRESS_SECONDS or used > _IMPORT_SECONDS:
                    self._give_up(f"the imports of the fork server were not done within {_IMPORT_SECONDS:g} s")
                limit = time.monotonic() + _IMPORT_SECONDS
        return self._ready and self._refusal is None

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
            become: function that makes the fork the wanted process, as ``module:name``; see :mod:`.server`.
            request: what the function needs, as JSON; ``argv`` names the process.
            descriptors: file descriptors for the function.
            folder: working directory of the process; ``None`` for that of this one.

        Raises:
            ForkRefused: the process must be started by its command.
        """
        if not self.wait_ready():
            raise ForkRefused(self._refusal)
        early = read_early(environ)
        if names := sorted(name for name in {*early, *self._early} if early.get(name) != self._early.get(name)):
            raise ForkRefused(f"{', '.join(names)} in the environment may have been read by the imports")
        place = str(folder or Path.cwd())
        document = {"become": become, "request": dict(request), "environment": dict(environ), "folder": place}
        reading, writing = os.pipe()
        try:
            with _file_of(document) as content:
                self._send([content.fileno(), reading, *descriptors])
            if not self._is_readable(_ANSWER_SECONDS):
                self._give_up(f"the fork server did not answer within {_ANSWER_SECONDS:g} s")
            answer = {} if self._refusal is not None else self._receive()
            self._refusal = self._refusal or answer.get("refusal")
            if "pid" not in answer:
                raise ForkRefused(self._refusal or answer.get("reason"))
            with contextlib.suppress(BrokenPipeError):  # killed already
                os.write(writing, GO)
        finally:
            os.close(reading)
            os.close(writing)  # without the word the process ends
        return ForkedProcess(answer["pid"], request.get("argv", [become]))

    def close(self) -> None:
        """End the process, but not its forks."""
        self._refusal = self._refusal or "the fork server was closed"
        if self._process is not None:
            self._link.close()
            self._wait()
            self._errors.close()

    def _processor_seconds(self) -> float:
        """Return the processor time of the process so far, 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def _send(self, descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._link, [b"-"], list(descriptors))
        except OSError:
            self._refusal = f"the fork server has ended{self._wait()}"
            raise ForkRefused(self._refusal) from None

    def _receive(self) -> dict[str, Any]:
        data = b""
        with contextlib.suppress(OSError):
            data = self._link.recv(_MOST_BYTES)
        if not data:
            self._refusal = f"the fork server has ended{self._wait()}"
            return {}
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _give_up(self, reason: str) -> None:
        self._refusal = reason
        assert self._process is not None
        self._process.kill()

    def _wait(self) -> str:
        """Wait for the end of the process and return how it has ended."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code < 0:
            return f" by {signal.Signals(-code).name}"
        lines = os.pread(self._errors.fileno(), _MOST_BYTES, 0).decode(errors="replace").strip().split("\n")
        return f" with exit code {code}" + (f": {lines[-1].strip()}" if lines[-1] else "")


def read_early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when the interpreter starts or a library is imported."""
    return {name: value for name, value in environ.items() if name.startswith(_EARLY) and not name.startswith(_LATE)}


@contextlib.contextmanager
def _file_of(document: Any) -> Iterator[IO[bytes]]:
    """Yield a file without a name that holds a message of any length."""
    with os.fdopen(os.memfd_create("azureml-elastic"), "w+b") as file:
        file.write(json.dumps(document).encode())
        file.flush()
        yield file


_BECOME_NODE = "azureml_elastic.local.fork_server.node:become_node"


class ForkStart:
    """Forks the nodes that a server can fork, and starts the others by their command, with a line in their output.

    Args:
        server_for: function that returns the server for nodes with an environment.
        become: function that a fork calls to become a node, as ``module:name``.
    """

    def __init__(self, server_for: Callable[[Mapping[str, str]], ForkServer], become: str = _BECOME_NODE) -> None:
        self._become = become
        self.server_for = server_for
        """Function that returns the server for nodes with an environment."""
        self._gathering: tuple[int, int] | None = None
        self.refusal: str | None = None
        """Reason why no node can be forked any more, or ``None``."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Wait until the imports are done or have failed, or the condition is true."""
        self.server_for(UserEnvironment.read().for_nodes()).wait_ready(stop)

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Let the nodes that are started in this context wait for each other's announcements."""
        with _pipe() as self._gathering:
            yield
        self._gathering = None

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes], network: str | None = None
    ) -> AgentProcess:
        """Start a node; see :class:`NodeStart`."""
        if tuple(argv[: len(NODE_COMMAND)]) == NODE_COMMAND:
            arguments = argv[len(NODE_COMMAND) :]
            with open(os.devnull, "rb") as empty:  # noqa: PTH123
                streams = [empty.fileno(), output.fileno(), output.fileno()]
                try:
                    return self.fork(arguments, env=env, streams=streams, network=network, pipe=self._gathering)
                except ForkRefused as refusal:
                    output.write(f"This node is not forked, its command is started: {refusal}.\n".encode())
                    output.flush()
        return CommandStart().start(argv, env=env, output=output, network=network)

    def fork(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        streams: Sequence[int],
        folder: Path | None = None,
        network: str | None = None,
        pipe: tuple[int, int] | None = None,
    ) -> ForkedProcess:
        """Fork a node.

        Args:
            streams: descriptors for standard input, output and error.
            folder: working directory of the node; ``None`` for that of this process.
            network: network namespace of the node; ``None`` for that of this process.
            pipe: pipe of the nodes that wait for each other's announcements; ``None`` for a node that waits for none.

        Raises:
            ForkRefused: the node must be started by its command.
        """
        server = self.server_for(env)
        request = {"argv": list(arguments), "network": network}
        with _pipe() if pipe is None else contextlib.nullcontext(pipe) as ends:
            try:
                return server.fork(self._become, request, env, [*streams, *ends], folder)
            except ForkRefused:
                self.refusal = server.refusal
                raise


def are_forked(program: Program, distribution: ElasticDistribution, most_nodes: int) -> bool:
    """Return whether the nodes of a run are forked, as far as its settings decide.

    Args:
        most_nodes: number of nodes that are started together.
    """
    return (
        most_nodes > 1  # the imports take as long as those of one node
        and (*program.interpreter_command, "-c") == COMMAND  # options apply to an interpreter from its start
        and distribution.preload_workers  # else the program wants its imports made by each worker
        and not distribution.runs_engine  # whose processes are started, not forked
    )


@contextlib.contextmanager
def open_fork_start(program: Program, environ: Mapping[str, str]) -> Iterator[NodeStart]:
    """Yield what forks the nodes of a run from a server of its own."""
    server = ForkServer(Imports(program), environ)
    try:
        yield ForkStart(lambda _: server)
    finally:
        server.close()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)
