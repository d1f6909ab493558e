"""A node's place in a round, and what it knows about that round."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from azureml_elastic.node.rendezvous.state.round import Round

__all__ = ["Assignment", "Status"]


@dataclass(frozen=True)
class Assignment:
    """A node's place in a sealed round.

    Args:
        round: the sealed round.
        rank: of this node within it.
        listener: rank 0 only: the listening socket on which it must serve the round's store.
    """

    round: Round
    rank: int
    listener: socket.socket | None

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the round's store."""
        first = self.round.members[0]
        return first.host, first.store_port


@dataclass(frozen=True)
class Status:
    """What this node knows about the round that it is in.

    Args:
        lost: members known to be gone.
        over: the round has ended in the table, or its hub is gone: whoever sees this must join the next one.
        waiting: on rank 0's node, nodes outside that want in, once they have waited for the debounce.
        all_done: all members' workers have ended well.
    """

    lost: frozenset[str] = frozenset()
    over: bool = False
    waiting: frozenset[str] = frozenset()
    all_done: bool = False

    @property
    def broken(self) -> bool:
        """Whether the workers of this round cannot go on."""
        return self.over or bool(self.lost)
