"""What a node runs over the rounds of a run, in the place of the workers of one program."""

from __future__ import annotations

from typing import Protocol

from azureml_elastic.engines.round_store import RoundStore
from azureml_elastic.ipc.agent_interface import WorkerIdentity

__all__ = ["Engine"]


class Engine(Protocol):
    """A node's part in what a round runs. Its processes may stay over the rounds. Not thread-safe."""

    def enter(self, place: WorkerIdentity, store: RoundStore) -> None:
        """Take part in another round, with what is left of the one before.

        Args:
            place: the node's place: rank and number of nodes.
            store: store of the round. Once it is gone its methods raise ``RuntimeError``, which may be passed on.

        Raises:
            EngineError: a process of the engine has not started.
        """

    def poll(self) -> int | None:
        """Do what is due now; return the exit code of this node's part once it has ended.

        Raises:
            EngineError: a process of the engine has ended that must not.
        """

    def round_over(self) -> None:
        """Do what the end of the round requires before the next one; blocks for some seconds at most."""

    def leave(self) -> bool:
        """Have the others take over what this node holds, and return whether that is done. Called until it is."""

    def stop(self) -> None:
        """End all processes. May be called at any time, and twice."""
