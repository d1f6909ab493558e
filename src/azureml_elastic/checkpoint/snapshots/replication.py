"""Replication of snapshots, each rank's shard by the agents of two nodes, and recovery from the replicas.

Each rank copies its shard as for a checkpoint, but does not write it to storage. The node's agent keeps the memory open
for the next worker, and sends it, encrypted, to the agent of another node, for the case that this node is lost. The
previous snapshot is released once every shard has both copies. Where both copies of a shard are lost, the committed
checkpoint counts.

**Recovery** of a snapshot that is newer than the committed checkpoint, from the memory of the remaining nodes: it is
written to storage and committed first, so that it cannot be lost again, and then restored like any
other checkpoint. Each shard is written once, by a node that holds it. Memory may be torn, where a worker died while it
copied: what was written must have the checksum of the copy. Otherwise another node's replica or an older snapshot is
taken.
"""

from __future__ import annotations

import logging
import mmap
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from typing_extensions import override

from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest, for_good
from azureml_elastic.checkpoint.load.offers import Offer, deal_out
from azureml_elastic.checkpoint.save.background_save import BackgroundTask, TaskOutcome, discard
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, ElasticError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ipc.worker_messages import DiscardSnapshot, RetainSnapshot
from azureml_elastic.plurals import counted

_SHARDS = 4
"""Shards in memory for each rank: two buffers of its own, and the present and the next replica of another rank's."""

_SHARE = 0.5
"""Fraction of a node's available memory that snapshots may take: the script's own use may still grow."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankMemory:
    """The size of a rank's shard and the memory of its node, including that of snapshots that will be replaced."""

    node: int
    shard_bytes: int
    available_bytes: int


def node_short_of_memory(ranks: Iterable[RankMemory]) -> RankMemory | None:
    """Return a node that has no room for snapshots, with all shards of its ranks, ``None`` where all nodes have."""
    nodes: dict[int, RankMemory] = {}
    for rank in ranks:
        known = nodes.get(rank.node, RankMemory(rank.node, 0, rank.available_bytes))
        available = min(known.available_bytes, rank.available_bytes)  # all of a node look at the same memory
        nodes[rank.node] = RankMemory(rank.node, known.shard_bytes + rank.shard_bytes, available)
    short = (node for node in nodes.values() if _SHARDS * node.shard_bytes > _SHARE * node.available_bytes)
    return next(short, None)


def partners(nodes: Sequence[int]) -> list[int | None]:
    """Return for each rank the rank on another node that holds its replica, ``None`` where there is one node.

    ``nodes`` has the number of the node of each rank.
    """
    # The next node in a ring, so that each one holds the replicas of one other, whatever the number of nodes.
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
    order = list(members)
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        others = members[order[(order.index(node) + 1) % len(order)]]
        found.append(others[members[node].index(rank) % len(others)] if len(order) > 1 else None)
    return found


@dataclass(eq=False)
class ReplicationTask(BackgroundTask):
    """The replication of one snapshot; its manifest is stored behind the shard of rank 0."""

    identity: WorkerIdentity

    @override
    def work(self) -> TaskOutcome:
        own = self.identity.rank - self.identity.local_rank, self.error
        copied = self.collective(lambda: self.control.gather(own))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(copied) if error is not None]
        if failed:
            return TaskOutcome("failed", f"copying failed on {counted(len(failed), 'rank')}: {'; '.join(failed)}")
        try:
            self._hold(partners([node for node, _ in copied])[self.identity.rank])
        except ElasticError as error:
            self.error = str(error)
        # Before all shards have both copies, the previous snapshot is the only one that survives a loss.
        if not self.collective(lambda: self.control.all_true(self.error is None)):
            self.agent.report(DiscardSnapshot(self.manifest.directory))
            return TaskOutcome("failed", self.error or "another rank's shard is not held by two nodes")
        self.agent.report(RetainSnapshot(self.manifest.directory))
        return TaskOutcome("kept")

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
        self.agent.hold_shard(self.copy.buffer.descriptor, shard)  # from which it is sent to the partner
        if partner is not None:
            self.agent.replicate_shard(shard, partner)


def write_snapshot(
    storage: Storage,
    control: ControlGroup,
    identity: WorkerIdentity,
    committed: Reference | None,
    policy: CheckpointPolicy,
    chosen: Sequence[Offer],
) -> Manifest | list[Offer] | None:
    """Write a snapshot in memory to storage, each shard once by a rank that holds it. A collective.

    Returns:
        The manifest of the checkpoint, which is neither published nor committed; the copies that are damaged; ``None``
        where nothing can be written.
    """
    shards, step, before = deal_out(chosen), chosen[0].step, 0 if committed is None else committed.step
    name = FolderName(
        step, identity.round, control.from_main(secrets.token_hex(4)), for_good(step, before, policy.keep_every_steps)
    )
    try:
        parts = control.together("Writing a snapshot to storage", lambda: _write(storage, str(name), shards, control))
    except CheckpointError as error:
        # The committed checkpoint can still be read where nothing can be written.
        if control.rank == 0:
            _LOG.warning("The snapshot of step %d in memory cannot be saved: %s", step, error)
            discard(storage, str(name), str(error))
        return None
    if damaged := [each for _, bad in parts for each in bad]:
        if control.rank == 0:
            _LOG.warning("%d shards of the snapshot of step %d are damaged.", len(damaged), step)
            discard(storage, str(name), "damaged")
        return damaged
    manifest = next(part for part, _ in parts if part is not None)
    files = {shard.file: FileSum(shard.size, shard.xxh3) for each in shards if (shard := each.shard) is not None}
    return replace(manifest, directory=str(name), round=identity.round, parent=committed, files=files)


def _write(
    storage: Storage, folder: str, shards: Iterable[Offer], control: ControlGroup
) -> tuple[Manifest | None, list[Offer]]:
    """Write the shards of this rank; return the manifest, where it is here, and the damaged ones."""
    manifest, bad = None, []
    for offer in shards:
        if offer.holder != control.rank or (shard := offer.shard) is None:
            continue
        try:
            with Path(shard.path).open("rb", buffering=0) as stream:
                memory = mmap.mmap(stream.fileno(), shard.size + shard.tail, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            _LOG.warning("The memory %s cannot be read: %s", shard.path, error)
            bad.append(offer)
            continue
        with memoryview(memory) as view:
            try:
                if shard.tail:
                    manifest = Manifest.from_bytes(bytes(view[shard.size :]), shard.path)
                storage.make(folder)
                if storage.write(folder, shard.file, [view[: shard.size]]).xxh3 != shard.xxh3:
                    bad.append(offer)
            except CheckpointDamaged as error:
                _LOG.warning("%s", error)
                bad.append(offer)
    return manifest, bad
