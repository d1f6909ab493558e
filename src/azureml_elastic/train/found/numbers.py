"""Numbers, texts and lists of them in attributes of objects that keep state, such as the count of an average's updates.

A loop that is not repeated after a restart would begin them anew: a session's, and that of a stack's trainer. What the
stack's own classes set is theirs to restore.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any

import xxhash

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.train.found.search import own_attributes, package_of, set_by_stacks

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
                    found[path] = tree.split(path, _with_lists(value))[0]
        return found


def _attributes(holder: Any) -> dict[str, Any]:
    kind: Any = type(holder)
    theirs = set_by_stacks(kind)
    return {name: value for name, value in own_attributes(holder).items() if name not in theirs and "." not in name}


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


def _with_lists(value: Any) -> Any:
    """Return the value with lists in place of deques, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return [_with_lists(each) for each in value]
    return tuple(map(_with_lists, value)) if isinstance(value, tuple) else value


def _set(holder: Any, name: str, value: Any) -> None:
    if not fill(_attributes(holder).get(name), value):
        object.__setattr__(holder, name, value)


def fill(before: Any, value: Any) -> bool:
    """Fill a container in place, as others may refer to it, with those in it; return whether that is possible."""
    if isinstance(before, MutableMapping) and isinstance(value, Mapping):
        held = {key: before.get(key) for key in value}
        filled = {key: held[key] if fill(held[key], each) else each for key, each in value.items()}
        before.clear()
        before.update(filled)
    elif isinstance(before, (MutableSequence, deque)) and isinstance(value, list):
        before.clear()
        before.extend(value)
    elif isinstance(before, MutableSet) and isinstance(value, set):
        before.clear()
        before |= value
    else:
        return False
    return True
