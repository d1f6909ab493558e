"""A node's assignment in a round."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from azureml_elastic.node.core.round import Round

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """A node's rank in a sealed round.

    Args:
        round: sealed round.
        rank: rank of the node in it.
        listener: listening socket on which rank 0 must serve the round's store; ``None`` on other ranks.
    """

    round: Round
    rank: int
    listener: socket.socket | None

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the round's store."""
        first = self.round.members[0]
        return first.host, first.store_port

    @property
    def global_ranks(self) -> range:
        """Global ranks of the node's workers."""
        first = sum(member.slots for member in self.round.members[: self.rank])
        return range(first, first + self.round.members[self.rank].slots)
