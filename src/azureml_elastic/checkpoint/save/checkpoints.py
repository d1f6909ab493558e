"""SaveTask and restoring, so that a process killed at any line leaves the last committed checkpoint intact.

Training waits for a copy in memory, and no longer: each rank copies the share of the state that it will write, a thread
writes it (:mod:`azureml_elastic.checkpoint.save.background_save`). Restoring goes the other way: pointer, manifest, every file's checksum,
and only when *all* ranks agree are bytes read into the model. Otherwise all ranks go back together to the manifest's
parent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest, Reference
from azureml_elastic.checkpoint.format.retention import for_good
from azureml_elastic.checkpoint.load.reading import load
from azureml_elastic.checkpoint.load.selection import STALE_SECONDS, CheckpointSelector
from azureml_elastic.checkpoint.save.background_save import (
    LONG_RETRY_SECONDS,
    RETRY_SECONDS,
    SaveTask,
    retry_while_unavailable,
)
from azureml_elastic.checkpoint.save.local_shard import LocalShard, ShardCopy
from azureml_elastic.checkpoint.snapshots.recovery_from_replicas import recover_from_replicas
from azureml_elastic.checkpoint.snapshots.replication import PeerBuffers, ReplicationTask
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.background_task import TaskOutcome
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import CheckpointError, Fenced
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["Checkpoints", "RestoredCheckpoint"]

_LOG = logging.getLogger(__name__)

_FAILURES = 2
"""So many checkpoints in a row that cannot be written are too many: a full disk does not get emptier by itself."""


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What was restored: the reference, and the data's position."""

    reference: Reference
    data: Mapping[str, Any] | None


class Checkpoints:
    """The checkpoints of a run, for one thread. Unless said otherwise, methods are collectives.

    Args:
        policy: of the checkpoints.
        storage: of them.
        world: the ranks.
        agent: that keeps the pointer.
        stale_seconds: for which a mount may be behind what was committed.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        storage: Storage,
        world: ProcessGroups,
        agent: Agent,
        *,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._storage = storage
        self._policy = policy
        self._stale_seconds = stale_seconds
        self._world = world
        self._agent = agent
        self.snapshots = agent.holds_snapshots and (policy.snapshot_every or policy.snapshot_every_steps) is not None
        """Whether copies are kept in memory."""
        self._share = LocalShard(world, spare=self.snapshots)
        self._inbox = PeerBuffers()
        self._committed: Reference | None = None
        self._saving: SaveTask | ReplicationTask | None = None
        self._left: SaveTask | ReplicationTask | None = None
        self._fenced = ""
        self._failures: list[str] = []

    def enter(self) -> None:
        """Save and restore with the ranks of another round from now on. Not a collective."""
        self._left, self._saving = self._saving or self._left, None
        self._share.enter()
        self._failures.clear()
        self._fenced = ""  # that was the former round

    # --- saving ------------------------------------------------------------------------------------------------------

    def prepare(self, state: TrackedState) -> None:
        """Get everything ready that the next save would otherwise wait for."""
        self._share.collect(state)
        if self._saving is None and self._left is None:
            self._share.reserve()

    def begin(
        self, step: int, state: TrackedState, data: Mapping[str, Any] | None, *, must_commit: bool = False
    ) -> None:
        """Begin to take a checkpoint, and return when the state may change again. None may be under way.

        Args:
            step: optimizer steps completed.
            state: to be saved.
            data: the position in the data.
            must_commit: whether no later checkpoint will make up for a table that is away now: worth some retries.

        Raises:
            CheckpointError: a rank cannot say what its state is; raised on all.
        """
        began = time.monotonic()
        plain, tensors = self._ready(state)
        before = None if self._committed is None else self._committed.step
        manifest = self._manifest(step, plain, data, for_good(step, before, self._policy.keep_every))
        copy, error = self._copy(tensors)
        self._saving = SaveTask(
            self._storage,
            manifest,
            self._file,
            None if copy is None or copy.empty else copy.blocks(),
            error,
            control=self._world.background,
            agent=self._agent,
            stall_seconds=time.monotonic() - began,
            keep=self._policy.keep,
            pauses=RETRY_SECONDS if must_commit else (),
        )
        self._saving.start()

    def begin_snapshot(self, step: int, state: TrackedState, data: Mapping[str, Any] | None) -> None:
        """Begin to take a copy that stays in memory, and return when the state may change again.

        Args:
            step: optimizer steps completed.
            state: to be copied.
            data: the position in the data.

        Raises:
            CheckpointError: a rank cannot say what its state is; raised on all.
        """
        plain, tensors = self._ready(state)
        manifest = self._manifest(step, plain, data)
        tail, error = b"", None
        if self._world.identity.rank == 0:
            try:
                tail = manifest.to_bytes()
            except ValueError as failure:  # a state that is no JSON
                error = f"the manifest: {failure}"
        copy, failed = self._copy(tensors, tail)
        self._saving = ReplicationTask(
            manifest,
            self._file,
            None if error else copy,
            error or failed,
            identity=self._world.identity,
            inbox=self._inbox,
            control=self._world.background,
            agent=self._agent,
        )
        self._saving.start()

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and :meth:`settle` was not called since. Not a collective."""
        return self._saving is not None

    def settle(self, timeout: float | None = None) -> TaskOutcome | None:
        """Wait for the save under way, if there is one. Not a collective.

        Args:
            timeout: in seconds; after that the save goes on and may be waited for again.

        Returns:
            What came of it, the same on all ranks; ``None`` where there is none, or it goes on.
        """
        outcome = self._saving.wait(timeout) if self._saving is not None else None
        if self._saving is None or outcome is None:
            return None
        over, self._saving = self._saving, None
        manifest = over.manifest
        if isinstance(over, ReplicationTask):
            self._kept(over, outcome)
            return outcome
        if outcome.kind == "committed":
            self._committed = manifest.reference
            self._failures.clear()
        elif outcome.kind == "fenced":
            self._fenced = f"The checkpoint of step {manifest.step} was not committed: {outcome.text}"
        elif outcome.kind == "failed":
            self._failures.append(f"step {manifest.step}: {outcome.text}")
        if outcome.kind in ("failed", "unavailable") and self._world.identity.rank == 0:
            _LOG.warning(
                "The checkpoint of step %d in %s was not committed: %s Training goes on; the last committed "
                "checkpoint is %s.",
                manifest.step,
                self._storage,
                outcome.text,
                "none" if self._committed is None else self._committed.directory,
            )
        return outcome

    def _kept(self, over: ReplicationTask, outcome: TaskOutcome) -> None:
        if outcome.kind == "kept":
            assert over.copy is not None
            self._share.hold(over.copy)
        elif self._world.identity.rank == 0:
            _LOG.warning("Step %d was not kept in memory: %s Training goes on.", over.manifest.step, outcome.text)

    def _ready(self, state: TrackedState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Collect the state, and wait until nobody reads what is overwritten then. A collective."""
        assert self._saving is None
        plain, tensors = self._share.collect(state)
        if self._left is not None:
            outcome = self._left.wait()
            if isinstance(self._left, ReplicationTask) and outcome is not None and outcome.kind == "kept":
                self._kept(self._left, outcome)  # after all
            self._left = None
        return plain, tensors

    def _copy(self, tensors: dict[str, torch.Tensor], tail: bytes = b"") -> tuple[ShardCopy | None, str | None]:
        try:
            return self._share.copy(tensors, tail), None
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for this one
            return None, f"{type(failure).__name__}: {failure}"

    def _manifest(
        self, step: int, plain: Mapping[str, Any], data: Mapping[str, Any] | None, kept: bool = False
    ) -> Manifest:
        identity = self._world.identity
        return Manifest(
            directory=str(FolderName(step, identity.round, self._share.nonce(), kept)),
            step=step,
            round=identity.round,
            world_size=identity.world_size,
            parent=self._committed,
            files={},
            state=plain,
            data=data,
            torch=str(torch.__version__),
        )

    @property
    def _file(self) -> str:
        return f"rank-{self._world.identity.rank:05}.safetensors"

    def require(self, *, at_once: bool = False) -> None:
        """Check that checkpoints can be written. Not a collective, but the same on all ranks after the same saves.

        Args:
            at_once: also that the last one was; otherwise one may fail.

        Raises:
            CheckpointError: a rank could not write; the last committed checkpoint stays.
            Fenced: a newer round has taken over.
        """
        if self._fenced:
            raise Fenced(self._fenced)
        if len(self._failures) >= (1 if at_once else _FAILURES):
            raise CheckpointError(f"Checkpoints could not be written to {self._storage}: {'; '.join(self._failures)}")

    def let_go(self) -> None:
        """Have nothing to do with the process group any more: it was aborted. Not a collective."""
        if self._saving is not None:
            self._saving.abandon()

    # --- restoring ---------------------------------------------------------------------------------------------------

    def committed(self) -> Reference | None:
        """Return the run's newest committed checkpoint.

        Raises:
            CheckpointError: it could not be learnt.
            Fenced: a newer round has taken over.
        """
        self._committed = self._pointer()
        return self._committed

    def restore(self, state: TrackedState) -> RestoredCheckpoint | None:
        """Put the newest undamaged checkpoint into ``state``: from memory, from the committed one backwards.

        Returns:
            What was restored, ``None`` where the run has no committed checkpoint yet.

        Raises:
            CheckpointDamaged: there is a pointer, but no checkpoint is whole.
            CheckpointError: the pointer could not be learnt, or a rank could not read.
            Fenced: a newer round has taken over.
            UsageError: the checkpoint does not fit what is tracked.
        """
        pointer = self._committed or self.committed()
        control = self._world.control
        if self.snapshots:
            pointer = self._rescue(pointer) or pointer
        if pointer is None:
            return None
        manifest = CheckpointSelector(self._storage, control, self._stale_seconds, self._agent.damaged).newest_whole(
            pointer
        )
        present = state.targets(manifest.state)
        own = random_state.tensor_name(control.rank)
        tensors = load(
            self._storage,
            manifest,
            present,
            control,
            lambda name: name == own or (not random_state.is_tensor_name(name) and state.wants(name)),
        )
        state.restore(manifest.state, tensors)
        if own in tensors:
            random_state.restore(tensors[own], self._world.device)
        else:
            random_state.begin(manifest.digest, control.rank)
        self._committed = manifest.reference
        return RestoredCheckpoint(manifest.reference, manifest.data)

    def _rescue(self, pointer: Reference | None) -> Reference | None:
        world = self._world
        return recover_from_replicas(self._storage, world.control, self._agent, world.identity, pointer, self._policy)

    def _pointer(self) -> Reference | None:
        asked: Any = (None, (None, ""))
        if self._world.control.rank == 0:
            asked = retry_while_unavailable(self._agent.pointer, LONG_RETRY_SECONDS)
        pointer, (kind, text) = self._world.control.from_main(asked)
        if kind == "fenced":
            raise Fenced(f"Training does not start: {text}")
        if kind is not None:
            raise CheckpointError(f"Whether there is a checkpoint to start from could not be learnt: {text}")
        found: Reference | None = pointer
        return found
