"""Fork server for nodes of local clusters and for scripts: torch is imported once for all of them.

``start_node`` takes the place of ``subprocess.Popen`` in :class:`~azureml_elastic.local.processes.NodeProcesses`. A
node is forked twice, so that it becomes a child of the test process, the subreaper, and has a session, environment,
working directory and output of its own. Its preload server is forked before the agent has threads and waits for the
agent's request. What depends on variables that are read at the interpreter's start is started by its command.

:class:`Script` and :func:`run_script` are such processes that run ``python script.py`` or ``python -m module``, as a
worker does that is forked from the product's preload server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from azureml_elastic.local.cluster import NODE_COMMAND
from azureml_elastic.local.processes import MARKER, _set_subreaper
from azureml_elastic.node.preload import import_loader, script_runner
from azureml_elastic.node.preload import server as preload_server

__all__ = ["Script", "run_script", "serve", "start_node"]

_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = f"import sys\nsys.path.insert(1, {_ROOT!r})\n" + script_runner.OUTERMOST.replace(
    "from azureml_elastic.node.preload import server as serving",
    "from tests.support import node_server as serving\nsys.path.remove(" + repr(_ROOT) + ")",
)
_PYTHON = (sys.executable, "-u", "-c")
"""How local clusters start a preload server; the fork server starts alike, so that its forks have unbuffered output."""

_EARLY = ("KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH")
"""Beginnings of variables that are read when the interpreter starts or a library is imported."""

_LATE = ("TORCHELASTIC_", "TORCH_NCCL_")
"""Beginnings of variables among them that are read when process groups are created."""

_IMPORT_SECONDS = 0.5
"""Pause of each node between its announcement and its joining, during which a real one imports for seconds: nodes are
started one after the other, and the first round waits for those that have announced themselves."""

_MOST_BYTES = 1 << 18
_MARKER_BYTES = 128
_CLONE_NEWNET = 0x40000000


# --- in the test process ---------------------------------------------------------------------------------------------


class _ForkedChild:
    """A child process with the methods of ``subprocess.Popen`` that its users call."""

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._argv = argv

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self._argv, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_node(
    argv: Sequence[str], *, env: Mapping[str, str], stdout: Any, network: str | None = None, **options: Any
) -> Any:
    """Start a node's agent, forked from the server where its command and environment allow that.

    Args:
        argv: command of the node.
        env: its environment.
        stdout: file for its output.
        network: network namespace of the node; ``None`` for that of this process.
        options: options of ``subprocess.Popen``.
    """
    if tuple(argv[: len(NODE_COMMAND)]) != NODE_COMMAND or sys.platform != "linux":
        within = () if network is None else ("ip", "netns", "exec", network)
        return subprocess.Popen([*within, *argv], env=env, stdout=stdout, **options)
    argv = argv[len(NODE_COMMAND) :]
    request = {"argv": argv, "env": dict(env), "folder": str(Path.cwd()), "network": network}
    return _ForkedChild(_fork("training", request, [stdout.fileno()]), argv)


class Script(_ForkedChild):
    """A process like that of ``python script.py`` or ``python -m module``, forked from a server.

    Args:
        argv: ``sys.executable``, no options but ``-m``, the script or module, and its arguments.
        imports: ``"training"`` or ``"submission"``: what the server has imported.
        env: environment, to which the variables of a local cluster's nodes are added; this process's by default.
        cwd: working directory; this process's by default.
        stdin: file or descriptor for standard input; by default it is empty.
        stdout: file or descriptor for standard output.
        stderr: the same for standard error.
        session: whether the process leads a session of its own.
    """

    def __init__(
        self,
        argv: Sequence[Any],
        imports: str = "training",
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any,
        stderr: Any,
        session: bool = False,
    ) -> None:
        words = [os.fspath(word) for word in argv]
        assert words[0] == sys.executable, words
        request = {
            "script": words,
            "env": {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"},
            "folder": str(cwd or Path.cwd()),
            "session": session,
        }
        before = _set_subreaper(True)
        try:
            with Path(os.devnull).open("rb") as empty:
                pid = _fork(imports, request, [_descriptor(file) for file in (stdin or empty, stdout, stderr)])
        finally:
            _set_subreaper(before)
        super().__init__(pid, words)


def run_script(argv: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a :class:`Script` and capture its output, as ``subprocess.run`` does."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = Script(argv, stdout=stdout, stderr=stderr, **options)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(argv, code, stdout.read(), stderr.read())


def _descriptor(file: Any) -> int:
    return file if isinstance(file, int) else file.fileno()


def _fork(imports: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Let the server with these imports fork, and return the id of the process, a child of this one."""
    server = _server(imports, tuple(sorted(_early(request["env"]).items())))
    _send(server, request, descriptors)
    return json.loads(server.recv(_MOST_BYTES))["pid"]


def _early(env: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in env if name.startswith(_EARLY) and not name.startswith(_LATE)]
    return {name: env[name] for name in names}


@functools.cache
def _server(imports: str, early: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a server with these imports and variables and return the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: value for name, value in os.environ.items() if name not in _early(os.environ)}
    process = subprocess.Popen(
        [*_PYTHON, _CODE, str(theirs.fileno()), imports],
        env={MARKER: "-" * _MARKER_BYTES, **others, **dict(early)},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _send(link: socket.socket, message: Any, descriptors: Sequence[int]) -> None:
    """Send a message of any length by a file without a name, followed by descriptors."""
    with os.fdopen(os.memfd_create("message"), "w+b") as file:
        file.write(json.dumps(message).encode())
        file.flush()
        socket.send_fds(link, [b"-"], [file.fileno(), *descriptors])


def _receive(link: socket.socket, descriptors: int) -> tuple[Any, list[int]] | None:
    data, received, _, _ = socket.recv_fds(link, 1, descriptors + 1)
    return (script_runner.read_json(received[0]), received[1:]) if data else None


# --- in the server ---------------------------------------------------------------------------------------------------


def serve() -> Callable[[], Any]:
    """Fork nodes and scripts. Returns only in their processes: the call that runs the agent, or a script."""
    link = socket.socket(fileno=int(sys.argv[1]))
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    marker = getenv(MARKER.encode())
    _IMPORTS[sys.argv[2]]()
    gc.collect()
    gc.freeze()
    while True:
        received = _receive(link, 3)
        if received is None:
            os._exit(0)
        request, descriptors = received
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            node = os.fork()
            if node:
                os.write(writing, str(node).encode())
                os._exit(0)
            os.close(reading)
            os.close(writing)
            link.close()
            return _script(request, *descriptors) if "script" in request else _node(request, *descriptors, marker)
        for descriptor in (writing, *descriptors):
            os.close(descriptor)
        os.waitpid(middle, 0)
        pid = int(os.read(reading, 64))
        os.close(reading)
        link.send(json.dumps({"pid": pid}).encode())


def _import_training() -> None:
    """Import what agents and workers import."""
    from azureml_elastic import node, train

    for package in (node, train):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda _: None):
            if not module.name.endswith("__main__") and ".train.horovod" not in module.name:  # which needs Horovod
                importlib.import_module(module.name)
    for name in ("azureml_elastic.node.__main__", "torch.distributed.elastic.multiprocessing", *import_loader.LATER):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # the samples' data; it takes longer than their training
        importlib.import_module("sklearn.datasets")


def _import_submission() -> None:
    """Import what the commands that submit and compile jobs import."""
    for name in ("azure.ai.ml", "azureml_elastic.cli", "azureml_elastic.submit.client", "azureml_elastic.submit.job"):
        importlib.import_module(name)
    for name in ("compiled_file", "job_file"):
        importlib.import_module(f"azureml_elastic.submit.yaml.{name}")


_IMPORTS = {"training": _import_training, "submission": _import_submission}


def _script(request: dict[str, Any], stdin: int, stdout: int, stderr: int) -> Callable[[], Any]:
    """Become a script, and return the call that runs it."""
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    script_runner.adopt_environment(request["env"])
    os.dup2(stdin, 0)
    os.close(stdin)
    script_runner.adopt_descriptors(stdout, stderr)
    if "torch" in sys.modules:
        script_runner.reset_process_state()
    interpreter, *words = request["script"]
    kind = "module" if words[0] == "-m" else "script"
    target, *arguments = words[1:] if kind == "module" else words
    import_loader.prepare(kind, target, arguments)
    return script_runner.become(kind, target, [interpreter, *words])


def _node(request: dict[str, Any], output: int, marker: int) -> Callable[[], Any]:
    """Become a node: fork the process that will be its preload server, and return the call that runs the agent."""
    os.setsid()
    if request["network"] is not None:
        _enter_network(request["network"])
    os.chdir(request["folder"])
    script_runner.adopt_environment(request["env"])
    ctypes.memset(marker, 0, _MARKER_BYTES)
    ctypes.memmove(marker, request["env"][MARKER].encode(), len(request["env"][MARKER]))
    script_runner.adopt_descriptors(os.dup(output), output)
    script_runner.reset_process_state()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = os.fork()
    if waiting == 0:
        ours.close()
        return _preload(theirs)
    theirs.close()
    early = _early(os.environ)
    child = _ForkedChild(waiting, ["preload server"])

    def start_preload(words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
        if tuple(words[: len(_PYTHON)]) != _PYTHON or _early(env) != early:
            return subprocess.Popen(words, env=env, pass_fds=pass_fds, **options)
        time.sleep(_IMPORT_SECONDS)
        descriptors = [*pass_fds, options["stdout"].fileno(), options["stderr"].fileno()]
        _send(ours, {"words": words, "env": dict(env), "folder": str(Path.cwd())}, descriptors)
        return child

    def run() -> None:
        from azureml_elastic.node.__main__ import main
        from azureml_elastic.node.preload.client import PreloadServer

        sys.argv[:] = ["-m", *request["argv"]]
        try:
            code = main(start_preload=functools.partial(PreloadServer, popen=start_preload))
        finally:
            ours.close()
            child.wait()
        sys.exit(code)

    return run


def _enter_network(name: str) -> None:
    """Enter a network namespace, as ``ip netns exec`` does; this process has one thread."""
    with open(f"/var/run/netns/{name}", "rb") as space:  # noqa: PTH123
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _preload(link: socket.socket) -> Callable[[], Any]:
    """Become the node's preload server when the agent requests one. Returns only in workers."""
    received = _receive(link, 3)
    if received is None:
        os._exit(0)
    link.close()
    os.setsid()
    request, (agent, stdout, stderr) = received
    os.chdir(request["folder"])
    script_runner.adopt_environment(request["env"])
    script_runner.adopt_descriptors(stdout, stderr)
    script_runner.reset_process_state()
    words = list(request["words"])
    server = len(_PYTHON) + 1  # behind the code
    words[server] = str(agent)
    sys.orig_argv[:] = words
    sys.argv[:] = ["-c", *words[server:]]
    return preload_server.serve()
