"""What a round runs instead of workers: the cluster of an engine.

The first node of a round (rank 0) has the *head*, every node has a *member* that is connected to it, and the program
runs on the first node, with the head's address in its environment. A round that begins with the same first node keeps
the head, the program and all members: nodes come and go without a restart. With another first node, the cluster and
the program are started again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from azureml_elastic.engines.children import Child

__all__ = ["Engine"]


class Engine(Protocol):
    """The cluster of a framework, as one node takes part in it. Not thread-safe."""

    def start_head(self) -> str:
        """Start the head on this node, and return its address once it accepts connections.

        Raises:
            EngineError: it has not started.
        """

    def start_member(self, address: str) -> Child:
        """Start this node's member of the cluster with this head; the one before is gone."""

    def retire_member(self, address: str) -> None:
        """Have the cluster move what this node's member holds to others. Blocks until it is done, or cannot be done."""

    def variables(self, address: str) -> Mapping[str, str]:
        """Return the environment variables by which the program finds the cluster."""

    def check(self) -> None:
        """Raise if the head of this node has ended.

        Raises:
            EngineError: it has ended.
        """

    def stop_head(self) -> None:
        """End the head, if this node has it."""
