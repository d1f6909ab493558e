"""State dicts as JSON and tensors, so that no pickle is loaded from a checkpoint.

A nested state is split into *plain* JSON, with placeholders for tensors, and a flat mapping of names to tensors. JSON
has neither tuples nor infinity nor keys other than strings: such values are stored as an object with one key that
starts with ``$``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from azureml_elastic.checkpoint.format.manifest import FLAT
from azureml_elastic.errors import CheckpointDamaged, UsageError

_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$map": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def split(name: str, value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state into plain JSON and tensors by name, whose prefix is the name of the state.

    Raises:
        UsageError: it holds anything but mappings, lists, tuples, sets, tensors, numbers, text, bytes and ``None``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(name, value, tensors), tensors


def _split(path: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        while path in tensors:  # the keys 1 and "1" have the same path, as have "a/b" and "b" below "a"
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):  # after the bools, which are ints too; those of subclasses become plain
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {key: _split(f"{path}/{key}", item, tensors) for key, item in value.items()}
        # Keys such as numbers or tuples are not keys of JSON, and one that begins with $ would be taken for a mark.
        pairs = [[_split(path, key, {}), _split(f"{path}/{key}", item, tensors)] for key, item in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$map": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_split(f"{path}/{index}", item, tensors) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise UsageError(
        f"The state at {path!r} holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold without pickle. Have its state_dict() return tensors, numbers, text, bytes, None and lists, "
        "tuples, sets or mappings of these."
    )


def tensor_names(plain: Any) -> set[str]:
    """Return the names of the tensors in a state as JSON."""
    if isinstance(plain, dict):
        if set(plain) == {"$tensor"}:
            return {plain["$tensor"]}
        return {name for item in plain.values() for name in tensor_names(item)}
    return {name for item in plain for name in tensor_names(item)} if isinstance(plain, list) else set()


def join(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that :func:`split` was called with; named tuples become tuples.

    Raises:
        CheckpointDamaged: a placeholder is unknown, or its tensor is missing.
    """
    if isinstance(plain, list):
        return [join(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not (kind := next(iter(plain))).startswith("$"):
        return {key: join(item, tensors) for key, item in plain.items()}
    content = plain[kind]
    if kind == "$tensor":
        if content not in tensors:
            raise CheckpointDamaged(f"The checkpoint's manifest names the tensor {content!r}, which it does not hold.")
        return tensors[content]
    if kind == FLAT:
        return tensors[content[0]]
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return base64.b64decode(content)
    items = [join(item, tensors) for item in content]
    if kind not in _COLLECTIONS:
        raise CheckpointDamaged(f"The checkpoint's manifest holds {kind!r}, which this release does not support.")
    return _COLLECTIONS[kind](items)
