"""The state of what a user tracks: collected into JSON and tensors, and put back.

Modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which names everything by the parameter's
canonical name: the wrapper of data parallelism leaves no trace, and FSDP2's shards stay shards. Anything else with
``state_dict`` and ``load_state_dict`` is taken from rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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

from azureml_elastic.errors import UsageError
from azureml_elastic.train import tree, zero_redundancy

__all__ = ["Stateful", "TrackedState"]


@runtime_checkable
class Stateful(Protocol):
    """What can be tracked besides modules and optimizers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state."""


class TrackedState:
    """Everything that a checkpoint of this run holds.

    Args:
        objects: by the name under which a checkpoint holds them.
        on_step: called after each step of a tracked optimizer.

    Raises:
        UsageError: an object has no state, or an optimizer's parameters are in no tracked module.
    """

    def __init__(self, objects: Mapping[str, Any], on_step: Callable[[], None] = lambda: None) -> None:
        self.names = sorted(objects)
        self._objects = dict(objects)
        self._modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self._owners: dict[str, nn.Module] = {}
        for name, value in objects.items():
            if "/" in name:
                raise UsageError(f"The name {name!r} holds a '/', which separates the parts of tensors' names.")
            if isinstance(value, Optimizer):
                value.register_step_post_hook(lambda *_: on_step())
                self._owners[name] = self._owner(name, value)
            elif not isinstance(value, Stateful):
                raise UsageError(
                    f"{name}={value!r} cannot be tracked: it has no state_dict() and load_state_dict(). Track modules, "
                    "optimizers, and objects with both methods."
                )

    def _owner(self, name: str, optimizer: Optimizer) -> nn.Module:
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._modules.values():
            if wanted <= {id(parameter) for parameter in module.parameters()}:
                return module
        raise UsageError(
            f"The parameters of {name!r} ({type(optimizer).__name__}) do not all belong to one tracked module, so "
            f"they have no names; tracked are {sorted(self._modules)}. Track the module that the optimizer was "
            "made for, in the same call; put several into one nn.ModuleDict."
        )

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of the state."""
        if any(zero_redundancy.is_zero_redundancy(value) for value in self._objects.values()):
            return False
        modules = [module for value in self._modules.values() for module in value.modules()]
        tensors = [tensor for value in self._modules.values() for tensor in value.parameters()]
        return not any(type(module).__name__ == "FullyShardedDataParallel" for module in modules) and not any(
            isinstance(tensor, DTensor) for tensor in tensors
        )

    @property
    def scales_gradients(self) -> bool:
        """Whether a ``GradScaler`` is tracked, which does not bear an optimizer step without gradients."""
        return any(type(value).__name__ == "GradScaler" for value in self._objects.values())

    def drop_gradients(self) -> None:
        """Forget all gradients: an optimizer step then changes nothing."""
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    def others(self) -> dict[str, Any]:
        """Return a copy of the states of what is neither module nor optimizer, such as schedulers."""
        return {
            name: copy.deepcopy(value.state_dict())
            for name, value in self._objects.items()
            if not isinstance(value, nn.Module | Optimizer)
        }

    def restore_others(self, states: Mapping[str, Any]) -> None:
        """Put back what :meth:`others` returned."""
        for name, state in states.items():
            self._objects[name].load_state_dict(state)

    def collect(self, *, is_main: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state as JSON and as tensors that alias the live ones.

        Args:
            is_main: whether this is rank 0, whose word counts for what all ranks hold a copy of but the library
                does not keep equal: buffers, and objects that are neither module nor optimizer.

        Raises:
            UsageError: a state holds what cannot be saved.
        """
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self._objects.items():
            if zero_redundancy.is_zero_redundancy(value):
                settings, found = zero_redundancy.collect(name, value, self._owners[name])
                plain[name], _ = tree.split(name, settings)
            else:
                plain[name], found = tree.split(name, self._state_of(name, value))
            if not is_main:
                keep = self._replicated(value, found)
                found = {key: tensor for key, tensor in found.items() if key in keep}
            tensors.update(found)
        return plain, tensors

    def wanted(self) -> Callable[[str], bool]:
        """Return what tells, by its name, whether this rank needs a tensor of a checkpoint."""
        owned = {
            f"{name}/state/": zero_redundancy.owned_paths(name, value, self._owners[name])
            for name, value in self._objects.items()
            if zero_redundancy.is_zero_redundancy(value)
        }

        def wants(tensor: str) -> bool:
            for prefix, paths in owned.items():
                if tensor.startswith(prefix):
                    return tensor.rpartition("/")[0] in paths
            return True

        return wants

    def _state_of(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return get_model_state_dict(value)
        if isinstance(value, Optimizer):
            return get_optimizer_state_dict(self._owners[name], value)
        return value.state_dict()

    @staticmethod
    def _replicated(value: Any, found: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the tensors that this rank may write although it is not rank 0."""
        if isinstance(value, Optimizer):
            return set(found)
        if not isinstance(value, nn.Module):
            return set()
        buffers = {buffer.untyped_storage().data_ptr() for buffer in value.buffers()}
        return {
            key
            for key, tensor in found.items()
            if isinstance(tensor, DTensor) or tensor.untyped_storage().data_ptr() not in buffers
        }

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what :meth:`collect` returned.

        Raises:
            UsageError: the checkpoint holds other names than are tracked, or does not fit an object.
        """
        for name, value in self._objects.items():
            try:
                if zero_redundancy.is_zero_redundancy(value):
                    settings = tree.join({"param_groups": plain[name]["param_groups"]}, {})
                    zero_redundancy.restore(name, value, self._owners[name], settings, tensors)
                    continue
                state = tree.join(plain[name], tensors)
                if isinstance(value, nn.Module):
                    set_model_state_dict(value, state)
                elif isinstance(value, Optimizer):
                    options = StateDictOptions(strict=False)  # a parameter without a gradient has no state yet
                    set_optimizer_state_dict(self._owners[name], value, state, options=options)
                else:
                    value.load_state_dict(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise UsageError(
                    f"The checkpoint's {name!r} does not fit the {type(value).__name__} of this script: {error} "
                    "Restore the former definition, or start anew with an empty checkpoint folder."
                ) from error

    def require_names(self, saved: Mapping[str, Any]) -> None:
        """Check that a checkpoint holds exactly what is tracked.

        Raises:
            UsageError: it does not.
        """
        if sorted(saved) != self.names:
            raise UsageError(
                f"The checkpoint holds {sorted(saved)}, but this script tracks {self.names}. Track the same names, or "
                "start anew with an empty checkpoint folder."
            )
