"""The training state of a run on one rank: restored, saved, replicated and handed over."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from azureml_elastic.checkpoint.checkpoints import Checkpoints, StoredSource
from azureml_elastic.checkpoint.load.offers import Kind, Offer
from azureml_elastic.checkpoint.load.selection import EarlierCheckpoint
from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule, SnapshotSchedule
from azureml_elastic.checkpoint.snapshots.copies import Copy, MemorySource
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, local_chunks, position_key
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.config import BatchPolicy, CheckpointPolicy, FixedGlobalBatch
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import CheckpointDamaged, ElasticError, RoundBroken, UsageError
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.ipc.worker_messages import Busy, Free
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.found.state import FoundState
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.session.records import Audit, Profiling
from azureml_elastic.train.session.step_checks import WeightsWatch
from azureml_elastic.train.step_state import StepMachine

_LOG = logging.getLogger(__name__)

_SETTLED_STEPS = 2
"""Steps after which optimizers have all of their state, so that its size is known."""

_COMPARED_STEPS = (2, 4, 8, 16, 32)
"""Steps of a round after which the script's own state is compared, beside each epoch, snapshot and checkpoint."""


@dataclass(frozen=True)
class SessionContext:
    """Components of a session.

    ``can_grow`` is whether the run may have more than one rank later; ``nodes_per_replica`` is how many nodes hold one
    copy of a sharded model; ``earlier`` is where a run that continues another one starts.
    """

    identity: WorkerIdentity  # of round 0 in a process that waits for its assignment to one
    agent: Agent
    storage: Storage
    checkpoint: CheckpointPolicy
    batch: BatchPolicy = field(default_factory=FixedGlobalBatch)
    audit: Audit = field(default_factory=lambda: Audit(None))
    profiling: Profiling | None = None
    can_grow: bool = False
    nodes_per_replica: int | Literal["all"] = 1
    earlier: EarlierCheckpoint | None = None


class TrainingState:
    """The training state on this rank, and its copies on storage and in memory.

    Attributes:
        tracked: tracked objects, ``None`` before ``run.track()``
        found: state that the script keeps beside them
        steps: optimizer steps completed, over all rounds
        finite: whether the weights were finite at the last save or snapshot
        weights_restored: whether the last restore was that of a state in memory, so that all ranks have its weights
    """

    def __init__(
        self, context: SessionContext, world: ProcessGroups, position: Position, rate: LearningRate, steps: StepMachine
    ) -> None:
        policy = context.checkpoint
        self._machine = steps
        self._agent = context.agent
        self._world = world
        self._identity = world.identity  # that of the groups changes before this process has entered the next round
        self._position = position
        self._rate = rate
        self._checkpoints = Checkpoints(policy, context.storage, world, context.agent, earlier=context.earlier)
        self._schedule = CheckpointSchedule(policy, world.control, clock=time.monotonic)
        self._snapshot_schedule = SnapshotSchedule(policy, world.control, clock=time.monotonic)
        self.tracked: TrackedState | None = None
        self.found = FoundState()
        self._compared_epochs = position.epochs
        self._last_saved: tuple[int, str] | None = None
        self._pending: tuple[int, str] | None = None
        self._entered_at = 0
        self._compared_at: int | None = None
        self._save_pending = False
        self._weights_watch = WeightsWatch(policy.on_nonfinite)
        self._origin = 0  # round that has trained the last step: parts of a step that two rounds trained are not mixed
        self.finite = True
        self.weights_restored = False
        self.steps = 0

    @property
    def holds_full_state(self) -> bool:
        """Whether this process alone holds the full state of a completed step."""
        whole = self.tracked is not None and self.tracked.replicated and self._machine.whole
        return whole and self._weights_watch.weights_are_sound()

    @property
    def hands_over(self) -> bool:
        """Whether what this process holds of a completed step is of use to the next round, whichever rank is lost."""
        return self.holds_full_state or self._hands_part_over

    @property
    def _hands_part_over(self) -> bool:
        """Whether this process holds a part of a completed step, and another rank the same."""
        tracked = self.tracked
        if tracked is None or tracked.replicated or not self._machine.whole or not self.steps:
            return False
        return tracked.copies > 1 and self._weights_watch.weights_are_sound()

    @property
    def _objects(self) -> TrackedState:
        assert self.tracked is not None
        return self.tracked

    @property
    def _here(self) -> tuple[int, str]:
        return self.steps, self._position.key()

    def find(self) -> Mapping[str, Any] | None:
        """Return the state that :meth:`track` will restore, without tensors and by object, if any. A collective."""
        source = self._checkpoints.find()
        return None if source is None else source.state

    def track(self, tracked: TrackedState) -> None:
        """Set the tracked objects, and restore them if the run has a state. A collective."""
        self.tracked = tracked
        self._weights_watch.attach(tracked)
        try:
            self._restore()  # find() did not know yet whether the model is sharded
            self._rate.enter(self._position.identity.world_size)
        except BaseException:
            self.tracked = None
            raise

    def enter(self) -> None:
        """Continue with the ranks of another round, from the furthest state among them. A collective.

        Raises:
            RoundBroken: this process cannot continue from that state; a new process can.
        """
        live: Copy | None = None
        before, self._identity = self._identity, self._world.identity
        if self.holds_full_state:
            state = Kind.WHOLE, self.steps, before.round, position_key(self._data())
            where = before.round, before.rank, self._world.control.rank
            offer = Offer(*state, *where, save_pending=self._save_pending)
            live = Copy(offer, self._snapshot, self._origin, self._checkpoints.newest)
        self._checkpoints.enter()
        self._schedule.enter(self._world.control)
        self._snapshot_schedule.enter(self._world.control)
        if self.tracked is not None:
            self._restore(live)
            self._rate.enter(self._identity.world_size)

    def has_unsaved_progress(self) -> bool:
        """Return whether a checkpoint would hold more steps or samples than the last one."""
        return self.steps > 0 if self._last_saved is None else self._last_saved != self._here

    def observe(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass, of one element, into account."""
        self._weights_watch.observe(loss)

    def note_weights(self) -> None:
        """Note that the run may continue from the weights as they are: no step is in progress, and no code of one."""
        self._weights_watch.note_weights()

    def complete_step(self) -> None:
        """Count a step.

        Raises:
            NonFiniteError: a step was not finite, and the policy ends the run.
            RollbackRequired: the weights are not finite, and the policy restarts the run.
        """
        self._weights_watch.end_step(self.steps + 1)  # raises before the step counts: what is not finite is not saved
        self.steps += 1
        self._origin = self._identity.round

    def before_update(self) -> None:
        """Compare what the script has changed since the end of the epoch in which its round began. A collective."""
        # A process that goes on in the code at the end of an epoch runs it before the first step of its round. What
        # changes there for the first time would begin anew if the round ended again before that step's boundary.
        if self.found.repeated and self.steps == self._entered_at != self._compared_at:
            self._compared_at = self.steps
            self.found.agree(self._world.control)

    def after_step(self, *, save: bool) -> None:
        """Take a checkpoint if it is requested or due, or else a snapshot if that is due. A collective if one is."""
        self.settle(0)
        entered = self.steps - self._entered_at
        epochs, self._compared_epochs = self._compared_epochs, self._position.epochs
        if entered in _COMPARED_STEPS or (entered > _SETTLED_STEPS and epochs != self._compared_epochs):
            self.found.agree(self._world.control)
        if entered == _SETTLED_STEPS:
            with self._machine.read():
                self._checkpoints.prepare(self._objects)
        if self._schedule.due(self.steps) or save:
            self.save()
        elif self._checkpoints.snapshots and self._snapshot_schedule.due(self.steps):
            self._take_snapshot()

    def save(self, *, must_commit: bool = False) -> bool:
        """Take a checkpoint, and return while it is written. A collective.

        Args:
            must_commit: whether to wait for the commit, and to retry it while the table is unavailable

        Returns:
            Whether the checkpoint is known to be committed. None is taken of weights that are not finite.

        Raises:
            CheckpointError: checkpoints cannot be written.
            Fenced: a newer round has taken over.
            RoundBroken: the round ended before the commit, with ``must_commit``.
        """
        self._agent.report(Busy())  # until all ranks have copied their state: else the agent would suspect a hang
        self.settle()
        if must_commit:  # tried however many have failed before it, as no later one follows
            self._checkpoints.require_unfenced()
        else:
            self._checkpoints.require()
        self._save_pending = True  # before the first collective: if the round ends there, the next one saves this step
        self._schedule.saving(self.steps)
        if not self._check_finite("checkpoint"):
            self._save_pending = False
            self._schedule.saved()
            self._agent.report(Free())
            return False
        self.found.agree(self._world.control)
        with self._machine.read():
            self._checkpoints.begin(self.steps, self._objects, self._data(), must_commit=must_commit)
        self._pending = self._here
        self._schedule.saved()
        if must_commit:
            self.settle()
            self._checkpoints.require(at_once=True)
            if self._save_pending:
                raise RoundBroken(f"Round {self._identity.round} ended while step {self.steps} was being saved.")
        self._agent.report(Free())
        return self._last_saved == self._pending

    def write_to(self, storage: Storage, objects: TrackedState) -> None:
        """Write objects to a storage of their own, and return when all is complete. A collective.

        Raises:
            CheckpointError: a rank cannot write it.
        """
        self._agent.report(Busy())
        self.settle()  # both use the process group of saves
        checkpoints = self._apart(storage)
        with self._machine.read():
            checkpoints.begin(self.steps, objects, self._data(), must_commit=True)
        checkpoints.settle()
        checkpoints.finish()
        checkpoints.require(at_once=True)
        self._agent.report(Free())

    def read_from(self, storage: Storage, objects: TrackedState) -> None:
        """Restore objects from such a storage. A collective.

        Raises:
            CheckpointDamaged: the checkpoint is not complete.
            UsageError: it does not fit the objects.
        """
        if self._apart(storage).restore(objects) is None:
            raise CheckpointDamaged(f"{storage} has no complete checkpoint. Load another folder.")

    def _apart(self, storage: Storage) -> Checkpoints:
        policy = CheckpointPolicy(snapshot_every=None)
        agent = StandaloneAgent(storage, self._identity, handles_signals=False)
        return Checkpoints(policy, storage, self._world, agent)

    def _take_snapshot(self) -> None:
        """Take a snapshot, unless a save is in progress on a rank. A collective."""
        self.settle(0)
        if self._world.control.all_true(not self._checkpoints.under_way):
            self._snapshot_schedule.saving(self.steps)
            if not self._check_finite("snapshot"):
                self._snapshot_schedule.saved()
                return
            self.found.agree(self._world.control)
            with self._machine.read():
                self._checkpoints.begin_snapshot(self.steps, self._objects, self._data())
            self._pending = None
            self._snapshot_schedule.saved()

    def _check_finite(self, what: str) -> bool:
        """Return whether the weights of all ranks are finite. A collective."""
        before, self.finite = self.finite, self._world.control.all_true(self._weights_watch.weights_are_finite())
        if before and not self.finite and self._identity.rank == 0:
            _LOG.warning("No %s is taken of step %d: its weights are NaN or infinite.", what, self.steps)
        return self.finite

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the end of the save in progress, if there is one, or until the timeout in seconds."""
        if timeout is None and self._checkpoints.under_way:
            self._agent.report(Busy())
        outcome = self._checkpoints.settle(timeout)
        # A save and a snapshot slow training down at the same time as steps are counted: neither schedule may take the
        # pace of the other's steps for its own.
        if outcome is not None and self._pending is None:
            self._snapshot_schedule.written(self.steps)
            self._schedule.disturbed(self.steps)
            if self._identity.rank == 0:
                self._snapshot_schedule.tell_what_is_lost()
        elif outcome is not None:
            self._schedule.written(self.steps)
            self._snapshot_schedule.disturbed(self.steps)
            self._save_pending = outcome.kind in ("broken", "fenced")  # the next round saves again
            if outcome.kind == "committed":
                self._last_saved = self._pending

    def finish(self) -> None:
        """Wait for the end of all work beside training, after the last save."""
        self.settle()
        self._checkpoints.finish()

    def abandon_save(self) -> None:
        """Stop the save in progress, if there is one, from using the process groups, which are about to be closed."""
        if self._checkpoints.under_way:
            self._world.abort()  # its thread may wait in a collective, for a rank that is gone
            self.settle(0)
            self._checkpoints.abandon()

    def hand_over(self) -> bool:
        """Hand the state, or this process's part, over to the agent for the next round; return whether it succeeded."""
        part = self._hands_part_over
        if not (self._agent.holds_snapshots and (part or self.holds_full_state)):
            return False
        if not part and not self._agent.hands_whole_over:
            return True  # another worker of the node hands the same state over
        self._rate.begin()  # an update may have been stopped after the hook that scales its rate
        self.found.end_round(self._world.control.world_size)
        try:
            descriptor = self._snapshot().to_memory(self._world.device)
            try:
                self._agent.hand_over(self.steps, descriptor, part=part)
            finally:
                os.close(descriptor)  # the agent has opened the memory by now, which keeps it
        except (OSError, ElasticError, RuntimeError) as error:
            _LOG.warning("The state of step %d could not be handed over in memory: %s", self.steps, error)
            return False
        return True

    def _begin(self, unsaved_seconds: float) -> None:
        self._entered_at = self.steps
        history = WorkerEnvironment.read().history
        self._schedule.begin(self.steps, unsaved_seconds, history)
        self._snapshot_schedule.begin(self.steps, 0.0, history)

    def _data(self) -> dict[str, Any]:
        return {**self._position.to_json(), "rate": self._rate.to_json()}

    def _snapshot(self) -> Snapshot:
        with self._machine.read():
            plain, tensors, apart = self._objects.collect_held()
        committed = self._checkpoints.newest
        return Snapshot(
            self.steps,
            plain,
            self._data(),
            unsaved_seconds=self._schedule.unsaved_seconds,
            save_pending=self._save_pending,
            storage=self._checkpoints.location,
            parent=None if committed is None else committed.to_json(),
            classes=self._objects.classes,
            origin=self._origin,
            apart=apart,
            random=random_state.capture(self._world.device),
            tensors=local_chunks(tensors),
        )

    def _restore(self, own: Copy | None = None) -> None:
        """Restore the state that all ranks continue from, which may be this process's own. A collective."""
        control, live = self._world.control, own is not None
        source = self._checkpoints.find(own, replicated=self._objects.replicated)
        if not isinstance(source, MemorySource):
            self._restore_from_storage(source, live=live)
            return
        if live and source.own:
            source.send(control)
            self._begin(self._schedule.unsaved_seconds)  # the schedules of all ranks must start from the same step
            self.weights_restored = True
        else:
            # Into place, unless this process has a state of its own: it may be the only one left if a holder is lost.
            present: Mapping[str, torch.Tensor] = {}
            if not live:
                self._machine.restore()
                with contextlib.suppress(UsageError):  # of a state that does not fit, as its restore will say
                    present = self._objects.targets(source.state)
            tensors = source.read(present, control, views=device_of(self._world.device).separate)
            self._apply(source.content, tensors, live=live)
            inherited = None if live else source.random(self._identity.local_rank)
            if inherited is not None:
                random_state.restore(inherited, self._world.device)
            elif not live:  # the previous worker's are not known
                random_state.begin("step", self.steps, "rank", self._identity.rank)
        newest = self._checkpoints.newest
        if newest is not None and newest.step == self.steps:
            self._last_saved = self._here
        self._agent.restored(self.steps, "memory")
        if source.save_pending:
            self.save()  # on all ranks: its own save of this step was broken off with the last round

    def _restore_from_storage(self, source: StoredSource | None, *, live: bool) -> None:
        self._machine.restore()
        self.weights_restored = False
        restored = None if source is None else self._checkpoints.read(source, self._objects)
        self.steps = 0 if restored is None else restored.step
        self._origin = 0
        self._restore_position(None if restored is None else restored.data, live=live)
        # False for the checkpoint of the run that this one continues: the state is still to be saved in its own folder.
        own = restored is not None and self._checkpoints.newest == restored.reference
        self._last_saved = self._here if own else None
        self._begin(0.0)
        self._restored()
        self._agent.restored(self.steps, None if restored is None else restored.directory)

    def _apply(self, header: Snapshot, tensors: Mapping[str, torch.Tensor], *, live: bool) -> None:
        self._machine.restore()
        with torch.no_grad():
            self.weights_restored = not self._objects.restore(header.state, tensors)
        self.steps = header.step
        self._origin = header.origin
        self._restore_position(header.data, live=live)
        self._begin(header.unsaved_seconds)
        self._last_saved = None
        self._restored()

    def _restored(self) -> None:
        self._weights_watch.forget_weights()
        self._machine.restored(in_step=bool(self._position.opened))

    def _restore_position(self, data: Any, *, live: bool) -> None:
        """Restore a position in the data. Code of the script between two epochs can be neither repeated nor skipped."""
        epochs = self._position.epochs
        self._position.load(data)
        self._rate.load(None if data is None else data["rate"])
        if live and epochs != self._position.epochs:
            raise RoundBroken(
                f"The state of step {self.steps} is in the epochs {self._position.epochs} of run and loaders, but this "
                f"process's loop is in {epochs}."
            )
