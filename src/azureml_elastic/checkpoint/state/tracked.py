"""What can be tracked: each kind of object knows how its state is taken apart, and put back.

Modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which names everything by the parameter's
canonical name: the wrapper of data parallelism leaves no trace, and FSDP2's shards stay shards. Anything else with
``state_dict`` and ``load_state_dict`` is taken from rank 0.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from azureml_elastic.checkpoint.state import tree

__all__ = [
    "ModuleState",
    "OptimizerState",
    "OtherState",
    "Stateful",
    "Tracked",
    "owner_of",
    "restore_settings",
    "settings_of",
    "unwrap_optimizer",
    "unwrap_scheduler",
]

Tensors = Mapping[str, torch.Tensor]


@runtime_checkable
class Stateful(Protocol):
    """What can be tracked besides modules and optimizers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state."""


class Tracked(ABC):
    """An object whose state a checkpoint holds.

    Args:
        name: under which it is tracked, the first part of its tensors' names.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return True

    @property
    def scales_gradients(self) -> bool:
        """Whether it does not bear an optimizer step without gradients."""
        return False

    @abstractmethod
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the state as JSON and as tensors, which alias the live ones, by name.

        Raises:
            UsageError: it cannot be saved.
        """

    @abstractmethod
    def common(self, tensors: Tensors) -> set[str]:
        """Return the names of the tensors that this rank may write although it is not rank 0.

        That is not so for what the library does not keep equal on all ranks: there rank 0's word counts.
        """

    def targets(self, plain: Any) -> dict[str, torch.Tensor]:  # noqa: ARG002 - for those whose state is made late
        """Return tensors to read a checkpoint into.

        Args:
            plain: the checkpoint's state as JSON.
        """
        return self.collect()[1]

    def wants(self, tensor: str) -> bool:  # noqa: ARG002 - for those that hold only a part
        """Tell by its name whether this rank needs one of the object's tensors."""
        return True

    @abstractmethod
    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Put back what :meth:`collect` returned, on whichever ranks.

        Raises:
            RuntimeError: it does not fit.
            ValueError: it does not fit.
            KeyError: it does not fit.
        """


class ModuleState(Tracked):
    """The state of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self.module = module

    @property
    def replicated(self) -> bool:
        """Whether it is not sharded."""
        kinds = {type(module).__name__ for module in self.module.modules()}
        sharded = any(isinstance(tensor, DTensor) for tensor in self.module.parameters())
        return "FullyShardedDataParallel" not in kinds and not sharded

    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return parameters and buffers."""
        return tree.split(self.name, get_model_state_dict(self.module))

    def common(self, tensors: Tensors) -> set[str]:
        """Return all but the buffers, which data parallelism does not keep equal."""
        buffers = {buffer.untyped_storage().data_ptr() for buffer in self.module.buffers()}
        return {
            key
            for key, tensor in tensors.items()
            if isinstance(tensor, DTensor) or tensor.untyped_storage().data_ptr() not in buffers
        }

    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Load it."""
        set_model_state_dict(self.module, tree.join(plain, tensors))


class OptimizerState(Tracked):
    """The state of an optimizer of torch's kind.

    Args:
        name: under which it is tracked.
        optimizer: whose state it is.
        owner: the module whose parameters it has.
    """

    def __init__(self, name: str, optimizer: Optimizer, owner: nn.Module) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        self._owner = owner

    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the state by the names of the parameters. The first look at it makes it step, by nothing."""
        return tree.split(self.name, get_optimizer_state_dict(self._owner, self.optimizer))

    def common(self, tensors: Tensors) -> set[str]:
        """Return all of them."""
        return set(tensors)

    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Load it."""
        options = StateDictOptions(strict=False)  # a parameter without a gradient has no state yet
        set_optimizer_state_dict(self._owner, self.optimizer, tree.join(plain, tensors), options=options)


class OtherState(Tracked):
    """The state of anything else."""

    def __init__(self, name: str, value: Stateful) -> None:
        super().__init__(name)
        self.value = value

    @property
    def scales_gradients(self) -> bool:
        """Whether it is a ``GradScaler``."""
        return type(self.value).__name__ == "GradScaler"

    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return its ``state_dict()``."""
        return tree.split(self.name, self.value.state_dict())

    def common(self, tensors: Tensors) -> set[str]:  # noqa: ARG002 - nothing is known of it
        """Return none."""
        return set()

    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Load it."""
        self.value.load_state_dict(tree.join(plain, tensors))

    def copy(self) -> Any:
        """Return a copy of its state."""
        return copy.deepcopy(self.value.state_dict())

    def put_back(self, state: Any) -> None:
        """Load what :meth:`copy` returned."""
        self.value.load_state_dict(state)


def settings_of(groups: Iterable[Mapping[str, Any]]) -> Any:
    """Return the settings of parameter groups as JSON; a tensor, as a learning rate may be, as the number it is."""
    return [
        tree.split("", {key: _number(value) for key, value in group.items() if key != "params"})[0] for group in groups
    ]


def restore_settings(groups: Sequence[dict[str, Any]], saved: Any) -> None:
    """Put back what :func:`settings_of` returned, where there is a tensor into the tensor.

    Raises:
        ValueError: there is another number of groups.
    """
    if len(groups) != len(saved):
        raise ValueError(f"it has {len(saved)} parameter groups, not {len(groups)}")
    for group, plain in zip(groups, saved, strict=True):
        for key, value in tree.join(plain, {}).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def owner_of(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module that has all parameters of an optimizer."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    having: Callable[[nn.Module], bool] = lambda module: wanted <= {id(each) for each in module.parameters()}  # noqa: E731
    return next(filter(having, modules.values()), None)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper; any other object is returned unchanged."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def unwrap_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside Accelerate's wrapper; any other object is returned unchanged."""
    return scheduler.scheduler if type(scheduler).__name__ == "AcceleratedScheduler" else scheduler
