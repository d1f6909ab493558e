"""Recovery of a snapshot that is newer than the committed checkpoint, from the memory of the remaining nodes.

The snapshot is written to storage and committed first, so that it cannot be lost again, and then restored like any
other checkpoint. Each shard is written once, by a node that holds it. Memory may be torn, where a worker died while it
copied: what was written must have the checksum of the copy. Otherwise another node's replica or an older snapshot is
taken.
"""

from __future__ import annotations

import functools
import logging
import mmap
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest
from azureml_elastic.checkpoint.format.retention import for_good
from azureml_elastic.checkpoint.save.background_save import (
    LONG_RETRY_SECONDS,
    TaskOutcome,
    commit,
    discard,
    remove_older,
)
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, Fenced
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.ipc.shards import HeldShard

__all__ = ["ReplicaShard", "choose_replicas", "gather_replicas", "recover_from_replicas"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaShard(HeldShard):
    """A shard of a snapshot that a node holds.

    Args:
        holder: rank that can read it.
    """

    holder: int


def choose_replicas(held: Sequence[ReplicaShard], newer_than: int) -> list[ReplicaShard] | None:
    """Choose the newest complete snapshot after a step, and the holder that writes each of its shards.

    Returns:
        One replica of each shard, by rank, from the holders with the least to write; ``None`` where no newer snapshot
        is complete.
    """
    snapshots: defaultdict[str, defaultdict[int, list[ReplicaShard]]] = defaultdict(lambda: defaultdict(list))
    for each in held:
        if each.step > newer_than:
            snapshots[each.folder][each.rank].append(each)
    complete = [shards for shards in snapshots.values() if len(shards) == next(iter(shards.values()))[0].world_size]
    if not complete:
        return None
    newest = max(complete, key=lambda shards: (shards[0][0].step, shards[0][0].folder))
    load: Counter[int] = Counter()
    chosen = []
    for rank in sorted(newest):
        shard = min(newest[rank], key=lambda each: (load[each.holder], each.holder))
        load[shard.holder] += shard.size
        chosen.append(shard)
    return chosen


def gather_replicas(control: ControlGroup, agent: Agent, identity: WorkerIdentity) -> list[ReplicaShard]:
    """Return the shards of snapshots that all nodes hold. A collective."""
    own = agent.held_shards() if identity.local_rank == 0 else []
    mine = [ReplicaShard(**asdict(each), holder=control.rank) for each in own]
    return [each for part in control.gather(mine) for each in part]


def recover_from_replicas(
    storage: Storage,
    control: ControlGroup,
    agent: Agent,
    identity: WorkerIdentity,
    committed: Reference | None,
    policy: CheckpointPolicy,
    *,
    pauses: tuple[float, ...] = LONG_RETRY_SECONDS,
) -> Reference | None:
    """Commit the newest complete snapshot in memory, if it is newer than the committed checkpoint. A collective.

    Returns:
        The new checkpoint, ``None`` where no snapshot is newer or it cannot be written.

    Raises:
        CheckpointError: it could not be committed.
        Fenced: a newer round has taken over.
    """
    held = gather_replicas(control, agent, identity)
    before = -1 if committed is None else committed.step
    while True:
        chosen = choose_replicas(held, before)
        if chosen is None:
            return None
        step = chosen[0].step
        kept = for_good(step, max(before, 0), policy.keep_every_steps)
        name = FolderName(step, identity.round, control.from_main(secrets.token_hex(4)), kept)
        write = functools.partial(_write, storage, str(name), chosen, control.rank)
        try:
            parts = control.together("Writing a snapshot to storage", write)
        except CheckpointError as error:
            if control.rank == 0:
                _LOG.warning("The snapshot of step %d in memory cannot be saved: %s", step, error)
                discard(storage, str(name), str(error))
            return None
        manifests = [part for part, _ in parts if part is not None]
        bad = {each for _, damaged in parts for each in damaged}
        if not bad:
            break
        if control.rank == 0:
            _LOG.warning("%d shards of the snapshot of step %d are damaged.", len(bad), step)
            discard(storage, str(name), "damaged")
        held = [each for each in held if each not in bad]
    files = {each.file: FileSum(each.size, each.xxh3) for each in chosen}
    manifest = replace(manifests[0], directory=str(name), round=identity.round, parent=committed, files=files)
    outcome: TaskOutcome | None = None
    if control.rank == 0:
        outcome = commit(storage, agent, manifest, stall_seconds=0.0, pauses=pauses)
        if outcome.kind == "committed":
            remove_older(storage, manifest, policy.keep)
    outcome = control.from_main(outcome)
    if outcome.kind == "fenced":
        raise Fenced(f"Training does not start: {outcome.text}")
    if outcome.kind != "committed":
        raise CheckpointError(f"The snapshot of step {step} in memory could not be committed: {outcome.text}")
    if control.rank == 0:
        _LOG.warning("The snapshot of step %d in memory is committed as %s.", step, manifest.directory)
    return manifest.reference


def _write(
    storage: Storage, folder: str, chosen: Sequence[ReplicaShard], holder: int
) -> tuple[Manifest | None, list[ReplicaShard]]:
    """Write the shards of this holder; return the manifest, where it is here, and the damaged shards."""
    manifest, bad = None, []
    for each in chosen:
        if each.holder != holder:
            continue
        try:
            with Path(each.path).open("rb", buffering=0) as stream:
                memory = mmap.mmap(stream.fileno(), each.size + each.tail, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            _LOG.warning("The memory %s cannot be read: %s", each.path, error)
            bad.append(each)
            continue
        with memoryview(memory) as view:
            try:
                if each.tail:
                    manifest = Manifest.from_bytes(bytes(view[each.size :]), each.path)
                storage.make(folder)
                if storage.write(folder, each.file, [view[: each.size]]).xxh3 != each.xxh3:
                    bad.append(each)
            except CheckpointDamaged as error:
                _LOG.warning("%s", error)
                bad.append(each)
    return manifest, bad
