"""What a run has learnt so far: where it is restored from, when it is saved, and how it is handed on."""

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
"""After so many steps optimizers have all of their state, so that its size is known."""


class TrainingState:
    """The state of the run on this rank, and its copies on storage and in memory.

    Args:
        policy: of the checkpoints.
        storage: of them.
        agent: that keeps the pointer to the committed checkpoint, and states in memory.
        world: the ranks.
        position: in the data.
        rate: by which the learning rate is scaled.

    Attributes:
        steps: optimizer steps that the run has completed, over all its rounds.
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
        self._identity = world.identity  # the world's changes before this process has entered the next round
        self._position = position
        self._rate = rate
        self._checkpoints = Checkpoints(policy, storage, world, agent)
        self._cadence = CheckpointSchedule(policy, world.control, clock=time.monotonic)
        rarer = {"every": policy.snapshot_every, "every_steps": policy.snapshot_every_steps}
        self._snapshots = CheckpointSchedule(policy.model_copy(update=rarer), world.control, clock=time.monotonic)
        self._state: TrackedState | None = None
        self._saved_at: tuple[int, str] | None = None
        self._saving: tuple[int, str] | None = None
        self._entered_at = 0
        self._save_pending = False
        self._torn = False
        self.steps = 0
        self.half_step = False

    @property
    def state(self) -> TrackedState | None:
        """What is tracked, ``None`` before ``run.track()``."""
        return self._state

    @property
    def holds_full_state(self) -> bool:
        """Whether this process alone holds the whole state, as it was after a completed step."""
        return self._state is not None and self._state.replicated and not self.half_step and not self._torn

    def track(self, state: TrackedState) -> None:
        """Take charge of a state, and restore it where the run has one. A collective."""
        self._state = state
        try:
            self._restore(state, self._inherited(state))
            self._rate.enter(self._identity.world_size)
        except BaseException:
            self._state = None
            raise

    def enter(self) -> None:
        """Go on with the ranks of another round, from the furthest state among them. A collective.

        Raises:
            RoundBroken: this process cannot go on from there; a new one can.
        """
        offer = None
        if self._state is not None and self.holds_full_state:
            position = position_key(self._data())
            offer = RecoverableState(
                self.steps, self._identity.round, self._identity.rank, position, self._save_pending
            )
        self._identity = self._world.identity
        self._checkpoints.enter()
        self._cadence.enter(self._world.control)
        self._snapshots.enter(self._world.control)
        if self._state is not None:
            self._restore(self._state, (offer, None))
            self._rate.enter(self._identity.world_size)

    def due(self) -> bool:
        """Return whether a checkpoint is due now. A collective at decision steps."""
        return self._cadence.due(self.steps)

    def has_unsaved_progress(self) -> bool:
        """Return whether a checkpoint now would hold more than the last one, beyond the turn of an epoch."""
        return self.steps > 0 if self._saved_at is None else self._saved_at != (self.steps, self._position.here())

    def after_step(self) -> None:
        """Look after what goes on beside training. To be called after each step; a collective after some."""
        self.settle(0)
        if self._state is not None and self.steps == self._entered_at + _SETTLED_STEPS:
            self._checkpoints.prepare(self._state)
            self.half_step = False  # the first look at an optimizer's state makes it step, by nothing

    def save(self, *, must_commit: bool = False) -> bool:
        """Take a checkpoint, and go on while it is written. A collective.

        Args:
            must_commit: wait until it is committed, and try again where the table is away.

        Returns:
            Whether it is committed, ``False`` while that is not known.

        Raises:
            CheckpointError: checkpoints cannot be written.
            Fenced: a newer round has taken over.
            RoundBroken: the round has ended in the middle of one that must be committed.
        """
        assert self._state is not None
        self._agent.busy()
        self.settle()
        self._checkpoints.require()
        self._cadence.saving(self.steps)
        self._save_pending = True
        self._checkpoints.begin(self.steps, self._state, self._data(), must_commit=must_commit)
        self._saving = (self.steps, self._position.here())
        self.half_step = False  # as above
        self._cadence.saved()
        if must_commit:
            self.settle()
            self._checkpoints.require(at_once=True)
            if self._save_pending:
                raise RoundBroken(f"Round {self._identity.round} ended while step {self.steps} was being saved.")
        self._agent.free()
        return self._saved_at == self._saving

    def take_snapshot(self) -> None:
        """Take a copy that stays in memory, where one is due and nothing is being written. A collective when due."""
        if not self._checkpoints.snapshots or not self._snapshots.due(self.steps):
            return
        self.settle(0)
        if self._world.control.all_true(not self.saving):
            assert self._state is not None
            self._snapshots.saving(self.steps)
            self._checkpoints.begin_snapshot(self.steps, self._state, self._data())
            self._saving = None
            self.half_step = False  # as above
            self._snapshots.saved()

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            timeout: in seconds, after which it is left to itself.
        """
        if timeout is None and self.saving:
            self._agent.busy()
        outcome = self._checkpoints.settle(timeout)
        if outcome is not None and self._saving is not None:
            self._cadence.written(self.steps)
            self._save_pending = outcome.kind in ("broken", "fenced")  # it is made up for in the next round
            if outcome.kind == "committed":
                self._saved_at = self._saving

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._checkpoints.under_way

    def abandon_save(self) -> None:
        """Leave the process group, which was aborted and is about to be closed, to whoever closes it."""
        self.settle(0)
        self._checkpoints.abandon()

    def hand_over(self) -> bool:
        """Give the state to the agent, for this node's next worker, and return whether that worked."""
        if not self.holds_full_state:
            return False
        if self._identity.local_rank != 0:
            return True  # its neighbour holds the same
        try:
            memory = self._snapshot().to_memory()
            self._agent.hand_over(self.steps, memory.descriptor)
            memory.release()
        except (OSError, ElasticError, RuntimeError) as error:
            _LOG.warning("The state of step %d could not be kept in memory: %s", self.steps, error)
            return False
        return True

    def _begin(self, unsaved_seconds: float) -> None:
        self._entered_at = self.steps
        self._cadence.begin(self.steps, unsaved_seconds)
        self._snapshots.begin(self.steps, 0.0)

    def _data(self) -> dict[str, Any]:
        return {**self._position.to_json(), "rate": self._rate.to_json()}

    def _snapshot(self) -> Snapshot:
        assert self._state is not None
        self._state.drop_gradients()  # what an interrupted step has left
        plain, tensors = self._state.collect(is_main=True)
        self.half_step = False
        unsaved, random = self._cadence.unsaved_seconds, random_state.to_text(random_state.capture(self._world.device))
        return Snapshot(self.steps, plain, self._data(), unsaved, self._save_pending, random, tensors)

    def _inherited(self, state: TrackedState) -> tuple[RecoverableState | None, Snapshot | None]:
        """Return what the worker before this one, on the same node, has left in memory."""
        kept = self._agent.handed_over()
        if kept is None or not state.replicated:
            return None, None
        try:
            snapshot = Snapshot.from_memory(kept.path)
        except (OSError, CheckpointDamaged, ValueError) as error:
            _LOG.warning("The state in memory cannot be read: %s", error)
            return None, None
        return RecoverableState(kept.step, kept.round, kept.rank, snapshot.position, snapshot.save_pending), snapshot

    def _restore(self, state: TrackedState, own: tuple[RecoverableState | None, Snapshot | None]) -> None:
        """Bring all ranks to the furthest state that one of them, or the storage, has. A collective."""
        offer, inherited = own
        live = offer is not None and inherited is None
        offers = self._world.control.gather(offer)
        reference = self._checkpoints.committed()
        source = choose(offers, None if reference is None else reference.step)
        if source is None:
            where = self._restore_from_storage(state, live=live)
        else:
            chosen = offers[source]
            assert chosen is not None
            same = [chosen.same(each) for each in offers]
            snapshot = inherited
            if not all(same):
                mine = self._snapshot() if live and self._world.control.rank == source else inherited
                snapshot = Snapshot.broadcast(mine, source, self._world.control)
            if not (live and same[self._world.control.rank]):
                assert snapshot is not None
                self._apply(state, snapshot, live=live)
                if not live:
                    self._go_on_with_random(inherited if same[self._world.control.rank] else None)
            else:
                # All ranks must ask each other about checkpoints after the same steps from here on.
                self._begin(self._cadence.unsaved_seconds)
            where = "memory"
            if reference is not None and reference.step == self.steps:
                self._saved_at = (self.steps, self._position.here())
            if any(each is not None and each.save_pending and each.step == chosen.step for each in offers):
                self._agent.restored(self.steps, where)
                self.save()
                return
        self._agent.restored(self.steps, where)

    def _restore_from_storage(self, state: TrackedState, *, live: bool) -> str | None:
        self._torn = True  # until all of it is restored
        restored = self._checkpoints.restore(state)
        self.steps, self._saved_at, unsaved = 0, None, 0.0
        data = None
        if restored is not None:
            self.steps, data = restored.reference.step, restored.data
        self._go_to(data, live=live)
        if restored is not None:
            self._saved_at = (self.steps, self._position.here())
        self._begin(unsaved)
        self.half_step = self._torn = False  # restoring an optimizer makes it step, by nothing
        return None if restored is None else restored.reference.directory

    def _apply(self, state: TrackedState, snapshot: Snapshot, *, live: bool) -> None:
        self._torn = True
        with torch.no_grad():
            state.restore(snapshot.state, snapshot.tensors)
        self.steps = snapshot.step
        self._go_to(snapshot.data, live=live)
        self._begin(snapshot.unsaved_seconds)
        self._saved_at = None
        self.half_step = self._torn = False

    def _go_on_with_random(self, inherited: Snapshot | None) -> None:
        """Continue the generators of the worker before this one, whose state is that of all ranks, or begin anew."""
        if inherited is not None and inherited.random is not None and self._identity.local_rank == 0:
            random_state.restore(random_state.from_text(inherited.random), self._world.device)
        else:
            random_state.begin("step", self.steps, "rank", self._identity.rank)

    def _go_to(self, data: Any, *, live: bool) -> None:
        """Take over a position in the data; what the script does between two epochs cannot be repeated or left out."""
        epochs = self._position.epochs
        self._position.load(data)
        self._rate.load(None if data is None else data["rate"])
        if live and epochs != self._position.epochs:
            raise RoundBroken(
                f"The state of step {self.steps} is in the epochs {self._position.epochs} of run and loaders, but this "
                f"process's loop is in {epochs}."
            )
