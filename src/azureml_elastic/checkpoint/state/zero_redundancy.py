"""The state of ``torch.distributed.optim.ZeroRedundancyOptimizer``, of which each rank holds that of its parameters.

Torch can only gather it on one rank. Here each rank saves its part under the names that the state of an ordinary
optimizer has, and reads the part of the parameters that it has at the new world size.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from azureml_elastic.checkpoint.state.compatibility import tensor_differences
from azureml_elastic.checkpoint.state.tracked import (
    Kinds,
    Tensors,
    Tracked,
    canonical_names,
    restore_settings,
    settings_of,
)
from azureml_elastic.errors import UsageError

__all__ = ["ZeroRedundancyState", "is_zero_redundancy"]


def is_zero_redundancy(value: Any) -> bool:
    """Return whether this is a ``ZeroRedundancyOptimizer``, without importing it."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)


@dataclass(eq=False)
class ZeroRedundancyState(Tracked):
    """The state of a ``ZeroRedundancyOptimizer``, whose parameters belong to the owner."""

    replicated: bool = field(default=False, init=False)
    optimizer: Any
    owner: nn.Module

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
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

    @property
    @override
    def class_name(self) -> str:
        return type(self.optimizer.optim).__name__

    @override
    def differences(self, plain: Any, stored: Kinds, present: Kinds) -> list[str]:
        common = stored.keys() & present.keys()  # each rank has a part
        return tensor_differences({name: stored[name] for name in common}, {name: present[name] for name in common})

    @override
    def wants(self, tensor: str) -> bool:
        return tensor.rpartition("/")[0] in self._paths

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        for mine in (self.optimizer.param_groups, self.optimizer.optim.param_groups):
            restore_settings(mine, plain["param_groups"])
        by_path: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            path, _, kind = key.rpartition("/")
            by_path[path][kind] = tensor
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
        names = canonical_names(self.owner)
        return [
            (parameter, f"{self.name}/state/{names[parameter]}")
            for group in self.optimizer.optim.param_groups
            for parameter in group["params"]
        ]
