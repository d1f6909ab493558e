"""Replication of snapshots: each rank's shard is held by the agents of two nodes.

Each rank copies its shard as for a checkpoint, but does not write it to storage. The node's agent keeps the memory open
for the next worker, and a rank on another node receives a replica, for the case that this node is lost. The previous
snapshot is released once every shard has both copies. Where both copies of a shard are lost, the committed checkpoint
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from typing_extensions import override

from azureml_elastic.checkpoint.save.background_task import BackgroundTask, TaskOutcome
from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import WorkerIdentity

__all__ = ["PeerBuffers", "ReplicationTask", "partners"]

_PIECE_BYTES = 1 << 26


def partners(nodes: Sequence[int]) -> list[int | None]:
    """Return for each rank the rank on another node that holds its replica, ``None`` where there is one node.

    ``nodes`` has the number of the node of each rank.
    """
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
    order = list(members)
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        others = members[order[(order.index(node) + 1) % len(order)]]
        found.append(others[members[node].index(rank) % len(others)] if len(order) > 1 else None)
    return found


class PeerBuffers:
    """Memory for replicas of other ranks' shards: one set for the last complete snapshot, one for the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], StagingBuffer] = {}
        self._turn = 0

    def get(self, number: int, nbytes: int) -> StagingBuffer:
        """Return the buffer for the next replica of the rank with this number.

        Raises:
            OSError: there is not enough memory.
        """
        buffer = self._buffers.setdefault((self._turn, number), StagingBuffer(torch.device("cpu")))
        buffer.reserve(nbytes)
        return buffer

    def hold(self) -> None:
        """Preserve the replicas received last until others are held."""
        self._turn = 1 - self._turn


@dataclass(frozen=True)
class _Offer:
    """A rank's report about its shard: its node, an error or the size, and the description for the agent."""

    node: int
    error: str | None
    nbytes: int
    description: dict[str, Any]


@dataclass(eq=False)
class ReplicationTask(BackgroundTask):
    """The replication of one snapshot; its manifest is stored behind the shard of rank 0.

    Args:
        identity: rank of this process.
        buffers: memory for replicas of other ranks' shards.
    """

    identity: WorkerIdentity
    buffers: PeerBuffers

    @override
    def work(self) -> TaskOutcome:
        offers = self.collective(lambda: self.control.gather(self._offer()))
        failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(offers) if each.error is not None]
        if failed:
            return TaskOutcome("failed", f"copying failed on {len(failed)} ranks: {'; '.join(failed)}")
        assert self.copy is not None
        rank = self.identity.rank
        targets = partners([each.node for each in offers])
        incoming: list[tuple[int, StagingBuffer]] = []
        try:
            sources = [source for source, target in enumerate(targets) if target == rank]
            incoming = [(source, self.buffers.get(at, offers[source].nbytes)) for at, source in enumerate(sources)]
        except OSError as error:
            self.error = f"there is no memory for other nodes' shards: {error}"
        if not self._succeeded():
            return TaskOutcome("failed", self.error or "another rank has no memory for other nodes' shards")
        self.collective(lambda: self._exchange(targets[rank], offers, incoming))
        try:
            self.agent.hold_shard(self.copy.buffer.descriptor, offers[rank].description)
            for source, buffer in incoming:
                self.agent.hold_shard(buffer.descriptor, offers[source].description)
        except ElasticError as error:
            self.error = f"the agent does not hold the shards: {error}"
        if not self._succeeded():
            self.agent.discard_snapshot(self.manifest.directory)
            return TaskOutcome("failed", self.error or "another rank's agent does not hold the shards")
        self.agent.retain_snapshot(self.manifest.directory)
        self.buffers.hold()
        return TaskOutcome("kept")

    def _succeeded(self) -> bool:
        return self.collective(lambda: self.control.all_true(self.error is None))

    def _offer(self) -> _Offer:
        rank, node = self.identity.rank, self.identity.rank - self.identity.local_rank
        if self.copy is None:
            return _Offer(node, self.error or "there is no copy", 0, {})
        description = {
            "folder": self.manifest.directory,
            "file": self.file,
            "step": self.manifest.step,
            "world_size": self.manifest.world_size,
            "rank": rank,
            "size": self.copy.nbytes,
            "tail": self.copy.tail,
            "xxh3": xxhash.xxh3_128_hexdigest(self.copy.buffer.view(0, self.copy.nbytes)),
        }
        return _Offer(node, None, self.copy.nbytes + self.copy.tail, description)

    def _exchange(
        self, target: int | None, offers: Sequence[_Offer], incoming: Sequence[tuple[int, StagingBuffer]]
    ) -> None:
        """Send this rank's shard and receive those of others, piece by piece."""
        assert self.copy is not None
        mine = offers[self.identity.rank].nbytes if target is not None else 0
        longest = max([mine, *(offers[rank].nbytes for rank, _ in incoming)])
        group = self.control.group
        for begin in range(0, longest, _PIECE_BYTES):
            transfers = []
            if begin < mine:
                piece = self.copy.buffer.tensor(begin, min(begin + _PIECE_BYTES, mine))
                transfers.append(dist.isend(piece, dst=target, group=group))
            for rank, buffer in incoming:
                if begin < offers[rank].nbytes:
                    piece = buffer.tensor(begin, min(begin + _PIECE_BYTES, offers[rank].nbytes))
                    transfers.append(dist.irecv(piece, src=rank, group=group))
            for transfer in filter(None, transfers):
                transfer.wait()
