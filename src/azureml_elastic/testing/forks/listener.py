"""The listener of the workspace: it forks the nodes that the wrappers of the interpreter ask for.

A node is forked if the fork is what its command would start: the library that was sent with the job is the one that the
fork server has imported, and the shell has changed nothing that only a new process takes over, such as resource limits.
Otherwise the wrapper executes the command.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shlex
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

import azureml_elastic
from azureml_elastic.forks.command import Imports
from azureml_elastic.forks.detached import ForkServer
from azureml_elastic.forks.import_variables import read_early
from azureml_elastic.forks.process import ForkedProcess, ForkRefused
from azureml_elastic.local.fork_start import MARKER_BYTES, ForkStart, start_server
from azureml_elastic.local.processes import MARKER
from azureml_elastic.testing.forks import wrapper
from azureml_elastic.testing.jobs.nodes import inherited_variables

_DOCTOR = "azureml_elastic.node.diagnostics.doctor"
_PACKAGE = Path(azureml_elastic.__file__).parent
_IN_ARCHIVE = "site/azureml_elastic/"
_POLL_S = 0.1
_GATHER_S = 1.0
"""Time after a fork for which the run's other first nodes are waited for, which their shells start together."""

_CREDENTIALS = "3i"
_STREAMS = 3
_MOST_BYTES = 1 << 12
_INTERPRETER_PATH = 100
"""Length of an interpreter's path up to which each kernel takes it from the first line of a script."""

_STATUS = (
    *("CapAmb", "CapBnd", "CapEff", "CapInh", "CapPrm", "Cpus_allowed", "Gid", "Groups", "NoNewPrivs", "Seccomp"),
    *("SigBlk", "SigIgn", "Uid", "Umask"),
)
"""Lines of ``/proc/PID/status`` that a process takes over from the one that starts it."""

_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


@dataclass
class _Gathering:
    """The first nodes of a run, which wait for each other's announcements, by a pipe that each has open until then."""

    reading: int
    writing: int
    until: float
    """Time on the monotonic clock from which further nodes are not waited for."""

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


class NodeForks(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A context manager that forks nodes on request of the wrappers in a folder.

    Its forks end with their wrappers, and with it. The caller is a subreaper meanwhile.

    Args:
        folder: new folder for the wrappers, which the nodes' ``PATH`` has first.
        starting: what forks the nodes; used by nothing else meanwhile.
    """

    socket_type = socket.SOCK_SEQPACKET
    request_queue_size = socket.SOMAXCONN

    def __init__(self, folder: Path, starting: ForkStart) -> None:
        self.folder = folder
        """Folder of the wrappers."""
        self._starting = starting
        self._home = Path(sys.executable).parent
        self._lock = threading.Lock()
        """For the servers of forks, and the pipes of the first nodes, which the first fork makes for the others."""
        self._gatherings: dict[str, _Gathering | None] = {}
        """Pipe by run, ``None`` once the run's first nodes have started."""
        self._links: set[socket.socket] = set()
        self._address = f"azureml-elastic-{secrets.token_hex(16)}"
        super().__init__(f"\0{self._address}", socketserver.BaseRequestHandler)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="workspace-forks")

    def __enter__(self) -> Self:
        self._write_wrappers()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for gathering in filter(None, self._gatherings.values()):
            gathering.close()

    def _write_wrappers(self) -> None:
        self.folder.mkdir(parents=True)
        code = (
            "import sys\n"
            f"sys.path.append({str(Path(wrapper.__file__).parent)!r})\n"
            "import wrapper\n"
            f"wrapper.main({str(self._home)!r}, {str(self.folder)!r}, {self._address!r})\n"
        )
        for name in {"python", "python3", Path(sys.executable).name}:
            if not os.access(self._home / name, os.X_OK):
                continue
            path = self.folder / name
            path.write_text(f"{_first_lines(str(self._home / name))}\n{code}", encoding="utf-8")
            path.chmod(0o700)

    # --- threads -----------------------------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a wrapper on a thread."""
        self._links.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a wrapper."""
        self._links.discard(request)
        super().shutdown_request(request)

    def finish_request(self, request: Any, _: Any) -> None:
        """Fork the node of one wrapper, pass its signals on and report its end."""
        with contextlib.suppress(OSError):  # the wrapper was killed
            pid, user, _ = struct.unpack(
                _CREDENTIALS, request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
            )
            if user != os.getuid():  # the address is known to all users of the machine
                return
            _, streams, _, _ = socket.recv_fds(request, 1, _STREAMS)
            try:
                process = self._fork(request, pid, streams)
            except ForkRefused as refusal:
                request.send(str(refusal).encode()[:_MOST_BYTES])
                return
            finally:
                for descriptor in streams:
                    os.close(descriptor)
            try:
                request.send(wrapper.FORKED.encode())
            except OSError:
                # The wrapper is gone: nobody would end its fork.
                process.kill()
            request.send(str(_wait(process, request)).encode())

    # --- forks -------------------------------------------------------------------------------------------------------

    def _fork(self, link: socket.socket, pid: int, streams: list[int]) -> ForkedProcess:
        """Fork the node that a wrapper asks for.

        Raises:
            ForkRefused: the wrapper must execute its command.
            OSError: the wrapper has ended.
        """
        proc = Path(f"/proc/{pid}")
        words = [os.fsdecode(word) for word in (proc / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = [os.fsdecode(line).partition("=") for line in (proc / "environ").read_bytes().split(b"\0") if line]
        environ = {name: value for name, _, value in pairs}
        folder = (proc / "cwd").readlink()
        # The interpreter of the wrapper and its options come first.
        own = next((at for at, word in enumerate(words) if word.startswith(f"{self.folder}/")), 0)
        arguments = wrapper.arguments_of_node(words[own + 1 :])
        if arguments is None or len(streams) != _STREAMS:
            raise ForkRefused("this is no request of a node's wrapper")
        wrapper.without_wrapper(environ, str(self._home / Path(words[own]).name), str(self.folder))
        if len(environ.get(MARKER, "")) not in range(1, MARKER_BYTES + 1):
            raise ForkRefused(f"the name of its machine is longer than the {MARKER_BYTES} bytes for it")
        if _DOCTOR in arguments:
            raise ForkRefused("the doctor examines what a new process finds")
        with self._lock:
            server = self._starting.server_for(environ)
            if server.wait_ready(lambda: _has_ended(link)):
                _check_library(words[own + 1], server, folder)
                _check_inherited(proc, server)
            elif _has_ended(link):
                raise ConnectionError
            pipe = self._pipe_of(environ.get("AZUREML_ROOT_RUN_ID", ""))
            return self._starting.fork(arguments, env=environ, streams=streams, folder=folder, pipe=pipe)

    def _pipe_of(self, run: str) -> tuple[int, int] | None:
        """Return the pipe of a run's first nodes, ``None`` for a later node."""
        gathering = self._gatherings.get(run)
        if run not in self._gatherings:
            gathering = self._gatherings[run] = _Gathering(*os.pipe(), 0.0)
        if gathering is None:
            return None
        gathering.until = time.monotonic() + _GATHER_S
        return gathering.reading, gathering.writing

    def service_actions(self) -> None:
        """Close the pipes of the runs whose first nodes have been forked."""
        if not self._lock.acquire(blocking=False):  # one is being forked
            return
        try:
            now = time.monotonic()
            for run, gathering in self._gatherings.items():
                if gathering is not None and gathering.until < now:
                    gathering.close()
                    self._gatherings[run] = None
        finally:
            self._lock.release()


def _first_lines(interpreter: str) -> str:
    """Return the first lines of a script that this interpreter runs without site-packages."""
    options = "-IS"
    if len(interpreter) <= _INTERPRETER_PATH and " " not in interpreter:
        return f"#!{interpreter} {options}"
    # A shell finds it, for which the same lines are another command; pip starts its scripts so, too.
    return f"#!/bin/sh\n'''exec' {shlex.quote(interpreter)} {options} \"$0\" \"$@\"\n' '''"


def _has_ended(link: socket.socket) -> bool:
    """Return whether a wrapper has ended, which sends nothing until it has an answer."""
    return bool(select.select([link], [], [], 0)[0])


def _wait(process: ForkedProcess, link: socket.socket) -> int:
    """Wait for the end of a fork and return its exit code; kill it if its wrapper ends first."""
    # Both ends are waited for at once, without polling: the fork's, and the wrapper's with its signals.
    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(link, select.POLLIN)
        while (code := process.poll()) is None:
            if link.fileno() in dict(poll.poll()):
                data = link.recv(_MOST_BYTES)
                process.send_signal(int(data or signal.SIGKILL))
                if not data:
                    poll.unregister(link)
    except ChildProcessError:  # killed and waited for by the one that ends all processes of the node
        return -signal.SIGKILL
    finally:
        os.close(ended)
    return code


def _check_library(archive: str, server: ForkServer, folder: Path) -> None:
    """Raise ``ForkRefused`` unless a node would import what the server has imported."""
    # By ctime: what installs a package may set another time of modification, such as that in its archive.
    if any(path.stat().st_ctime >= server.began for path in _PACKAGE.rglob("*.py")):
        raise ForkRefused("the installed library was changed after it was imported")
    if archive == "-m":
        return
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(folder / archive) as files:
        # The directory of the archive has the checksums, so that nothing is unpacked.
        own = [entry for entry in files.infolist() if entry.filename.startswith(_IN_ARCHIVE)]
        if own and all(
            zlib.crc32((_PACKAGE / entry.filename.removeprefix(_IN_ARCHIVE)).read_bytes()) == entry.CRC for entry in own
        ):
            return
    raise ForkRefused("the library that was sent with the job is not the one that is installed here")


def _check_inherited(proc: Path, server: ForkServer) -> None:
    """Raise ``ForkRefused`` unless a process has what the server has of that which a new process takes over."""
    wanted = _inherited(proc)
    try:
        there = _inherited(Path(f"/proc/{server.pid}"))
    except OSError:
        raise ForkRefused("the fork server has ended") from None
    if names := sorted(name for name in wanted if wanted[name] != there[name]):
        raise ForkRefused(f"its command has changed what a new process takes over: {', '.join(names)}")


def _inherited(proc: Path) -> Mapping[str, str]:
    lines = [line.partition(":") for line in (proc / "status").read_text().splitlines()]
    return {
        **{name: value.strip() for name, _, value in lines if name in _STATUS},
        **{f"namespace {name}": str((proc / "ns" / name).readlink()) for name in _NAMESPACES},
        "limits": (proc / "limits").read_text(),
        "nice": str(os.getpriority(os.PRIO_PROCESS, int(proc.name))),
        "root": str((proc / "root").readlink()),
    }


_AGENT = (
    "azureml_elastic.node.azure.credentials",
    "azureml_elastic.node.azure.workspace",
    "azureml_elastic.node.publishing.mlflow",
    "azureml_elastic.node.replacement.jobs",
    "azureml_elastic.node.table.azure",
)
"""What agents of a job import late, in addition to those of a local cluster."""


@contextlib.contextmanager
def open_fork_start() -> Iterator[ForkStart]:
    """Yield what forks nodes from one server, which starts with the first of them.

    Nodes with other variables that are read early than those of the first one are refused.
    """
    servers: list[ForkServer] = []

    def server_for(environ: Mapping[str, str]) -> ForkServer:
        if not servers:
            # Forks show in /proc the environment that the server was started with: not what belongs to one job.
            servers.append(start_server(Imports(modules=_AGENT), {**inherited_variables(), **read_early(environ)}))
        return servers[0]

    try:
        yield ForkStart(server_for)
    finally:
        for server in servers:
            server.close()
