"""Tensors within the nested inputs and outputs of models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of a nested value, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    for each in (children(value) or {}).values():
        yield from tensors_of(each)


def children(value: Any) -> dict[Hashable, Any] | None:
    """Return what a mapping, a sequence or a dataclass holds, by key, index or name; ``None`` for a single value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}
    return None


def attributes(value: Any) -> dict[Hashable, Any]:
    """Return the attributes of an object that may hold tensors, such as a graph; none for a single value."""
    if isinstance(value, (torch.Tensor, type, ModuleType, FunctionType, MethodType, torch.nn.Module)):
        return {}
    return dict(getattr(value, "__dict__", {}))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value of the same classes, with the results of a function in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    held = children(value)
    if held is None:
        return value
    return rebuilt(value, {key: map_tensors(function, each) for key, each in held.items()})


def rebuilt(value: Any, items: Any) -> Any:
    """Return a mapping, sequence or dataclass of the class of another, with other items.

    torch's own ``tree_map`` takes objects of classes that nobody has registered, such as a tokenizer's
    ``BatchEncoding``, for single values.

    Args:
        items: its new items by key or name, or those of a sequence in their order
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        held = list(items.values()) if isinstance(items, Mapping) else items
        return kind(*held) if hasattr(value, "_fields") else kind(held)
    if not isinstance(value, Mapping):
        other = copy.copy(value)
        for name, each in items.items():
            object.__setattr__(other, name, each)  # also of a frozen one
        return other
    try:
        return kind(items)
    except TypeError:  # a dataclass with fields of its own
        return kind(**items)
