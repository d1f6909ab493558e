"""Start of the nodes of a local cluster as forks of one process that has made the imports of all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.forks.command import INTERPRETER, Imports
from azureml_elastic.forks.detached import ForkServer
from azureml_elastic.forks.process import ForkedProcess, ForkRefused
from azureml_elastic.local.node_start import NODE_COMMAND, AgentProcess, NodeStart
from azureml_elastic.local.processes import MARKER
from azureml_elastic.program.command import Program

MARKER_BYTES = 128
"""Space for a node's marker, which the node writes over the server's in the memory that ``/proc`` shows."""

_AGENT = (
    "azureml_elastic.local.forked_node",
    "azureml_elastic.node.__main__",
    "azureml_elastic.node.startup.entry",
    "azureml_elastic.node.agent.agent",
    "azureml_elastic.node.agent.worker_processes",
    "azureml_elastic.node.table.sqlite",
    "azureml_elastic.ipc.tls",
    "azureml_elastic.forks.store_server",
)
"""What agents with a table in a file import, also late and in functions."""

_BECOME_NODE = "azureml_elastic.local.forked_node:become_node"


def start_server(imports: Imports, environ: Mapping[str, str]) -> ForkServer:
    """Start a server whose forks become nodes, with what all agents import."""
    others = {name: value for name, value in environ.items() if name != MARKER}
    of_nodes = dataclasses.replace(imports, modules=(*imports.modules, *_AGENT), at_once=True)
    # The marker comes last: a shorter one ends with zero bytes, behind which readers look for nothing.
    return ForkServer(of_nodes, {**others, MARKER: "-" * MARKER_BYTES})


class ForkStart(NodeStart):
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
        """Fork a node, or start it by its command."""
        if tuple(argv[: len(NODE_COMMAND)]) == NODE_COMMAND:
            arguments = argv[len(NODE_COMMAND) :]
            with open(os.devnull, "rb") as empty:  # noqa: PTH123
                streams = [empty.fileno(), output.fileno(), output.fileno()]
                try:
                    return self.fork(arguments, env=env, streams=streams, network=network, pipe=self._gathering)
                except ForkRefused as refusal:
                    output.write(f"This node is not forked, its command is started: {refusal}.\n".encode())
                    output.flush()
        return super().start(argv, env=env, output=output, network=network)

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
    """Return whether the nodes of a run are forked, as far as its settings decide."""
    return (
        most_nodes > 1  # the imports take as long as those of one node
        and (*program.interpreter_command, "-c") == INTERPRETER  # options apply to an interpreter from its start
        and distribution.preload_workers  # else the program wants its imports made by each worker
        and not distribution.runs_engine  # whose processes are started, not forked
    )


@contextlib.contextmanager
def open_fork_start(program: Program, environ: Mapping[str, str]) -> Iterator[NodeStart]:
    """Yield what forks the nodes of a run from a server of its own."""
    server = start_server(Imports(program), environ)
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
