"""How the nodes of a local cluster are started: each by its command, unless a subclass can fork it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Literal

from azureml_elastic.forks.process import ForkedProcess

NODE_COMMAND = (sys.executable, "-m", "azureml_elastic.node")
"""Command that starts a node's agent."""

StartMethod = Literal["fork", "command"]
"""``fork``: nodes are forked from one process that has made the program's imports, where that is possible; ``command``:
each node is started by its command, as on a machine of its own."""

AgentProcess = subprocess.Popen[bytes] | ForkedProcess


class NodeStart:
    """Starts each node by its command."""

    refusal: str | None = None
    """Reason why nodes are started by their command although they were to be forked, or ``None``."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Wait until nodes can be started at once, or the condition is true."""

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nodes are started that take part in the first round together."""
        return contextlib.nullcontext()  # by their command they import for seconds before their first round

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes], network: str | None = None
    ) -> AgentProcess:
        """Start a node as a child of this process, with a session of its own.

        Args:
            network: network namespace of the node; ``None`` for that of this process.
        """
        within = () if network is None else ("ip", "netns", "exec", network)
        return subprocess.Popen(
            [*within, *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
