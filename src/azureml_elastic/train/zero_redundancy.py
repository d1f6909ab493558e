"""The state of ``torch.distributed.optim.ZeroRedundancyOptimizer``: each rank has that of its own parameters.

Torch can only gather it on one rank. Here each rank saves what it owns under the parameters' names, the names that the
state of an ordinary optimizer has; at another world size each rank takes what it owns then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from azureml_elastic.errors import UsageError

__all__ = ["collect", "is_zero_redundancy", "owned_paths", "restore"]

_STATE = "state"
_WRAPPER = "module."


def is_zero_redundancy(value: Any) -> bool:
    """Whether this is such an optimizer; without importing it."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)


def collect(name: str, optimizer: Any, module: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings, the same on all ranks, and the tensors that this rank owns.

    Args:
        name: under which the optimizer is tracked.
        optimizer: the ZeroRedundancyOptimizer.
        module: whose parameters it has.

    Raises:
        UsageError: its state holds something other than tensors.
    """
    tensors = {}
    for parameter, path in _owned(name, optimizer, module):
        for key, value in optimizer.optim.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"The state of {name!r} holds {key}={value!r} for {path!r}; of a ZeroRedundancyOptimizer only "
                    "tensors can be saved. Use an optimizer of torch.optim in it."
                )
            tensors[f"{path}/{key}"] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"param_groups": groups}, tensors


def owned_paths(name: str, optimizer: Any, module: nn.Module) -> set[str]:
    """Return the names of the tensors that this rank wants, each without its last part."""
    return {path for _, path in _owned(name, optimizer, module)}


def restore(
    name: str, optimizer: Any, module: nn.Module, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put back what :func:`collect` returned, on whichever ranks, of an ordinary optimizer as well.

    Raises:
        ValueError: it has another number of parameter groups.
    """
    groups = state["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"it has {len(groups)} parameter groups, not {len(optimizer.param_groups)}")
    for mine in (optimizer.param_groups, optimizer.optim.param_groups):
        for group, saved in zip(mine, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    by_path: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, kind = key.rpartition("/")
        by_path.setdefault(path, {})[kind] = tensor
    for parameter, path in _owned(name, optimizer, module):
        if found := by_path.get(path):
            # As torch has it: what has no dimension, such as Adam's step, stays on the CPU.
            optimizer.optim.state[parameter] = {
                kind: tensor.clone() if tensor.dim() == 0 else tensor.to(parameter.device, copy=True)
                for kind, tensor in found.items()
            }


def _owned(name: str, optimizer: Any, module: nn.Module) -> list[tuple[torch.Tensor, str]]:
    names = {parameter: key.removeprefix(_WRAPPER) for key, parameter in module.named_parameters()}
    return [
        (parameter, f"{name}/{_STATE}/{names[parameter]}")
        for group in optimizer.optim.param_groups
        for parameter in group["params"]
    ]
