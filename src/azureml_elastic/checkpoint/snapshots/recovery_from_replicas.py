"""A copy of the state that is newer than the committed checkpoint, in the memory of the nodes that are left.

It is written to storage and committed before anything else happens, so that it cannot be lost a second time; then it is
restored like any other checkpoint. Each share is written once, by a node that has it. What memory holds may be torn (a
worker died while it copied): the checksum of what was written must be that of what was copied. Otherwise another node's
copy is taken, or an older one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, FolderName, Manifest, Reference
from azureml_elastic.checkpoint.format.retention import for_good, retire
from azureml_elastic.checkpoint.save.background_save import LONG_RETRY_SECONDS, retry_while_unavailable
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, Fenced
from azureml_elastic.ipc.agent_interface import Agent, Identity

__all__ = ["ReplicaShard", "recover_from_replicas", "sources"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaShard:
    """A share in a node's memory.

    Args:
        holder: the rank that can read it.
        folder: names the copy of the state that it belongs to.
        file: that it would be.
        step: optimizer steps completed.
        world_size: of the round that has made the copy: so many shares there are.
        rank: whose share it is.
        size: of the file, in bytes.
        tail: bytes behind it: the manifest, with rank 0's share.
        xxh3: checksum of the file.
        path: of the memory, on the holder's node.
    """

    holder: int
    folder: str
    file: str
    step: int
    world_size: int
    rank: int
    size: int
    tail: int
    xxh3: str
    path: str

    @classmethod
    def of(cls, holder: int, description: Mapping[str, Any]) -> ReplicaShard:
        """Read what the agent tells."""
        return cls(holder=holder, **description)


def sources(held: Sequence[ReplicaShard], newer_than: int) -> list[ReplicaShard] | None:
    """Choose the newest copy of which every share is there, and who writes which of them.

    Args:
        held: by all nodes.
        newer_than: steps that the committed checkpoint has.

    Returns:
        One holder for each share, by rank, those with little to write first; ``None`` where there is no such copy.
    """
    copies: dict[str, dict[int, list[ReplicaShard]]] = {}
    for each in held:
        if each.step > newer_than:
            copies.setdefault(each.folder, {}).setdefault(each.rank, []).append(each)
    whole = [shares for shares in copies.values() if len(shares) == next(iter(shares.values()))[0].world_size]
    if not whole:
        return None
    newest = max(whole, key=lambda shares: (shares[0][0].step, shares[0][0].folder))
    load: dict[int, int] = {}
    chosen = []
    for rank in sorted(newest):
        share = min(newest[rank], key=lambda each: (load.get(each.holder, 0), each.holder))
        load[share.holder] = load.get(share.holder, 0) + share.size
        chosen.append(share)
    return chosen


def recover_from_replicas(
    storage: Storage,
    control: ControlGroup,
    agent: Agent,
    identity: Identity,
    committed: Reference | None,
    policy: CheckpointPolicy,
) -> Reference | None:
    """Commit the newest whole copy in memory, if it is newer than the committed checkpoint. A collective.

    Returns:
        What was committed, ``None`` where nothing newer is there, or where it cannot be written.

    Raises:
        CheckpointError: it could not be committed.
        Fenced: a newer round has taken over.
    """
    mine = [ReplicaShard.of(control.rank, each) for each in agent.held_shards()] if identity.local_rank == 0 else []
    held = [each for part in control.gather(mine) for each in part]
    while True:
        chosen = sources(held, -1 if committed is None else committed.step)
        if chosen is None:
            return None
        step, before = chosen[0].step, None if committed is None else committed.step
        kept = for_good(step, before, policy.keep_every)
        name = FolderName(step, identity.round, control.from_main(secrets.token_hex(4)), kept)
        write = functools.partial(_write, storage, str(name), chosen, control.rank)
        try:
            parts = control.together("Writing what is in memory", write)
        except CheckpointError as error:
            if control.rank == 0:
                _LOG.warning("Step %d is in memory, but not to be saved from there: %s", step, error)
                _remove(storage, str(name))
            return None
        found = [part for part, _ in parts if part is not None]
        bad = {each for _, damaged in parts for each in damaged}
        if not bad:
            break
        if control.rank == 0:
            _LOG.warning("What memory holds of step %d is damaged in %d places.", step, len(bad))
            _remove(storage, str(name))
        held = [each for each in held if each not in bad]
    files = {each.file: FileSum(each.size, each.xxh3) for each in chosen}
    manifest = replace(found[0], directory=str(name), round=identity.round, parent=committed, files=files)
    outcome: tuple[Any, str] | None = None
    if control.rank == 0:
        outcome = _commit(storage, agent, manifest, policy.keep)
    kind, text = control.from_main(outcome)
    if kind == "fenced":
        raise Fenced(f"Training does not start: {text}")
    if kind is not None:
        raise CheckpointError(f"The state of step {manifest.step} in memory could not be committed: {text}")
    if control.rank == 0:
        _LOG.warning("Step %d was in memory alone; it is committed as %s.", manifest.step, manifest.directory)
    return manifest.reference


def _write(
    storage: Storage, folder: str, chosen: Sequence[ReplicaShard], holder: int
) -> tuple[Manifest | None, list[ReplicaShard]]:
    """Write this rank's part; return the manifest, where it is here, and what is damaged."""
    manifest, bad = None, []
    for each in chosen:
        if each.holder != holder:
            continue
        try:
            descriptor = os.open(each.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(descriptor, each.size + each.tail, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
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


def _remove(storage: Storage, folder: str) -> None:
    """Leave nothing of an attempt: the space may be what is missing."""
    with contextlib.suppress(OSError):
        storage.remove(folder, MANIFEST)


def _commit(storage: Storage, agent: Agent, manifest: Manifest, keep: int) -> tuple[Any, str]:
    try:
        storage.publish(manifest.directory, MANIFEST, manifest.to_bytes())
        _, outcome = retry_while_unavailable(lambda: agent.commit(manifest.reference, 0.0), LONG_RETRY_SECONDS)
    except OSError as error:
        _remove(storage, manifest.directory)
        return "failed", str(error)
    if outcome[0] is None:
        try:
            storage.write(manifest.directory, COMMITTED, [])
            retire(storage, manifest, keep)
        except OSError as error:  # it is committed all the same
            _LOG.warning("Old checkpoints in %s could not be removed: %s", storage, error)
    return outcome
