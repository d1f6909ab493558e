"""Copies without weights of sharded models, which a rank calls alone.

Each forward pass of a model that FSDP2 shards is a collective, for which the ranks gather the weights. A step that is
trained already is repeated by each rank alone, so it must not call such a model. A *hollow* copy answers in its place:
the same modules on one rank, each of whose weights is a zero of shape () that is expanded to that of the whole weight.
It takes no memory, runs the model's own code, and gives outputs of the right structure and shapes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_SHARDED = "FSDPModule"

_SHARDING = "torch.distributed."
"""Beginning of the names of the modules whose hooks gather and reshard weights."""

_COMPILED = "_orig_mod"
"""Name of the module that a compiled one was made of."""

_LEFT_OUT = ("__composable_api", "_compiled_call_impl")
"""Beginnings of the names of attributes that belong to the sharding, and of what stands for a model's call."""


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
    kind = type(module)  # fully_shard() gives a module a new class, of FSDPModule and its own
    while any(base.__name__ == _SHARDED for base in kind.__bases__):
        kind = next(base for base in kind.__bases__ if base.__name__ != _SHARDED)
    return kind


def _zeros(parameter: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> nn.Parameter:
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    zero = torch.zeros((), dtype=kind, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)


def _gathers(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith(_SHARDING)
