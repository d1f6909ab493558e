"""The training state of a run on one rank: restored, saved, replicated and handed over."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from azureml_elastic.checkpoint.save.checkpoints import Checkpoints
from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule
from azureml_elastic.checkpoint.snapshots.snapshot import RecoverableState, Snapshot, choose, position_key
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.errors import CheckpointDamaged, ElasticError, RoundBroken
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.optim.learning_rate import LearningRate

__all__ = ["TrainingState"]

_LOG = logging.getLogger(__name__)

_SETTLED_STEPS = 2
"""Steps after which optimizers have all of their state, so that its size is known."""


class TrainingState:
    """The training state on this rank, and its copies on storage and in memory.

    Args:
        policy: checkpoint policy.
        storage: storage of the checkpoints.
        agent: agent that commits checkpoints and holds states in memory.
        world: process groups of the round.
        position: position in the data.
        rate: scaling of the learning rate.

    Attributes:
        steps: optimizer steps completed, over all rounds.
        half_step: whether the optimizer has stepped since the last completed step.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        storage: Storage,
        agent: Agent,
        world: ProcessGroups,
        position: Position,
        rate: LearningRate,
    ) -> None:
        self._agent = agent
        self._world = world
        self._identity = world.identity  # that of the groups changes before this process has entered the next round
        self._position = position
        self._rate = rate
        self._checkpoints = Checkpoints(policy, storage, world, agent)
        self._schedule = CheckpointSchedule(policy, world.control, clock=time.monotonic)
        rarer = {"every": policy.snapshot_every, "every_steps": policy.snapshot_every_steps}
        self._snapshot_schedule = CheckpointSchedule(
            policy.model_copy(update=rarer), world.control, clock=time.monotonic
        )
        self._state: TrackedState | None = None
        self._last_saved: tuple[int, str] | None = None
        self._pending: tuple[int, str] | None = None
        self._entered_at = 0
        self._save_pending = False
        self._incomplete = False
        self.steps = 0
        self.half_step = False

    @property
    def state(self) -> TrackedState | None:
        """The tracked objects, ``None`` before ``run.track()``."""
        return self._state

    @property
    def holds_full_state(self) -> bool:
        """Whether this process alone holds the full state of a completed step."""
        return self._state is not None and self._state.replicated and not self.half_step and not self._incomplete

    def track(self, state: TrackedState) -> None:
        """Set the tracked objects, and restore them where the run has a state. A collective."""
        self._state = state
        try:
            self._restore(state, self._handed_over(state))
            self._rate.enter(self._identity.world_size)
        except BaseException:
            self._state = None
            raise

    def enter(self) -> None:
        """Continue with the ranks of another round, from the furthest state among them. A collective.

        Raises:
            RoundBroken: this process cannot continue from that state; a new process can.
        """
        local = None
        if self._state is not None and self.holds_full_state:
            position = position_key(self._data())
            local = RecoverableState(
                self.steps, self._identity.round, self._identity.rank, position, self._save_pending
            )
        self._identity = self._world.identity
        self._checkpoints.enter()
        self._schedule.enter(self._world.control)
        self._snapshot_schedule.enter(self._world.control)
        if self._state is not None:
            self._restore(self._state, (local, None))
            self._rate.enter(self._identity.world_size)

    def due(self) -> bool:
        """Return whether a checkpoint is due now. A collective at decision steps."""
        return self._schedule.due(self.steps)

    def has_unsaved_progress(self) -> bool:
        """Return whether a checkpoint would hold more than the last one, the turn of an epoch aside."""
        return self.steps > 0 if self._last_saved is None else self._last_saved != (self.steps, self._position.key())

    def after_step(self) -> None:
        """Check the save in progress, and prepare the first one, after each step; sometimes a collective."""
        self.settle(0)
        if self._state is not None and self.steps == self._entered_at + _SETTLED_STEPS:
            self._checkpoints.prepare(self._state)
            self.half_step = False  # reading the state of a new optimizer makes it take an empty step

    def save(self, *, must_commit: bool = False) -> bool:
        """Take a checkpoint, and return while it is written. A collective.

        Args:
            must_commit: whether to wait for the commit, and to retry it while the table is unavailable.

        Returns:
            Whether the checkpoint is known to be committed.

        Raises:
            CheckpointError: checkpoints cannot be written.
            Fenced: a newer round has taken over.
            RoundBroken: the round ended before a checkpoint that must be committed was.
        """
        assert self._state is not None
        self._agent.busy()
        self.settle()
        self._checkpoints.require()
        self._schedule.saving(self.steps)
        self._save_pending = True
        self._checkpoints.begin(self.steps, self._state, self._data(), must_commit=must_commit)
        self._pending = (self.steps, self._position.key())
        self.half_step = False  # as above
        self._schedule.saved()
        if must_commit:
            self.settle()
            self._checkpoints.require(at_once=True)
            if self._save_pending:
                raise RoundBroken(f"Round {self._identity.round} ended while step {self.steps} was being saved.")
        self._agent.free()
        return self._last_saved == self._pending

    def take_snapshot(self) -> None:
        """Take a snapshot, if one is due and no save is in progress. A collective when due."""
        if not self._checkpoints.snapshots or not self._snapshot_schedule.due(self.steps):
            return
        self.settle(0)
        if self._world.control.all_true(not self.saving):
            assert self._state is not None
            self._snapshot_schedule.saving(self.steps)
            self._checkpoints.begin_snapshot(self.steps, self._state, self._data())
            self._pending = None
            self.half_step = False  # as above
            self._snapshot_schedule.saved()

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in progress, if there is one.

        Args:
            timeout: seconds after which the save is left to continue; ``None`` waits for its end.
        """
        if timeout is None and self.saving:
            self._agent.busy()
        outcome = self._checkpoints.settle(timeout)
        if outcome is not None and self._pending is not None:
            self._schedule.written(self.steps)
            self._save_pending = outcome.kind in ("broken", "fenced")  # the next round saves again
            if outcome.kind == "committed":
                self._last_saved = self._pending

    @property
    def saving(self) -> bool:
        """Whether a save is in progress."""
        return self._checkpoints.under_way

    def abandon_save(self) -> None:
        """Stop the save in progress from using the process groups, which were aborted and are about to be closed."""
        self.settle(0)
        self._checkpoints.abandon()

    def hand_over(self) -> bool:
        """Hand the state over to the agent, for the next worker of this node; return whether it succeeded."""
        if not self.holds_full_state:
            return False
        if self._identity.local_rank != 0:
            return True  # local rank 0 hands the same state over
        try:
            memory = self._snapshot().to_memory()
            self._agent.hand_over(self.steps, memory.descriptor)
            memory.release()
        except (OSError, ElasticError, RuntimeError) as error:
            _LOG.warning("The state of step %d could not be handed over in memory: %s", self.steps, error)
            return False
        return True

    def _begin(self, unsaved_seconds: float) -> None:
        self._entered_at = self.steps
        self._schedule.begin(self.steps, unsaved_seconds)
        self._snapshot_schedule.begin(self.steps, 0.0)

    def _data(self) -> dict[str, Any]:
        return {**self._position.to_json(), "rate": self._rate.to_json()}

    def _snapshot(self) -> Snapshot:
        assert self._state is not None
        self._state.drop_gradients()  # of an interrupted step
        plain, tensors = self._state.collect(is_main=True)
        self.half_step = False
        unsaved, random = self._schedule.unsaved_seconds, random_state.to_text(random_state.capture(self._world.device))
        return Snapshot(self.steps, plain, self._data(), unsaved, self._save_pending, random, tensors)

    def _handed_over(self, state: TrackedState) -> tuple[RecoverableState | None, Snapshot | None]:
        """Return the state that the previous worker of this node has handed over."""
        kept = self._agent.handed_over()
        if kept is None or not state.replicated:
            return None, None
        try:
            snapshot = Snapshot.from_memory(kept.path)
        except (OSError, CheckpointDamaged, ValueError) as error:
            _LOG.warning("The handed over state cannot be read: %s", error)
            return None, None
        return RecoverableState(kept.step, kept.round, kept.rank, snapshot.position, snapshot.save_pending), snapshot

    def _restore(self, state: TrackedState, own: tuple[RecoverableState | None, Snapshot | None]) -> None:
        """Restore the furthest state of all ranks and the storage on every rank. A collective."""
        local, inherited = own
        live = local is not None and inherited is None
        states = self._world.control.gather(local)
        reference = self._checkpoints.committed()
        source = choose(states, None if reference is None else reference.step)
        if source is None:
            where = self._restore_from_storage(state, live=live)
        else:
            chosen = states[source]
            assert chosen is not None
            same = [chosen.same(each) for each in states]
            snapshot = inherited
            if not all(same):
                mine = self._snapshot() if live and self._world.control.rank == source else inherited
                snapshot = Snapshot.broadcast(mine, source, self._world.control)
            if not (live and same[self._world.control.rank]):
                assert snapshot is not None
                self._apply(state, snapshot, live=live)
                if not live:
                    self._restore_random(inherited if same[self._world.control.rank] else None)
            else:
                # The schedules of all ranks must start from the same step.
                self._begin(self._schedule.unsaved_seconds)
            where = "memory"
            if reference is not None and reference.step == self.steps:
                self._last_saved = (self.steps, self._position.key())
            if any(each is not None and each.save_pending and each.step == chosen.step for each in states):
                self._agent.restored(self.steps, where)
                self.save()
                return
        self._agent.restored(self.steps, where)

    def _restore_from_storage(self, state: TrackedState, *, live: bool) -> str | None:
        self._incomplete = True  # until all tensors are restored
        restored = self._checkpoints.restore(state)
        self.steps, self._last_saved, unsaved = 0, None, 0.0
        data = None
        if restored is not None:
            self.steps, data = restored.reference.step, restored.data
        self._restore_position(data, live=live)
        if restored is not None:
            self._last_saved = (self.steps, self._position.key())
        self._begin(unsaved)
        self.half_step = self._incomplete = False  # restoring an optimizer makes it take an empty step
        return None if restored is None else restored.reference.directory

    def _apply(self, state: TrackedState, snapshot: Snapshot, *, live: bool) -> None:
        self._incomplete = True
        with torch.no_grad():
            state.restore(snapshot.state, snapshot.tensors)
        self.steps = snapshot.step
        self._restore_position(snapshot.data, live=live)
        self._begin(snapshot.unsaved_seconds)
        self._last_saved = None
        self.half_step = self._incomplete = False

    def _restore_random(self, inherited: Snapshot | None) -> None:
        """Continue the random generators of the previous worker, or seed new ones."""
        if inherited is not None and inherited.random is not None and self._identity.local_rank == 0:
            random_state.restore(random_state.from_text(inherited.random), self._world.device)
        else:
            random_state.begin("step", self.steps, "rank", self._identity.rank)

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
