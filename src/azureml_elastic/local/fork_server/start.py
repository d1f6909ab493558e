"""Start of a local cluster's nodes by forks of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.command.program import Program
from azureml_elastic.local.fork_server.client import COMMAND, ForkRefused, ForkServer, Imports
from azureml_elastic.local.launched_node import shared_environment
from azureml_elastic.local.node_start import NODE_COMMAND, AgentProcess, CommandStart, NodeStart

__all__ = ["ForkStart", "are_forked", "open_fork_start"]

_BECOME_NODE = "azureml_elastic.local.fork_server.node:become_node"


class ForkStart:
    """Forks the nodes that a server can fork, and starts the others by their command, with a line in their output.

    Args:
        server_for: function that returns the server for nodes with an environment.
    """

    def __init__(self, server_for: Callable[[Mapping[str, str]], ForkServer]) -> None:
        self._server_for = server_for
        self._gathering: tuple[int, int] | None = None
        self.refusal: str | None = None
        """Reason why no node can be forked any more, or ``None``."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Wait until the imports are done or have failed, or the condition is true."""
        self._server_for(shared_environment()).wait_ready(stop)

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
            request = {"argv": list(argv[len(NODE_COMMAND) :]), "network": network}
            with _pipe() if self._gathering is None else contextlib.nullcontext(self._gathering) as pipe:
                server = self._server_for(env)
                try:
                    return server.fork(_BECOME_NODE, request, env, [output.fileno(), *pipe])
                except ForkRefused as refusal:
                    self.refusal = server.refusal
                    output.write(f"This node is not forked, its command is started: {refusal}.\n".encode())
                    output.flush()
        return CommandStart().start(argv, env=env, output=output, network=network)


def are_forked(program: Program, distribution: ElasticDistribution, most_nodes: int) -> bool:
    """Return whether the nodes of a run are forked, as far as its settings decide.

    Args:
        program: program of the run.
        distribution: settings of the nodes' processes.
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
    """Yield what forks the nodes of a run from a server of its own.

    Args:
        program: program of the run.
        environ: environment that all nodes have.
    """
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
