"""Replication of snapshots: each rank's shard is held by the agents of two nodes.

Each rank copies its shard as for a checkpoint, but does not write it to storage. The node's agent keeps the memory open
for the next worker, and sends it, encrypted, to the agent of another node, for the case that this node is lost. The
previous snapshot is released once every shard has both copies. Where both copies of a shard are lost, the committed
checkpoint counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from typing_extensions import override

from azureml_elastic.checkpoint.save.background_save import BackgroundTask, TaskOutcome
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.shards import ShardDescription
from azureml_elastic.ipc.worker_messages import DiscardSnapshot, RetainSnapshot
from azureml_elastic.plurals import counted

__all__ = ["ReplicationTask", "partners"]


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


@dataclass(frozen=True)
class _Copied:
    """A rank's report about its shard: its node, and an error or ``None``."""

    node: int
    error: str | None


@dataclass(eq=False)
class ReplicationTask(BackgroundTask):
    """The replication of one snapshot; its manifest is stored behind the shard of rank 0.

    Args:
        identity: rank of this process.
    """

    identity: WorkerIdentity

    @override
    def work(self) -> TaskOutcome:
        copied = self.collective(lambda: self.control.gather(self._copied()))
        failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(copied) if each.error is not None]
        if failed:
            return TaskOutcome("failed", f"copying failed on {counted(len(failed), 'rank')}: {'; '.join(failed)}")
        try:
            self._hold(partners([each.node for each in copied])[self.identity.rank])
        except ElasticError as error:
            self.error = str(error)
        if not self.collective(lambda: self.control.all_true(self.error is None)):
            self.agent.report(DiscardSnapshot(self.manifest.directory))
            return TaskOutcome("failed", self.error or "another rank's shard is not held by two nodes")
        self.agent.report(RetainSnapshot(self.manifest.directory))
        return TaskOutcome("kept")

    def _copied(self) -> _Copied:
        node = self.identity.rank - self.identity.local_rank
        return _Copied(node, None if self.copy is not None else self.error or "there is no copy")

    def _hold(self, partner: int | None) -> None:
        """Have this node's agent hold the shard, and then that of the partner.

        Raises:
            ElasticError: one of them does not.
        """
        assert self.copy is not None
        shard = ShardDescription(
            folder=self.manifest.directory,
            file=self.file,
            step=self.manifest.step,
            world_size=self.manifest.world_size,
            rank=self.identity.rank,
            size=self.copy.nbytes,
            tail=self.copy.tail,
            xxh3=xxhash.xxh3_128_hexdigest(self.copy.buffer.view(0, self.copy.nbytes)),
        )
        self.agent.hold_shard(self.copy.buffer.descriptor, shard)
        if partner is not None:
            self.agent.replicate_shard(shard, partner)
