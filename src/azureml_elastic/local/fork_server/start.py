"""Start of a local cluster's nodes by forks of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.command.program import Program
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.local.fork_server.client import COMMAND, ForkedProcess, ForkRefused, ForkServer, Imports
from azureml_elastic.local.node_start import NODE_COMMAND, AgentProcess, CommandStart, NodeStart

__all__ = ["ForkStart", "are_forked", "open_fork_start"]

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
            arguments: arguments of the agent.
            env: environment of the node.
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
