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

from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.save.local_shard import ShardCopy
from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer
from azureml_elastic.distributed.background_task import BackgroundTask, TaskOutcome
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity

__all__ = ["PeerBuffers", "ReplicationTask", "partners"]

_PIECE_BYTES = 1 << 26


def partners(nodes: Sequence[int]) -> list[int | None]:
    """Return for each rank the rank on another node that holds its replica, ``None`` where there is one node.

    Args:
        nodes: number of the node, by rank.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
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
    """What a rank reports about its shard: its node, an error or the size, and the agent's description of it."""

    node: int
    error: str | None
    nbytes: int
    description: dict[str, Any]


class ReplicationTask(BackgroundTask):
    """The replication of one snapshot.

    Args:
        manifest: manifest of the snapshot, without the files; it is stored behind the shard of rank 0.
        name: file name of this rank's shard in a checkpoint.
        copy: copy of this rank's shard, ``None`` where copying failed.
        error: why copying failed.
        identity: rank of this process.
        buffers: memory for replicas of other ranks' shards.
        control: control group of this thread.
        agent: agent that keeps the memory open.
    """

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        copy: ShardCopy | None,
        error: str | None,
        *,
        identity: WorkerIdentity,
        buffers: PeerBuffers,
        control: ControlGroup,
        agent: Agent,
    ) -> None:
        super().__init__()
        self.manifest = manifest
        self.copy = copy
        self._name = name
        self._error = error
        self._identity = identity
        self._buffers = buffers
        self._control = control
        self._agent = agent

    def work(self) -> TaskOutcome:
        """Exchange the shards and pass them to the agents."""
        offers = self.collective(lambda: self._control.gather(self._offer()))
        failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(offers) if each.error is not None]
        if failed:
            return TaskOutcome("failed", f"copying failed on {len(failed)} ranks: {'; '.join(failed)}")
        assert self.copy is not None
        rank = self._identity.rank
        targets = partners([each.node for each in offers])
        incoming: list[tuple[int, StagingBuffer]] = []
        try:
            sources = [source for source, target in enumerate(targets) if target == rank]
            incoming = [(source, self._buffers.get(at, offers[source].nbytes)) for at, source in enumerate(sources)]
        except OSError as error:
            self._error = f"there is no memory for other nodes' shards: {error}"
        if not self._succeeded():
            return TaskOutcome("failed", self._error or "another rank has no memory for other nodes' shards")
        self.collective(lambda: self._exchange(targets[rank], offers, incoming))
        try:
            self._agent.hold_shard(self.copy.buffer.descriptor, offers[rank].description)
            for source, buffer in incoming:
                self._agent.hold_shard(buffer.descriptor, offers[source].description)
        except ElasticError as error:
            self._error = f"the agent does not hold the shards: {error}"
        if not self._succeeded():
            self._agent.discard_snapshot(self.manifest.directory)
            return TaskOutcome("failed", self._error or "another rank's agent does not hold the shards")
        self._agent.retain_snapshot(self.manifest.directory)
        self._buffers.hold()
        return TaskOutcome("kept")

    def _succeeded(self) -> bool:
        return self.collective(lambda: self._control.all_true(self._error is None))

    def _offer(self) -> _Offer:
        rank, node = self._identity.rank, self._identity.rank - self._identity.local_rank
        if self.copy is None:
            return _Offer(node, self._error or "there is no copy", 0, {})
        description = {
            "folder": self.manifest.directory,
            "file": self._name,
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
        mine = offers[self._identity.rank].nbytes if target is not None else 0
        longest = max([mine, *(offers[rank].nbytes for rank, _ in incoming)])
        group = self._control.group
        for begin in range(0, longest, _PIECE_BYTES):
            transfers = []
            if begin < mine:
                piece = self.copy.buffer.tensor(begin, min(begin + _PIECE_BYTES, mine))
                transfers.append(dist.isend(piece, dst=target, group=group))
            for rank, buffer in incoming:
                if begin < offers[rank].nbytes:
                    piece = buffer.tensor(begin, min(begin + _PIECE_BYTES, offers[rank].nbytes))
                    transfers.append(dist.irecv(piece, src=rank, group=group))
            for transfer in transfers:
                if transfer is not None:
                    transfer.wait()
