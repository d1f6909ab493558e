"""Commits of Horovod's elastic state as checkpoints of the run, saved by rank 0 while training goes on."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.opening import open_storage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.process import WorkerSettings, pick_device
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.horovod.relay import RelayedAgent, server_address
from azureml_elastic.train.session.run import earlier_checkpoint

__all__ = ["CommitCheckpoints"]

_LOG = logging.getLogger(__name__)

_LAST_SAVE_SECONDS = 60.0
"""How long the interpreter waits at its exit for a checkpoint that is being written."""


class CommitCheckpoints:
    """The checkpoints of commits, as rank 0 saves them in a process group of its own.

    Args:
        objects: function that returns the objects of the state by name: modules, and others with ``state_dict`` and
            ``load_state_dict``.
        wanted: changes to the job's checkpoint policy.

    Raises:
        CheckpointError: the checkpoint folder cannot be used.
    """

    def __init__(self, objects: Callable[[], Mapping[str, Any]], wanted: CheckpointPolicy | None) -> None:
        settings = WorkerSettings.of(WorkerEnvironment.read())
        # A step is a commit, which is in the memory of all workers.
        without_snapshots = {"snapshot_every": None, "snapshot_every_steps": None}
        policy = settings.policy(wanted).model_copy(update=without_snapshots)
        assert policy.path is not None
        storage = open_storage(policy.path)
        storage.prepare()
        identity = WorkerIdentity(0, 0, 1, settings.identity.round)
        groups = ProcessGroups(identity, pick_device(identity))
        groups.open()
        address = server_address()
        self._agent: Agent = (
            StandaloneAgent(storage, identity, handles_signals=False)
            if address is None
            else RelayedAgent(storage, identity, address)
        )
        self._objects = objects
        self._checkpoints = Checkpoints(policy, storage, groups, self._agent, earlier=earlier_checkpoint(settings.plan))
        self._schedule = CheckpointSchedule(policy, groups.control, clock=time.monotonic)
        atexit.register(self._checkpoints.settle, _LAST_SAVE_SECONDS)

    def restore(self) -> bool:
        """Restore the newest checkpoint; return whether there is one.

        Raises:
            CheckpointError: it cannot be restored.
            UsageError: it does not fit the state.
        """
        manifest = self._checkpoints.restore(self._tracked())
        if manifest is not None:
            _LOG.info("Restored the checkpoint of commit %d.", manifest.step)
        return manifest is not None

    def enter(self, commits: int) -> None:
        """Continue after a number of commits, which this process may not have seen."""
        self._checkpoints.settle()
        self._checkpoints.enter()
        self._checkpoints.committed()
        self._schedule.begin(commits, history=WorkerEnvironment.read().history)
        self._agent.restored(commits, None)

    def committed(self, commits: int) -> None:
        """Save a commit as a checkpoint if one is due, and return when the state may change again.

        Args:
            commits: its number.

        Raises:
            CheckpointError: several checkpoints in a row could not be written.
        """
        self._agent.completed(commits)
        self._settle(commits, 0)
        if not self._schedule.due(commits):
            return
        self._settle(commits, None)
        self._checkpoints.require()
        self._schedule.saving(commits)
        self._checkpoints.begin(commits, self._tracked(), None)
        self._schedule.saved()

    def _settle(self, commits: int, timeout: float | None) -> None:
        if self._checkpoints.settle(timeout) is not None:
            self._schedule.written(commits)

    def _tracked(self) -> TrackedState:
        objects = self._objects()
        return TrackedState(
            {name: value if isinstance(value, nn.Module) else _State(value) for name, value in objects.items()}
        )


class _State:
    """Any object, by its state alone: reading that of an optimizer must not make it step, which is a collective."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._value.load_state_dict(state)
