"""Saving and restoring, so that a process killed at any line leaves the last committed checkpoint intact.

Training waits for a copy in memory only: each rank copies the shard that it will write, and a thread writes it
(:mod:`~azureml_elastic.checkpoint.save.background_save`). Restoring reads the pointer, the manifest and every file's
checksum; bytes are read into the model only once *all* ranks have verified theirs. Otherwise all ranks fall back to the
manifest's parent.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from azureml_elastic.checkpoint.format.catalogue import find_newest
from azureml_elastic.checkpoint.format.manifest import FolderName, Manifest, for_good
from azureml_elastic.checkpoint.load.offers import Kind, Offer, choose
from azureml_elastic.checkpoint.load.reading import load
from azureml_elastic.checkpoint.load.selection import (
    STALE_SECONDS,
    CheckpointSelector,
    EarlierCheckpoint,
    adopt_handed_over,
)
from azureml_elastic.checkpoint.save.background_save import (
    LONG_RETRY_SECONDS,
    RETRY_SECONDS,
    BackgroundTask,
    SaveTask,
    TaskOutcome,
    commit_before_restore,
    retry_while_unavailable,
)
from azureml_elastic.checkpoint.save.local_shard import LocalShard, ShardCopy
from azureml_elastic.checkpoint.snapshots.copies import Copy, MemorySource, open_copies, open_source
from azureml_elastic.checkpoint.snapshots.replication import (
    RankMemory,
    ReplicationTask,
    node_short_of_memory,
    write_snapshot,
)
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.locations import is_remote
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, Fenced, MissingExtra
from azureml_elastic.ipc.agent_interface import Agent, HeldCopies
from azureml_elastic.memory import available_memory

_LOG = logging.getLogger(__name__)

_FAILURES = 2
"""Number of failed checkpoints in a row that ends the run: a full disk does not recover by itself."""


@dataclass(frozen=True)
class StoredSource:
    """A whole checkpoint on a storage."""

    storage: Storage
    manifest: Manifest

    @property
    def state(self) -> Mapping[str, Any]:
        """The tracked state without tensors."""
        return self.manifest.state


class Checkpoints:
    """The checkpoints of a run. For one thread; methods are collectives unless their docstring denies it.

    Args:
        policy: when to save, and what to keep.
        stale_seconds: time limit for a mount to show what was committed.
        pauses: seconds between attempts to read and commit at a start while the table is unavailable.
        earlier: committed checkpoint of another run, which is restored as long as this run has none.

    Attributes:
        snapshots: whether snapshots are taken. Where the policy leaves that open, :meth:`prepare` decides it.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        storage: Storage,
        groups: ProcessGroups,
        agent: Agent,
        *,
        stale_seconds: float = STALE_SECONDS,
        pauses: tuple[float, ...] = LONG_RETRY_SECONDS,
        earlier: EarlierCheckpoint | None = None,
    ) -> None:
        self._earlier, self._pauses = earlier, pauses
        self._policy, self._storage, self._stale_seconds = policy, storage, stale_seconds
        self._groups, self._agent = groups, agent
        # May be there to be recovered from, also where this round takes none.
        self._holds_snapshots = (
            agent.holds_snapshots and (policy.snapshot_every or policy.snapshot_every_steps) is not None
        )
        self.snapshots = self._holds_snapshots and not policy.chooses_snapshots
        self._shard = LocalShard(groups, spare=self.snapshots)
        self._committed: Reference | None = None
        self._stored: StoredSource | None = None  # found, verified, and not read yet
        self._began_at: int | None = None
        self._task: BackgroundTask | None = None
        self._abandoned: BackgroundTask | None = None
        self._tidying: BackgroundTask | None = None
        self._fenced = ""
        self._failures: list[str] = []

    def enter(self) -> None:
        """Continue with the ranks of another round. Not a collective."""
        # Its thread may still write the copy, which stays as it is until _ready() has waited for that.
        self._abandoned, self._task = self._task or self._abandoned, None
        self._shard.enter()
        self._failures.clear()
        self._fenced = ""
        self._stored = None
        # A new process of the next round has not decided yet either, and a snapshot is a collective.
        self.snapshots = self._holds_snapshots and not self._policy.chooses_snapshots

    def prepare(self, state: TrackedState) -> None:
        """Plan and allocate what the first save would otherwise wait for, and decide whether snapshots are taken."""
        self._shard.collect(state)
        if self._holds_snapshots and self._policy.chooses_snapshots:
            # They are of use where a lost rank takes a part of the state along that no other one has.
            alone = self._groups.identity.world_size == 1 or not (state.replicated or state.copies > 1)
            self.snapshots = alone and self._has_memory_for_snapshots()
            if self.snapshots:
                self._shard.add_spare()
        if self._task is None and self._abandoned is None:  # memory that a task reads must not be replaced
            self._shard.reserve()

    def _has_memory_for_snapshots(self) -> bool:
        """Return whether all nodes have it. A collective."""
        control, identity = self._groups.control, self._groups.identity

        def look() -> RankMemory:
            # Snapshots of earlier rounds have their memory already, which those of this round take over.
            replaced, available = sum(each.size for each in self._agent.held().shards), 0
            with contextlib.suppress(MissingExtra):  # of the agent, which may run under another interpreter
                available = available_memory()[0] + replaced
            return RankMemory(identity.rank - identity.local_rank, self._shard.nbytes, available)

        short = node_short_of_memory(control.together("Looking for memory for snapshots", look))
        if short is not None and identity.rank == 0:
            _LOG.warning(
                "No snapshots are taken, so that a lost worker costs the steps since the last checkpoint: the node of "
                "rank %d has %d MiB of memory, of which they may take half, and shards of %d MiB, of which they hold "
                "four copies. Give snapshot_every a time to have them nevertheless.",
                short.node, short.available_bytes >> 20, short.shard_bytes >> 20,
            )  # fmt: skip
        return short is None

    def begin(
        self, step: int, state: TrackedState, data: Mapping[str, Any] | None, *, must_commit: bool = False
    ) -> None:
        """Start to save a state and its position in the data, and return when the state may change again.

        No other save may be in progress. Where no later checkpoint follows (``must_commit``), the commit is retried.

        Raises:
            CheckpointError: a rank cannot collect its state; raised on all ranks.
        """
        began = time.monotonic()
        plain, tensors = self._ready(state)
        # A run that continues another one has committed nothing yet, and counts from the step that it began with.
        before = self._began_at if self._committed is None else self._committed.step
        manifest = self._manifest(step, state, plain, data, for_good(step, before, self._policy.keep_every_steps))
        self._task = SaveTask(
            *self._task_arguments(manifest, tensors),
            storage=self._storage,
            keep=self._policy.keep,
            stall_seconds=time.monotonic() - began,
            pauses=RETRY_SECONDS if must_commit else (),  # the next checkpoint makes up for one that is not committed
        )
        self._task.start()

    def begin_snapshot(self, step: int, state: TrackedState, data: Mapping[str, Any] | None) -> None:
        """Start to take a snapshot, and return when the state may change again; see :meth:`begin`."""
        plain, tensors = self._ready(state)
        manifest, identity = self._manifest(step, state, plain, data), self._groups.identity
        # The manifest travels behind rank 0's shard, as there is no file of it to recover from.
        arguments = self._task_arguments(manifest, tensors, manifest.to_bytes if identity.rank == 0 else bytes)
        self._task = ReplicationTask(*arguments, identity=identity)
        self._task.start()

    @property
    def under_way(self) -> bool:
        """Whether a save was begun that :meth:`settle` has not completed. Not a collective."""
        return self._task is not None

    def settle(self, timeout: float | None = None) -> TaskOutcome | None:
        """Wait for the save in progress, if there is one, for these seconds or until its end. Not a collective.

        Returns:
            Its outcome, the same on all ranks; ``None`` where no save is in progress, or it continues.
        """
        outcome = None if self._task is None else self._task.wait(timeout)
        if self._task is None or outcome is None:
            return None
        task, self._task = self._task, None
        self._tidying = task  # its thread may still remove older checkpoints, for which the next save waits
        step, is_main = task.manifest.step, self._groups.identity.rank == 0
        if isinstance(task, ReplicationTask):
            self._hold_replicated(task, outcome)
            if outcome.kind != "kept" and is_main:
                _LOG.warning("The snapshot of step %d failed: %s Training goes on.", step, outcome.text)
            return outcome
        if outcome.kind == "committed":
            self._committed = task.manifest.reference
            self._failures.clear()
        elif outcome.kind == "fenced":
            self._fenced = f"The checkpoint of step {step} was not committed: {outcome.text}"
        elif outcome.kind == "failed":  # a table that is unavailable does not count: the next commit replaces this one
            self._failures.append(f"step {step}: {outcome.text}")
        if outcome.kind in ("failed", "unavailable") and is_main:
            last = self._last_commit
            text = "The checkpoint of step %d in %s was not committed: %s. Training goes on; the last commit is %s."
            _LOG.warning(text, step, self._storage, outcome.text.rstrip("."), last)
        return outcome

    def finish(self) -> None:
        """Wait until the older checkpoints are removed, after the last :meth:`settle`. Not a collective."""
        if self._tidying is not None:
            self._tidying.join()

    def require(self, *, at_once: bool = False) -> None:
        """Check that checkpoints can be written. Not a collective, but the same on all ranks after the same saves.

        Raises:
            CheckpointError: a rank could not write the last checkpoint (``at_once``) or several in a row; the last
                committed checkpoint stays.
            Fenced: a newer round has taken over.
        """
        self.require_unfenced()
        if len(self._failures) >= (1 if at_once else _FAILURES):
            raise CheckpointError(
                f"Checkpoints could not be written to {self._storage}: {'; '.join(self._failures)}. Repair the folder "
                f"(space, permission, mount) and start again; the last commit is {self._last_commit}."
            )

    def require_unfenced(self) -> None:
        """Check that no newer round has taken over, which :meth:`settle` has noticed. Like :meth:`require`.

        Raises:
            Fenced: a newer round has taken over.
        """
        if self._fenced:
            raise Fenced(self._fenced)

    @property
    def newest(self) -> Reference | None:
        """This run's last committed checkpoint, as far as it is known here. Not a collective."""
        return self._committed

    @property
    def location(self) -> str:
        """Path or URL of the storage, whatever the working directory. Not a collective."""
        where = str(self._storage)
        return where if is_remote(where) else str(Path(where).absolute())

    def abandon(self) -> None:
        """Stop using the process groups, which were aborted. Not a collective."""
        if self._task is not None:
            self._task.abandon()

    @property
    def _last_commit(self) -> str:
        return "none" if self._committed is None else self._committed.directory

    def _ready(self, state: TrackedState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Collect the state, and wait until no task of an earlier round reads the memory that is to be overwritten."""
        assert self._task is None
        plain, tensors = self._shard.collect(state)
        self.finish()  # two tasks would remove the same folders
        if self._abandoned is not None:
            self._hold_replicated(self._abandoned, self._abandoned.wait())
            self._abandoned = None
        return plain, tensors

    def _hold_replicated(self, task: BackgroundTask, outcome: TaskOutcome | None) -> None:
        # The agents hold this very memory: the next copy goes to another buffer.
        if outcome is not None and outcome.kind == "kept":
            assert task.copy is not None
            self._shard.hold(task.copy)

    def _task_arguments(
        self, manifest: Manifest, tensors: dict[str, torch.Tensor], tail: Callable[[], bytes] = bytes
    ) -> tuple[Manifest, ShardCopy | None, str | None, ControlGroup, Agent]:
        """Copy this rank's shard and a tail, and return the arguments of a task for the copy."""
        # A rank without a copy goes on to the task, whose first collective tells all others.
        copy, error = None, None
        try:
            copy = self._shard.copy(tensors, tail())
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for this one
            error = f"{type(failure).__name__}: {failure}"
        return manifest, copy, error, self._groups.background, self._agent

    def _manifest(
        self,
        step: int,
        state: TrackedState,
        plain: Mapping[str, Any],
        data: Mapping[str, Any] | None,
        kept: bool = False,
    ) -> Manifest:
        identity = self._groups.identity
        return Manifest(
            directory=str(FolderName(step, identity.round, self._shard.nonce(), kept)),
            step=step,
            round=identity.round,
            world_size=identity.world_size,
            parent=self._committed,
            files={},
            state=plain,
            data=data,
            torch=str(torch.__version__),
            classes=state.classes,
        )

    def committed(self) -> Reference | None:
        """Return the run's newest committed checkpoint, ``None`` without one.

        Raises:
            CheckpointError: the table is unavailable.
            Fenced: a newer round has taken over.
        """
        found: Any = self._look_up_committed()
        return self._take_committed(self._groups.control.from_main(found))

    def _look_up_committed(self) -> Reference | TaskOutcome | None:
        """Return what rank 0 finds of the committed checkpoint, ``None`` on other ranks. Not a collective."""
        if self._groups.control.rank:
            return None
        found = retry_while_unavailable(self._agent.pointer, self._pauses)
        return self._find_without_pointer() if found is None else found

    def _take_committed(self, found: Reference | TaskOutcome | None) -> Reference | None:
        if isinstance(found, TaskOutcome):
            raise found.error("The committed checkpoint to start from could not be looked up")
        self._committed = found
        return self._committed

    def _find_without_pointer(self) -> Reference | None:
        """Return the newest complete checkpoint of the folder, which is the run's own: the table may have been lost."""
        try:
            found = find_newest(self._storage)
        except OSError as error:
            _LOG.warning("No checkpoint is looked for in %s: %s", self._storage, error)
            return None
        if found is not None:
            _LOG.warning(
                "The run's table names no checkpoint, but %s has some, as after the table was lost; the newest "
                "complete one, %s, is restored. To start anew, use another folder and run id.",
                self._storage, found.directory,
            )  # fmt: skip
        return found

    def find(self, live: Copy | None = None, *, replicated: bool | None = None) -> MemorySource | StoredSource | None:
        """Return the state that all ranks continue from, ``None`` where the run has none yet.

        A state of which a snapshot is in memory is committed before. See
        :mod:`~azureml_elastic.checkpoint.load.offers`.

        Args:
            live: state of this process itself.
            replicated: whether a state in memory is whole, not in parts; ``None`` where that is not known yet.

        Raises:
            CheckpointDamaged: every committed checkpoint is damaged.
            CheckpointError: the pointer could not be looked up, or a snapshot could not be committed.
            Fenced: a newer round has taken over.
        """
        control, identity = self._groups.control, self._groups.identity
        # The workers of a node have one agent, of which one rank offers the shards, and all the states.
        offers_shards = self._holds_snapshots and identity.local_rank == 0 and self._stored is None
        held = self._agent.held() if live is None or offers_shards else HeldCopies()
        fitting = [each for each in held.states if replicated is None or (each.part is None) == replicated]
        copies = open_copies(fitting, control.rank) if live is None else [live]
        offers = [copy.offer for copy in copies]
        offers += [Offer.of_shard(each, control.rank) for each in held.shards if offers_shards]
        # The table may throttle. A step that the round before has trained is not behind what that could commit.
        whole = (each for each in copies if each.offer.kind == Kind.WHOLE)
        newest = next((each for each in whole if 0 < each.origin == identity.round - 1), None)
        # In one collective with the offers: each costs a start, or a recovery, the latency of the slowest link.
        gathered = control.gather((offers, self._look_up_committed() if newest is None else newest.committed))
        committed = self._take_committed(gathered[0][1])
        left = [offer for each, _ in gathered for offer in each]
        while chosen := choose(left, None if committed is None else committed.step):
            if chosen[0].kind != Kind.SHARD:
                if (source := open_source(chosen, copies, control)) is not None:
                    return source
                useless = chosen
            else:
                written = write_snapshot(self._storage, control, identity, committed, self._policy, chosen)
                if isinstance(written, Manifest):
                    arguments = self._storage, control, self._agent, written
                    committed = commit_before_restore(*arguments, keep=self._policy.keep, pauses=self._pauses)
                    break
                # Another copy's turn, or that of an older snapshot, or of no snapshot where nothing can be written.
                useless = [each for each in left if each.kind == Kind.SHARD] if written is None else written
            left = [each for each in left if each not in useless]
        self._stored = self._stored or self._find_stored(committed)
        return self._stored

    def _find_stored(self, pointer: Reference | None) -> StoredSource | None:
        control, agent = self._groups.control, self._agent
        pointer = adopt_handed_over(self._storage, control, agent, pointer) or pointer
        # In the run's own storage, then in that of the run that it continues.
        origins = [] if pointer is None else [(self._storage, pointer)]
        origins += [] if self._earlier is None else [(self._earlier.storage, self._earlier.reference)]
        for storage, reference in origins:
            own = storage is self._storage
            selector = CheckpointSelector(storage, control, self._stale_seconds, marks=own, agent=agent)
            try:
                return StoredSource(storage, selector.newest_whole(reference))
            except CheckpointDamaged as error:
                if self._earlier is None or not own:
                    raise
                if control.rank == 0:
                    _LOG.warning("The run starts again from the run that it continues: %s", error)
                self._committed = None
        return None

    def restore(self, state: TrackedState) -> Manifest | None:
        """Restore the newest undamaged checkpoint: a snapshot that replicas hold, else the newest committed one.

        A run without a checkpoint restores that of the earlier run, if it continues one.

        Returns:
            The manifest of the restored checkpoint, ``None`` where the run has none yet.

        Raises:
            CheckpointDamaged: every committed checkpoint is damaged.
            CheckpointError: the pointer could not be looked up, or a rank could not read.
            Fenced: a newer round has taken over.
            UsageError: the checkpoint does not fit what is tracked.
        """
        source = self.find()
        return self.read(source, state) if isinstance(source, StoredSource) else None

    def read(self, source: StoredSource, state: TrackedState) -> Manifest:
        """Restore a state that :meth:`find` has found and verified.

        Raises:
            CheckpointError: a rank could not read.
            UsageError: the checkpoint does not fit what is tracked.
        """
        self._stored = None
        storage, manifest = source.storage, source.manifest
        control = self._groups.control
        where, present = f"{storage}/{manifest.directory}", state.targets(manifest.state)
        own = random_state.tensor_name(control.rank)  # the others' generators are not read
        tensors = load(
            storage,
            manifest,
            present,
            control,
            lambda name: name == own or (not random_state.is_tensor_name(name) and state.wants(name)),
            lambda stored: state.check(where, manifest.state, manifest.classes, stored),
        )
        missing = state.restore(manifest.state, tensors)
        if missing and control.rank == 0:
            _LOG.warning("The checkpoint %s was restored in part; new are %s.", where, ", ".join(sorted(missing)))
        if own in tensors:
            random_state.restore(tensors[own], self._groups.device)
        else:  # a rank that the world of the checkpoint did not have: the same sequences at each start from it
            random_state.begin(manifest.digest, control.rank)
        if storage is self._storage:
            # Not the pointer's, if that one is damaged: the next save names as its parent what it goes on from.
            self._committed = manifest.reference
        self._began_at = manifest.step
        return manifest
