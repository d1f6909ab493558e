"""The state of ``torch.distributed.optim.ZeroRedundancyOptimizer``, of which each rank holds that of its parameters.

Torch can only gather it on one rank. Here each rank saves its part under the names that the state of an ordinary
optimizer has, and reads the part of the parameters that it has at the new world size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from azureml_elastic.checkpoint.state.tracked import Tensors, Tracked, restore_settings, settings_of
from azureml_elastic.errors import UsageError

__all__ = ["ZeroRedundancyState", "is_zero_redundancy"]

_STATE = "state"
_WRAPPER = "module."


def is_zero_redundancy(value: Any) -> bool:
    """Return whether this is a ``ZeroRedundancyOptimizer``, without importing it."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)


class ZeroRedundancyState(Tracked):
    """The state of a ``ZeroRedundancyOptimizer``.

    Args:
        name: name of the object.
        optimizer: the optimizer.
        owner: module with its parameters.
    """

    def __init__(self, name: str, optimizer: Any, owner: nn.Module) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        self._owner = owner

    @property
    def replicated(self) -> bool:
        """Always false."""
        return False

    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the settings, the same on all ranks, and the tensors of this rank.

        Raises:
            UsageError: the state holds something other than tensors.
        """
        tensors = {}
        for parameter, path in self._owned():
            for key, value in self.optimizer.optim.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise UsageError(
                        f"The state of {self.name!r} holds {key}={value!r} for {path!r}; of a ZeroRedundancyOptimizer "
                        "only tensors can be saved. Use an optimizer of torch.optim in it."
                    )
                tensors[f"{path}/{key}"] = value
        return {"param_groups": settings_of(self.optimizer.param_groups)}, tensors

    def common(self, tensors: Tensors) -> set[str]:
        """Return all names: the tensors belong to this rank."""
        return set(tensors)

    def wants(self, tensor: str) -> bool:
        """Return whether this rank has the parameter."""
        return tensor.rpartition("/")[0] in self._paths

    def restore(self, plain: Any, tensors: Tensors) -> None:
        """Restore what :meth:`collect` returned, or the state of an ordinary optimizer.

        Raises:
            ValueError: the number of parameter groups differs.
        """
        for mine in (self.optimizer.param_groups, self.optimizer.optim.param_groups):
            restore_settings(mine, plain["param_groups"])
        by_path: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            path, _, kind = key.rpartition("/")
            by_path.setdefault(path, {})[kind] = tensor
        for parameter, path in self._owned():
            if found := by_path.get(path):
                # As in torch, tensors without dimensions, such as Adam's step, stay on the CPU.
                self.optimizer.optim.state[parameter] = {
                    kind: tensor.clone() if tensor.dim() == 0 else tensor.to(parameter.device, copy=True)
                    for kind, tensor in found.items()
                }

    @functools.cached_property
    def _paths(self) -> set[str]:
        return {path for _, path in self._owned()}

    def _owned(self) -> list[tuple[torch.Tensor, str]]:
        names = {parameter: key.removeprefix(_WRAPPER) for key, parameter in self._owner.named_parameters()}
        return [
            (parameter, f"{self.name}/{_STATE}/{names[parameter]}")
            for group in self.optimizer.optim.param_groups
            for parameter in group["params"]
        ]
