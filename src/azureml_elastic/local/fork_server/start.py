"""Start of a local cluster's nodes by forks of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from azureml_elastic.config.command.program import Program
from azureml_elastic.local.fork_server.client import COMMAND, ForkRefused, ForkServer, Imports
from azureml_elastic.local.launched_node import shared_environment
from azureml_elastic.local.node_start import NODE_COMMAND, AgentProcess, CommandStart, NodeStart

__all__ = ["ForkStart", "open_node_start"]

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


@contextlib.contextmanager
def open_node_start(program: Program | None, most_nodes: int, environ: Mapping[str, str]) -> Iterator[NodeStart]:
    """Yield what forks the nodes of a run, if they can be forked and there are several, or else what starts commands.

    Args:
        program: program of the run; ``None`` for one that its nodes do not import early.
        most_nodes: number of nodes that are started together.
        environ: environment that all nodes have.
    """
    # The imports take as long as those of one node; the interpreter's options apply to it from its start.
    if most_nodes == 1 or program is None or (*program.interpreter_command, "-c") != COMMAND:
        yield CommandStart()
        return
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
