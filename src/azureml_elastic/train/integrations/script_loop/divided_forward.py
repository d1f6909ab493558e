"""Forward passes of a script's models: in parts where the batch is larger, without weights where a step is repeated.

The forward pass of a batch that is larger than the script's has parts of the script's size. With fewer ranks than the
reference world size a rank's share of a step grows, and a script that counts batches must see as many as before. So its
batch is larger, and a model whose forward is divided here keeps the memory of a small one: each part is computed under
activation checkpointing, which costs one more forward pass, and the outputs are put together. Gradients are those of
the undivided batch, and data parallelism reduces them once, as autograd adds up a parameter's contributions first.

Each forward pass of a model that FSDP2 shards is a collective, for which the ranks gather the weights. A step that is
trained already is repeated by each rank alone, so it must not call such a model. A *hollow* copy answers
in its place: the same modules on one rank, each of whose weights is a single zero in the shape of the whole weight. It
takes no memory, runs the model's own code, and gives outputs of the right structure and shapes.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from azureml_elastic.train.integrations.nested import map_tensors, rebuilt, tensors_of

__all__ = ["HollowModel", "divide_forward", "is_sharded"]

_SHARDED = "FSDPModule"

_SHARDING = "torch.distributed."
"""Beginning of the names of the modules whose hooks gather and reshard weights."""

_COMPILED = "_orig_mod"
"""Name of the module that a compiled one was made of."""

_LEFT_OUT = ("__composable_api", "_compiled_call_impl")
"""Beginnings of the names of attributes that belong to the sharding, and of what stands for a model's call."""

_LOG = logging.getLogger(__name__)

_IGNORED_LABEL = -100

_SHARDED_WEIGHTS = 3

_CACHES = ("past_key_values", "mems", "cache_params")
"""Outputs of language models for the generation of text, of no use in training."""

_SHIFTING = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes whose loss leaves out each sequence's first label."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether a forward pass of a model gathers weights from other ranks, by FSDP2."""
    return any(_is_sharded(module) for module in model.modules())


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == _SHARDED for kind in type(module).__mro__)


class HollowModel:
    """A copy of a sharded model without its weights, which each rank calls alone."""

    def __init__(self, model: nn.Module) -> None:
        state = next(_state(module) for module in model.modules() if _is_sharded(module))
        policy = state._mp_policy  # noqa: SLF001 - FSDP2 has no other way to read it
        self._inputs: torch.dtype | None = policy.param_dtype
        self._outputs: torch.dtype | None = policy.output_dtype
        self._model = _hollow(model, self._inputs, state._device)  # noqa: SLF001 - weights may wait on the CPU

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward pass, in the types in which the sharded model would.

        Raises:
            Exception: the model's own code does not work with such weights.
        """
        args, kwargs = _cast((args, kwargs), self._inputs)
        return _cast(self._model(*args, **kwargs), self._outputs)


def _state(module: Any) -> Any:
    return module._get_fsdp_state()  # noqa: SLF001


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, value)


def _hollow(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """Return a copy of a model whose weights are expanded zeros, and whose buffers are its own."""
    # Not copy.deepcopy: it would copy the shards, and the state and hooks of FSDP2, which gather by it.
    modules = list(model.modules())
    copies: dict[int, Any] = {id(module): object.__new__(_plain_class(module)) for module in modules}
    copies.update((id(parameter), _zeros(parameter, dtype, device)) for parameter in model.parameters())
    compiled = {id(module): module._modules[_COMPILED] for module in modules if _COMPILED in module._modules}  # noqa: SLF001
    # Compiled code refers to the sharded model: the copy is one of the module that it was compiled from.
    copies.update((key, copies[id(inner)]) for key, inner in compiled.items())
    for module in (each for each in modules if id(each) not in compiled):
        copies[id(module)].__dict__.update(
            (name, _copied(value, copies)) for name, value in vars(module).items() if not name.startswith(_LEFT_OUT)
        )
    found: nn.Module = copies[id(model)]
    return found


def _copied(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return an attribute of a module that refers to the copies of modules and weights, also within collections.

    Other objects are shared: they may be of any kind, and hold anything.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copied(value.__self__, copies))
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        kept = ((key, each) for key, each in value.items() if id(each) in copies or not _gathers(each))
        return type(value)((key, _copied(each, copies)) for key, each in kept)
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copies) for each in value)
    return value


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was sharded."""
    kind = type(module)  # fully_shard() gives a module a new class, of FSDPModule and its own
    while any(base.__name__ == _SHARDED for base in kind.__bases__):
        kind = next(base for base in kind.__bases__ if base.__name__ != _SHARDED)
    return kind


def _zeros(parameter: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> nn.Parameter:
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    zero = torch.zeros((), dtype=kind, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)


def _gathers(value: Any) -> bool:
    """Return whether a value is a hook of the sharding."""
    return callable(value) and str(getattr(value, "__module__", "")).startswith(_SHARDING)


class _IndivisibleError(Exception):
    """The outputs of parts cannot be put together, for the reason in the message."""


def divide_forward(model: nn.Module, limit: int) -> None:
    """Have the training batches of a model computed in parts, as far as its inputs and outputs have rows of samples.

    Args:
        limit: samples of a part
    """
    wrapper: Any = model
    stage = wrapper.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
    if stage is not None or isinstance(model, DistributedDataParallel):
        model = wrapper.module
    if reason := _obstacle(model, stage):
        _warn(model, reason)
        return
    inner = model.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A copy of the model, such as one of averaged weights, has this method as well, bound to itself.
        whole = MethodType(inner.__func__, self) if isinstance(inner, MethodType) else inner
        count = _rows_of((args, kwargs))
        if not (self.training and torch.is_grad_enabled()) or count <= limit or self in _undivided:
            return whole(*args, **kwargs)
        try:
            return _in_parts(self, whole, args, kwargs, count, limit)
        except _IndivisibleError as reason:
            _undivided.add(self)
            _warn(self, str(reason))
            return whole(*args, **kwargs)

    model.forward = MethodType(forward, model)


def _obstacle(model: nn.Module, stage: int | None) -> str | None:
    """Return why the forward of a model is not divided, or ``None``."""
    if any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()):
        return "batch normalisation would count each part twice"
    if hasattr(model, "_orig_mod"):
        return "it is compiled"
    if stage == _SHARDED_WEIGHTS or is_sharded(model):
        return "its weights are gathered for each forward pass, of which all ranks must have as many"
    return None


_undivided: WeakSet[nn.Module] = WeakSet()


def _warn(model: nn.Module, reason: str) -> None:
    _LOG.warning(
        "With fewer ranks a batch is larger, and %s takes it whole, with as much memory as it needs: %s.",
        type(model).__name__,
        reason,
    )


def _in_parts(model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, count: int, limit: int) -> Any:
    number = -(-count // limit)
    edges = [count * index // number for index in range(number + 1)]  # of nearly equal parts
    outputs, weights, sizes = [], [], []
    for start, stop in itertools.pairwise(edges):
        part, named = (_cut(each, start, stop, count) for each in (args, kwargs))
        # The reentrant kind takes no named arguments, and runs a backward pass of its own for each part, in which data
        # parallelism would reduce each parameter once more.
        result = checkpoint(forward, *part, use_reentrant=False, **named)
        outputs.append(_without_caches(result))
        weights.append(_count_labels(model, part, named, stop - start))
        sizes.append(stop - start)
    return _joined(outputs, sizes, weights)


# --- inputs ----------------------------------------------------------------------------------------------------------


def _rows_of(inputs: Any) -> int:
    """Return the length of the first tensor among the inputs, 0 if there is none."""
    return next((len(each) for each in tensors_of(inputs) if each.dim()), 0)


def _cut(value: Any, start: int, stop: int, count: int) -> Any:
    """Return the rows of a part, of all tensors that have one for each sample."""
    return map_tensors(lambda each: each[start:stop] if each.dim() and len(each) == count else each, value)


def _count_labels(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> int:
    """Return the number of labels of a part, over which a model's own loss is a mean; the samples if it has none."""
    given = (kwargs, *(each for each in args if isinstance(each, Mapping)))
    labels = next((each["labels"] for each in given if "labels" in each), None)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return samples
    if labels.dim() > 1 and any(kind.__name__.endswith(_SHIFTING) for kind in type(model).__mro__):
        labels = labels[..., 1:]
    return int(labels.ne(_IGNORED_LABEL).sum())


# --- outputs ---------------------------------------------------------------------------------------------------------


def _without_caches(output: Any) -> Any:
    if isinstance(output, Mapping) and any(name in output for name in _CACHES):
        return rebuilt(output, {key: value for key, value in output.items() if key not in _CACHES})
    return output


def _joined(parts: list[Any], sizes: list[int], weights: list[int]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return _joined_tensors(parts, sizes, weights)
    if isinstance(first, Mapping):
        return rebuilt(first, {key: _joined([part[key] for part in parts], sizes, weights) for key in first})
    if isinstance(first, (list, tuple)):
        return rebuilt(first, [_joined(list(each), sizes, weights) for each in zip(*parts, strict=True)])
    try:
        same = all(each is first or bool(each == first) for each in parts)
    except (TypeError, ValueError, RuntimeError):
        same = False
    if not same:
        raise _IndivisibleError(f"its outputs have a {type(first).__name__} that differs from part to part")
    return first


def _joined_tensors(parts: list[torch.Tensor], sizes: list[int], weights: list[int]) -> torch.Tensor:
    if not parts[0].dim():
        if not parts[0].is_floating_point():
            raise _IndivisibleError("its outputs have a number without a row for each sample")
        # The mean over no label is NaN, and so would be the gradient of its product with 0.
        counted = [part * weight for part, weight in zip(parts, weights, strict=True) if weight]
        return torch.stack(counted).sum() / sum(weights) if counted else parts[0]
    rows = len(parts[0]) // sizes[0]
    if not rows or any(len(part) != rows * size for part, size in zip(parts, sizes, strict=True)):
        shape = tuple(parts[0].shape)
        raise _IndivisibleError(f"its outputs have a tensor of shape {shape} for {sizes[0]} samples")
    return torch.cat(parts)
