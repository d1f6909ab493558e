"""Which modules average gradients over the ranks, and the check that a tracked module's gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from azureml_elastic.errors import UsageError

__all__ = ["data_parallel_parts", "require_averaging"]

_DATA_PARALLEL = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}


def data_parallel_parts(module: nn.Module, *others: str) -> list[nn.Module]:
    """Return the parts of a module that are of a class of torch, or of the given names, that averages gradients."""
    wanted = _DATA_PARALLEL.union(others)
    return [part for part in module.modules() if wanted & {kind.__name__ for kind in type(part).__mro__}]


def _averages_gradients(module: nn.Module) -> bool:
    """Return whether all parameters are within DDP, FSDP or a DeepSpeed engine, or DTensors."""
    wrapped = data_parallel_parts(module, "DeepSpeedEngine")
    averaged = {id(parameter) for part in wrapped for parameter in part.parameters()}
    return all(
        id(parameter) in averaged or isinstance(parameter, DTensor)
        for parameter in module.parameters()
        if parameter.requires_grad
    )


def require_averaging(objects: Mapping[str, Any], exempt: Sequence[nn.Module], world_size: int) -> None:
    """Raise ``UsageError`` if a module among the objects does not average its gradients and is not exempt."""
    for name, value in objects.items():
        if not isinstance(value, nn.Module) or any(value is each for each in exempt) or _averages_gradients(value):
            continue
        when = "" if world_size > 1 else " as soon as the run has more than 1 rank"
        raise UsageError(
            f"The gradients of {name}={type(value).__name__} are not averaged over the ranks, so each rank would train "
            f"a model of its own{when}. Write `model = run.wrap(model)` before the optimizer is made, or apply "
            "DistributedDataParallel or fully_shard(). If the script averages the gradients by itself, write "
            "`model = run.wrap(model, average_gradients=False)`."
        )
