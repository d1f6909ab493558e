"""The ranks of Horovod's workers, from the numbers of workers of the nodes in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

__all__ = ["Slot", "slots_of"]


@dataclass(frozen=True)
class Slot:
    """Place of one worker, as Horovod names it.

    Args:
        rank: rank among all workers.
        size: number of workers.
        local_rank: rank among the workers of its node.
        local_size: number of workers of its node.
        cross_rank: rank among the workers of all nodes that have the same local rank.
        cross_size: number of these.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which a new worker finds its place."""
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(self).items()}

    def response(self) -> bytes:
        """Return what a worker that asks for another place is answered."""
        return ",".join(map(str, astuple(self))).encode()


def slots_of(node: int, counts: Sequence[int]) -> list[Slot]:
    """Return the slots of one node.

    Args:
        node: index of the node.
        counts: number of workers of each node.
    """
    first = sum(counts[:node])
    return [
        Slot(
            first + local_rank,
            sum(counts),
            local_rank,
            counts[node],
            sum(count > local_rank for count in counts[:node]),
            sum(count > local_rank for count in counts),
        )
        for local_rank in range(counts[node])
    ]
