"""The state of Horovod's elastic mode, with commits that outlive all workers.

They are checkpoints of the run, saved by rank 0 while training goes on.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState as HorovodState
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_elastic.checkpoint.checkpoints import Checkpoints
from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.state.tree import join, split
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.distributed.process import WorkerSettings, pick_device
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.agent_interface import Agent, WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.horovod.relay import RelayedAgent, server_address, watch_for_losses
from azureml_elastic.train.session.run import earlier_checkpoint

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

        Raises:
            CheckpointError: several checkpoints in a row could not be written.
        """
        self._agent.completed(commits)
        self._settle(commits, 0)
        if not self._schedule.due(commits):
            return
        self._settle(commits, None)  # one save at a time: the schedule has left this one long enough
        self._checkpoints.require()
        self._schedule.saving(commits)
        self._checkpoints.begin(commits, self._tracked(), None)
        self._schedule.saved()

    def _settle(self, commits: int, timeout: float | None) -> None:
        if self._checkpoints.settle(timeout) is not None:
            self._schedule.written(commits)

    def _tracked(self) -> TrackedState:
        by_state = {
            name: each if isinstance(each, nn.Module) else _State(each.state_dict, each.load_state_dict)
            for name, each in self._objects().items()
        }
        return TrackedState(by_state)


class _State:
    """A state by two functions: reading that of an optimizer itself would make it step, which is a collective."""

    def __init__(self, read: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        self.state_dict, self.load_state_dict = read, load


class TorchState(HorovodState):  # type: ignore[misc]
    """A state for ``hvd.elastic.run`` whose commits rank 0 saves as checkpoints, by the job's checkpoint policy.

    In this it differs from ``hvd.elastic.TorchState``:

    - A run whose workers were all lost goes on from its last checkpoint: the state is restored when it is made.
    - After a change of the workers the state with the most commits is the one that all go on from, whichever rank it is
      on, where Horovod takes that of rank 0, which may be a new worker's.
    - The state of optimizers is copied as it is. Horovod has new workers take an optimizer step without gradients, with
      which their weight decay and momentum go wrong.

    Use it after ``hvd.init()``. Rank 0 restores the checkpoint; all other ranks get it when they synchronize.

    Args:
        optimizer: optimizer, from ``hvd.DistributedOptimizer`` or not.
        checkpoint: changes to the job's checkpoint policy: the fields that it was given. Steps are commits.
        values: further objects of the state: modules, optimizers, ``hvd.elastic.ElasticSampler``, and plain values
            such as the number of the batch, which become attributes.

    Attributes:
        commits: number of commits of the run.

    Raises:
        CheckpointError: the checkpoint cannot be restored, or its folder cannot be used.
        UsageError: the checkpoint does not fit the state.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        checkpoint: CheckpointPolicy | None = None,
        **values: Any,
    ) -> None:
        given: dict[str, Any] = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, commits=0, **values)
        self._policy = checkpoint
        self._checkpoints: CommitCheckpoints | None = None
        address = server_address()
        if address is not None:
            watch_for_losses(address)
        if hvd.rank() == 0 and self._open_checkpoints().restore():
            self._keep()

    def _objects(self) -> dict[str, Any]:
        """Return the modules, optimizers and samplers of the state by name, and its plain values as ``values``."""
        found = {name: handler.value for name, handler in self._handlers.items()}
        return {**found, "values": _State(lambda: dict(self._saved_state), self._restore_values)}

    @override
    def save(self) -> None:
        """Keep a copy of the state in memory, and save it as a checkpoint if one is due. See ``commit()``."""
        self.commits += 1
        super().save()
        if hvd.rank() == 0:
            self._open_checkpoints().committed(self.commits)

    @override
    def sync(self) -> None:
        """Have all ranks continue from the state with the most commits. A collective."""
        commits = hvd.allgather_object(self.commits, name="azureml_elastic.commits")
        source = commits.index(max(commits))
        for name, handler in sorted(self._handlers.items()):  # in the same order on all ranks: collectives follow
            handler.value.load_state_dict(_broadcast(name, handler.value.state_dict(), source))
        self._restore_values(hvd.broadcast_object(self._saved_state, root_rank=source, name="azureml_elastic.values"))
        self._keep()
        if hvd.rank() == 0:
            self._open_checkpoints().enter(self.commits)

    def _open_checkpoints(self) -> CommitCheckpoints:
        """Return the checkpoints, which only rank 0 has: another process after a loss, perhaps."""
        if self._checkpoints is None:
            self._checkpoints = CommitCheckpoints(self._objects, self._policy)
        return self._checkpoints

    def _keep(self) -> None:
        """Make the state what is restored after an error before the next commit."""
        for handler in self._handlers.values():
            handler.save()

    def _restore_values(self, values: Mapping[str, Any]) -> None:
        self._saved_state = dict(values)
        self._set_attrs()


def _broadcast(name: str, state: Any, source: int) -> Any:
    """Return one rank's state dict on all ranks. A collective."""
    plain, tensors = split(name, state)
    kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    plain, kinds = hvd.broadcast_object((plain, kinds), root_rank=source, name=f"azureml_elastic.{name}")
    received = {}
    for key, (shape, dtype) in kinds.items():
        own = tensors.get(key)
        device = torch.device("cpu") if own is None else own.device
        sent = own.detach().contiguous() if own is not None and hvd.rank() == source else None
        buffer = torch.empty(shape, dtype=dtype, device=device) if sent is None else sent.clone()
        received[key] = hvd.broadcast(buffer, root_rank=source, name=f"azureml_elastic.{key}")
    return join(plain, received)
