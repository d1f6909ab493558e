"""The device mesh of a round: replicas, the shards of each, and tensor parallelism within these.

Ranks are numbered node by node, and the nodes of a replica follow each other, so that the mesh of a round needs no more
than its shape: a replica is a row, and the ranks that compute one layer together are neighbours on a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.errors import UsageError
from azureml_elastic.plurals import counted

__all__ = ["MeshShape"]


@dataclass(frozen=True)
class MeshShape:
    """The shape of a round's mesh.

    Args:
        replicas: number of copies of the model.
        shards: number of parts of each copy.
        tensor: number of ranks that compute the layers of a part together, on the same samples.
    """

    replicas: int
    shards: int
    tensor: int = 1

    @classmethod
    def of(
        cls, ranks_per_node: Sequence[int], nodes_per_replica: int | Literal["all"], tensor_parallel: int = 1
    ) -> MeshShape:
        """Return the shape for the nodes of a round.

        Args:
            ranks_per_node: number of ranks of each node, in the order of ranks.
            nodes_per_replica: number of nodes that hold one copy.
            tensor_parallel: number of ranks that compute layers together.

        Raises:
            UsageError: the ranks cannot be divided so.
        """
        each, world_size = ranks_per_node[0], sum(ranks_per_node)
        if len({*ranks_per_node}) > 1:
            raise UsageError(
                f"run.mesh() needs the same number of workers on each node, but the nodes of this round have "
                f"{', '.join(map(str, ranks_per_node))}. Give a number for process_count_per_instance."
            )
        if tensor_parallel < 1 or each % tensor_parallel:
            raise UsageError(
                f"tensor_parallel={tensor_parallel} does not divide the {counted(each, 'worker')} of a node. Give a "
                "divisor: layers are computed by workers of one node."
            )
        size = world_size if nodes_per_replica == "all" else nodes_per_replica * each
        if world_size % size:
            raise UsageError(
                f"The {counted(world_size, 'worker')} of this round are no whole replicas of {size}: "
                f"nodes_per_replica={nodes_per_replica} of {counted(each, 'worker')} each. Start the run with a number "
                "of nodes that nodes_per_replica divides."
            )
        return cls(world_size // size, size // tensor_parallel, tensor_parallel)

    @property
    def rows(self) -> list[list[int]]:
        """The ranks of each replica."""
        size = self.shards * self.tensor
        return [[*range(begin, begin + size)] for begin in range(0, self.replicas * size, size)]

    @property
    def dimensions(self) -> dict[str, int]:
        """The names and the sizes of the mesh's dimensions; ``tensor`` only where it is used."""
        sizes = {"replicate": self.replicas, "shard": self.shards}
        return {**sizes, "tensor": self.tensor} if self.tensor > 1 else sizes
