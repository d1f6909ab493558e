"""Numbers, texts and lists of them in attributes of objects that keep state, such as the count of an average's updates.

A loop that is not repeated after a restart would begin them anew: a session's, and that of a stack's trainer. What the
stack's own classes set is theirs to restore.
"""

from __future__ import annotations

import dis
import json
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import xxhash
from torch import nn

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.train.found.search import is_of_stack, own_attributes, package_of

__all__ = ["Numbers"]

_MOST_ELEMENTS = 10_000
_DEEPEST = 3
_SIMPLE = (int, float, bool, type(None), str)


class Numbers:
    """The plain attributes of some objects, by the paths of these, and which of them change."""

    def __init__(self) -> None:
        self.state: set[str] = set()
        self._holders: dict[str, Any] = {}  # by path; they live as long as what is found in them
        self._paths: dict[int, str] = {}
        self._first: dict[str, str] = {}
        self._changed: set[str] = set()

    def watch(self, holders: Iterable[tuple[str, Any]]) -> None:
        """Watch the attributes of further objects."""
        for path, holder in holders:
            if id(holder) not in self._paths and package_of(type(holder)) != "torch":
                self._paths[id(holder)] = path
                self._holders[path] = holder

    def changed(self) -> dict[str, int]:
        """Return checksums of the present values, of attributes that have changed since they were seen first."""
        now = {path: json.dumps(value) for path, value in self._values().items()}
        self._changed |= {path for path, text in now.items() if self._first.setdefault(path, text) != text}
        return {path: xxhash.xxh3_64_intdigest(now[path].encode()) for path in now.keys() & self._changed}

    def collect(self) -> dict[str, Any]:
        """Return the values of those that are state, as JSON."""
        return self._values(self.state) if self.state else {}

    def put(self, values: Mapping[str, Any]) -> list[str]:
        """Set what :meth:`collect` has returned; return the paths of what has no object here."""
        missing = []
        for path, value in values.items():
            prefix, _, name = path.rpartition(".")
            if prefix in self._holders:
                _set(self._holders[prefix], name, tree.join(value, {}))
            else:
                missing.append(path)
        return missing

    def _values(self, wanted: set[str] | None = None) -> dict[str, Any]:
        found = {}
        for prefix, holder in self._holders.items():
            for name, value in _attributes(holder).items():
                path = f"{prefix}.{name}"
                if (wanted is None or path in wanted) and _is_plain(value):
                    found[path] = tree.split(path, list(value) if type(value) is deque else value)[0]
        return found


def _attributes(holder: Any) -> dict[str, Any]:
    kind: Any = type(holder)
    theirs = _set_by_stacks(kind)
    return {name: value for name, value in own_attributes(holder).items() if name not in theirs and "." not in name}


@cache
def _set_by_stacks(kind: Any) -> frozenset[str]:
    """Return the attributes that methods of a class's bases set, where these are a stack's or torch's."""
    names: set[str] = set()
    for base in kind.__mro__:
        if is_of_stack(base) or issubclass(nn.Module, base):
            for member in base.__dict__.values():
                if isinstance(member, FunctionType):
                    names |= _stored(member.__code__)
    return frozenset(names)


def _stored(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return own.union(*map(_stored, inner))


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in _SIMPLE:
        return True
    if depth >= _DEEPEST or not isinstance(value, (list, tuple, deque, dict)) or len(value) > _MOST_ELEMENTS:
        return False
    if isinstance(value, dict):
        return package_of(kind) in ("builtins", "collections") and all(
            type(key) in _SIMPLE and _is_plain(each, depth + 1) for key, each in value.items()
        )
    return kind in (list, tuple, deque) and all(_is_plain(each, depth + 1) for each in value)


def _set(holder: Any, name: str, value: Any) -> None:
    """Set an attribute; a list or dictionary is filled in place, as others may refer to it."""
    before = _attributes(holder).get(name)
    if isinstance(before, dict) and isinstance(value, dict):
        _fill(before, value)
    elif isinstance(before, list) and isinstance(value, list):
        before[:] = value
    elif isinstance(before, deque) and isinstance(value, list):
        before.clear()
        before.extend(value)
    else:
        object.__setattr__(holder, name, value)


def _fill(before: dict[Any, Any], values: dict[Any, Any]) -> None:
    for key in [key for key in before if key not in values]:
        del before[key]
    for key, value in values.items():
        if isinstance(before.get(key), dict) and isinstance(value, dict):
            _fill(before[key], value)  # which may make values for keys that it lacks
        else:
            before[key] = value
