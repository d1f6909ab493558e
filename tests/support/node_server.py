"""Nodes of local clusters, and scripts, that are forked from servers which all tests of a process share.

``FORKED`` is the ``start`` of a local cluster whose nodes are forked from a server that has imported torch once, and
:func:`forked_with` one that has the imports of a script as well. :class:`Script` and :func:`run_script` are processes
that run ``python script.py`` or ``python -m module``, as a worker does that a preload server forks.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.command import Imports
from azureml_elastic.forks.detached import ForkServer
from azureml_elastic.forks.import_variables import read_early
from azureml_elastic.forks.process import ForkedProcess
from azureml_elastic.local.fork_start import ForkStart, start_server
from azureml_elastic.local.node_start import AgentProcess, NodeStart
from azureml_elastic.local.processes import set_subreaper
from azureml_elastic.program.command import parse_program
from tests.support.paths import ROOT

_IMPORTS = {
    "training": Imports(
        modules=("tests.support.training_imports", "tests.support.forked_script"), path=(str(ROOT),), at_once=True
    ),
    "submission": Imports(
        modules=("tests.support.submission_imports", "tests.support.forked_script"), path=(str(ROOT),)
    ),
}

_BECOME_NODE = "tests.support.leaving:become_node"


class Script(ForkedProcess):
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
        request = {"argv": words, "folder": str(cwd or Path.cwd()), "session": session}
        environ = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"}
        before = set_subreaper(True)
        try:
            with Path(os.devnull).open("rb") as empty:
                descriptors = [_descriptor(file) for file in (stdin or empty, stdout, stderr)]
                server = _server(_IMPORTS[imports], environ)
                process = server.fork("tests.support.forked_script:become_script", request, environ, descriptors)
        finally:
            set_subreaper(before)
        super().__init__(process.pid, words)


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


def _server(imports: Imports, env: Mapping[str, str]) -> ForkServer:
    integrations = {name: env[name] for name in (variables.INTEGRATIONS,) if name in env}
    return _server_with(imports, tuple(sorted({**read_early(env), **integrations}.items())))


@functools.cache
def _server_with(imports: Imports, early: tuple[tuple[str, str], ...]) -> ForkServer:
    """Start a server with these imports and variables, which ends with this process."""
    names = read_early(os.environ)
    start = start_server if imports.at_once else ForkServer
    server = start(imports, {name: os.environ[name] for name in os.environ if name not in names} | dict(early))
    atexit.register(server.close)
    return server


FORKED = ForkStart(functools.partial(_server, _IMPORTS["training"]), _BECOME_NODE)
"""Start of nodes that are forked from the server of all runs."""


DYING = ForkStart(functools.partial(_server, _IMPORTS["training"]), "tests.support.dying_node:become_dying_node")
"""The same, of nodes whose agents get an unexpected error on a signal; see :mod:`tests.support.dying_node`."""

WATCHED = ForkStart(
    functools.partial(_server, _IMPORTS["training"]), "tests.support.entered_modules:become_watched_node"
)
"""The same, of nodes that write down which modules are entered; see :mod:`tests.support.entered_modules`."""

FAILING = ForkStart(functools.partial(_server, _IMPORTS["training"]), "tests.support.failing_node:become_failing_node")
"""The same, of nodes that cannot start all of their threads; see :mod:`tests.support.failing_node`."""


def forked_with(script: Path) -> NodeStart:
    """Return the start of nodes that are forked from a server with the imports of a script."""
    imports = Imports(parse_program([str(script)]), modules=("tests.support.leaving",), path=(str(ROOT),), at_once=True)
    return ForkStart(functools.partial(_server, imports), _BECOME_NODE)


class StartAt(NodeStart):
    """Start of nodes that differ in what their environment decides.

    Args:
        network: function that returns the network namespace of a node with an environment, or ``None``.
        more: function that returns further variables of a node with an environment.
        starting: start of the nodes; by default forks of the server of all runs.
    """

    def __init__(
        self,
        network: Callable[[Mapping[str, str]], str | None] = lambda _: None,
        more: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {},
        starting: NodeStart = FORKED,
    ) -> None:
        self._network = network
        self._more = more
        self._starting = starting
        self.prepare, self.gathering = starting.prepare, starting.gathering

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes], **_: Any) -> AgentProcess:
        """Start a node."""
        env = {**env, **self._more(env)}
        return self._starting.start(argv, env=env, output=output, network=self._network(env))
