"""The state of Horovod's elastic mode, with commits that outlive all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState as HorovodState
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_elastic.checkpoint.state.tree import join, split
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.train.horovod.commits import CommitCheckpoints
from azureml_elastic.train.horovod.loss_watch import watch_for_losses
from azureml_elastic.train.horovod.relay import server_address

__all__ = ["TorchState"]


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
        model: model.
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
        return {**found, "values": _Values(self._saved_state, self._restore_values)}

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
        for name, handler in sorted(self._handlers.items()):
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


class _Values:
    """Plain values as an object with a state."""

    def __init__(self, values: Mapping[str, Any], restore: Any) -> None:
        self._values = values
        self._restore = restore

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restore(state)


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
