"""Tensors within the nested inputs and outputs of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "rebuilt", "tensors_of"]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of a nested value, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value of the same classes, with the results of a function in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return rebuilt(value, {key: map_tensors(function, each) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [map_tensors(function, each) for each in value])
    return value


def rebuilt(value: Any, items: Any) -> Any:
    """Return a mapping or sequence of the class of another, with other items.

    torch's own ``tree_map`` takes objects of classes that nobody has registered, such as a tokenizer's
    ``BatchEncoding``, for single values.
    """
    kind = type(value)
    if not isinstance(value, Mapping):
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    try:
        return kind(items)
    except TypeError:  # a dataclass with fields of its own
        return kind(**items)
