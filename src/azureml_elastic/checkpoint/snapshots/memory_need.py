"""Whether the nodes have the memory for snapshots that nobody has asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["RankMemory", "node_short_of_memory"]

_SHARDS = 4
"""Shards in memory for each rank: two buffers of its own, and the present and the next replica of another rank's."""

_SHARE = 0.5
"""Fraction of a node's available memory that snapshots may take: the script's own use may still grow."""


@dataclass(frozen=True)
class RankMemory:
    """The size of a rank's shard and the memory of its node.

    Args:
        node: number of the node.
        shard_bytes: size of this rank's shard.
        available_bytes: memory that the node's processes may still take, with that of snapshots that will be replaced.
    """

    node: int
    shard_bytes: int
    available_bytes: int


def node_short_of_memory(ranks: Iterable[RankMemory]) -> RankMemory | None:
    """Return a node that has no room for snapshots, with all shards of its ranks, ``None`` where all nodes have."""
    nodes: dict[int, RankMemory] = {}
    for rank in ranks:
        known = nodes.get(rank.node, RankMemory(rank.node, 0, rank.available_bytes))
        available = min(known.available_bytes, rank.available_bytes)
        nodes[rank.node] = RankMemory(rank.node, known.shard_bytes + rank.shard_bytes, available)
    short = (node for node in nodes.values() if _SHARDS * node.shard_bytes > _SHARE * node.available_bytes)
    return next(short, None)
