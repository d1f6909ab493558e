"""Conversion of a fork of the fork server into a node: its agent, and the process that becomes its preload server.

The node is what its command would have started: it has a session, environment, working directory, network namespace and
output of its own. The preload server is forked before the agent has threads, and waits for the agent's request.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from azureml_elastic.forks import script_runner, stack_imports
from azureml_elastic.forks.command import INTERPRETER
from azureml_elastic.forks.import_variables import read_early
from azureml_elastic.forks.link import read_document, receive, send
from azureml_elastic.forks.process import ForkedProcess, document
from azureml_elastic.forks.server import EarlierImports, serve
from azureml_elastic.local.processes import MARKER

_GATHER_SECONDS = 2.0
"""Limit of the wait for the other nodes of the same start, one of which may be frozen."""

_CLONE_NEWNET = 0x40000000

_ENV_START = 47
"""Place of ``env_start`` among the fields of ``/proc/PID/stat`` behind the command; ``env_end`` follows."""


def become_node(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a node and return the call that runs its agent.

    Args:
        request: ``argv``, the agent's arguments, and ``network``, the name of a network namespace or null.
        descriptors: standard input, output and error; both ends of the pipe of the nodes that are started together.
        made: what the server has imported.
    """
    stdin, stdout, stderr, gathered, announced = descriptors
    # First: from now on the launcher finds this process by its marker, whatever fails below.
    _mark(os.environ[MARKER])
    os.setsid()
    script_runner.adopt_descriptors(stdin, stdout, stderr)
    script_runner.reset_process_state()
    if request["network"] is not None:
        _enter_network(request["network"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = os.fork()
    if waiting == 0:
        for descriptor in (gathered, announced):
            os.close(descriptor)
        ours.close()
        return _become_preload_server(theirs, made)
    theirs.close()
    preload = _Preload(ours, ForkedProcess(waiting, ["preload server"]), made, gathered, announced)

    def run() -> None:
        from azureml_elastic.forks.client import PreloadServer
        from azureml_elastic.node.__main__ import main

        sys.argv[:] = ["-m", *request["argv"]]
        sys.orig_argv[:] = [sys.executable, "-m", "azureml_elastic.node", *request["argv"]]
        try:
            # Not before the announcement, for which the nodes of one start wait: nothing is left to import early.
            code = main(start_preload=functools.partial(PreloadServer, popen=preload.start), early=False)
        finally:
            preload.close()
        sys.exit(code)

    return run


class _Preload:
    """The process that waits to become the preload server, on the agent's side.

    Args:
        gathered: pipe that ends once all nodes of the same start have announced themselves.
        announced: end of that pipe which this node holds until it has.
    """

    def __init__(
        self, link: socket.socket, process: ForkedProcess, made: EarlierImports, gathered: int, announced: int
    ) -> None:
        self._link = link
        self._process = process
        self._attached = made.attached
        self._gathered, self._announced = gathered, announced
        self._early = read_early(os.environ)
        self._used = False

    def start(self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
        """Start the preload server, with the arguments of ``subprocess.Popen``; the agent has announced its node."""
        self._gather()
        off = self._attached and stack_imports.is_off(env)
        if self._used or off or tuple(words[: len(INTERPRETER)]) != INTERPRETER or read_early(env) != self._early:
            return subprocess.Popen(words, env=env, pass_fds=pass_fds, **options)
        self._used = True
        wanted = {"words": list(words), "environment": dict(env), "folder": str(Path.cwd())}
        with document(wanted) as content:
            send(self._link, {}, [content, *pass_fds, options["stdout"].fileno(), options["stderr"].fileno()])
        return self._process

    def close(self) -> None:
        """Let the process end that has not become a preload server, and wait for the one that has."""
        self._link.close()
        self._process.wait()

    def _gather(self) -> None:
        """Wait until all nodes that were started together have announced themselves, or have ended.

        The first round takes in the nodes that have announced themselves when its first member is ready. A node that
        its command starts imports for seconds in between. A forked one would train alone before the next is forked.
        """
        if self._announced >= 0:
            os.close(self._announced)
            poll = select.poll()
            poll.register(self._gathered, select.POLLIN)
            poll.poll(_GATHER_SECONDS * 1000)
            os.close(self._gathered)
            self._gathered = self._announced = -1


def _enter_network(name: str) -> None:
    """Enter a network namespace, as ``ip netns exec`` does; this process has one thread."""
    with open(f"/var/run/netns/{name}", "rb") as space:  # noqa: PTH123
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _mark(marker: str) -> None:
    """Write a node's marker over the server's in the environment that ``/proc`` shows, that of the server's start."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
    shown = ctypes.string_at(start, end - start)
    value = shown.index(f"{MARKER}=".encode()) + len(MARKER) + 1
    length = shown.index(b"\0", value) - value
    text = marker.encode()
    assert len(text) <= length, f"{marker!r} is longer than the {length} bytes for it"
    ctypes.memset(start + value, 0, length)
    ctypes.memmove(start + value, text, len(text))


def _become_preload_server(link: socket.socket, made: EarlierImports) -> Callable[[], Any]:
    """Become the node's preload server when the agent requests one. Returns only in workers."""
    message, descriptors = receive(link)
    if message is None:
        os._exit(0)
    link.close()
    os.setsid()
    content, agent, stdout, stderr = descriptors
    wanted = read_document(content)
    os.chdir(wanted["folder"])
    script_runner.adopt_environment(wanted["environment"])
    script_runner.adopt_descriptors(stdout, stderr)
    script_runner.reset_process_state()
    words = list(wanted["words"])
    arguments = len(INTERPRETER) + 1  # behind the code
    words[arguments] = str(agent)
    sys.orig_argv[:] = words
    sys.argv[:] = ["-c", *words[arguments:]]
    return serve(made)
