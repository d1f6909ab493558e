"""A node's assignment in a round, and the status of that round."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from azureml_elastic.node.core.round import Round

__all__ = ["Assignment", "Status"]


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


@dataclass(frozen=True)
class Status:
    """Status of a node's round.

    Args:
        lost: names of members that are gone.
        over: whether the round has ended in the table or its hub is gone, so that the node must join the next one.
        waiting: spares to make room for, once no further one has come for the debounce; only on rank 0's node.
        all_done: whether the workers of all members have succeeded.
        was_given_up: whether the others have gone on without this node, because its process did not run for some time.
    """

    lost: frozenset[str] = frozenset()
    over: bool = False
    waiting: frozenset[str] = frozenset()
    all_done: bool = False
    was_given_up: bool = False

    @property
    def broken(self) -> bool:
        """Whether the workers of this round cannot go on."""
        return self.over or bool(self.lost)
