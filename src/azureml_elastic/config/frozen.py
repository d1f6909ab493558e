"""Frozen models: their mappings, which are read only, and what is said to a change, which is made in a copy."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from azureml_elastic.masking import masked

if TYPE_CHECKING:
    from pydantic import BaseModel

HELD_BY: dict[type, tuple[type, str]] = {}
"""The model that holds each model, and in which field; of several models the first, as they agree on the names."""

_LONGEST = 60
_HIDDEN = "environment_variables"
"""The field of a job whose values may be secret."""


class ReadOnly(dict[str, Any]):
    """A mapping of a frozen model; ``dict(mapping)`` and ``copy.deepcopy(mapping)`` can be changed.

    Args:
        values: what the mapping holds; dictionaries within it become read only, too.
        owner: class of the model.
        path: field of the model, and the keys of the mappings around this one.
    """

    __slots__ = ("_owner", "_path")
    _owner: type[BaseModel]
    _path: tuple[str, ...]

    def __init__(self, values: Mapping[str, Any], owner: type[BaseModel], path: tuple[str, ...]) -> None:
        held = {
            key: ReadOnly(value, owner, (*path, key)) if is_fields(value) else value for key, value in values.items()
        }
        super().__init__(held)
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_path", path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self._owner, self._path)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    if not TYPE_CHECKING:  # for type checkers these are the methods of any mapping

        def __getattr__(self, name: str) -> Any:
            hint = f". Write {self._path[-1]}[{json.dumps(name)}]" if name in self else ""
            raise AttributeError(f"{'.'.join(self._path)} has no attribute {name!r}{hint}")

        def __setattr__(self, name: str, value: Any) -> NoReturn:
            raise AttributeError(change_of(self._owner, self._path, {name: value}))

        def __setitem__(self, key: Any, value: Any = None) -> NoReturn:
            raise TypeError(change_of(self._owner, self._path, {key: value}))

        def update(self, *values: Any, **more: Any) -> NoReturn:
            """Refuse it."""
            raise TypeError(change_of(self._owner, self._path, dict(*values, **more)))

        def clear(self, *_: Any) -> NoReturn:
            """Refuse it."""
            raise TypeError(removal_of(self._owner, self._path))

        setdefault, __ior__ = __setitem__, update
        __delattr__ = __delitem__ = pop = popitem = clear


def freeze(model: BaseModel) -> None:
    """Make the dictionaries that a model holds read only, and copies of their own."""
    held = vars(model)
    held.update({name: ReadOnly(each, type(model), (name,)) for name, each in held.items() if type(each) is dict})


def is_fields(value: Any) -> bool:
    """Return whether a value is a dictionary, of the fields of an object perhaps: jobs of azure-ai-ml are such, too."""
    return type(value) in (dict, ReadOnly)


def change_of(owner: type[BaseModel], path: tuple[str, ...], value: Any) -> str:
    """Return the sentence that refuses to set a field of a model, or entries of a mapping that it holds."""
    place, known = _place(owner, path)
    if not known:
        return f"{'.'.join(path)} cannot be changed in place: make a new {owner.__name__} that has it."
    text = _shown(value, hidden=place[0] == _HIDDEN, merged=len(place) == 1)
    # Mappings of a job are merged, those of a part of it are replaced as a whole.
    for name in reversed(place[1 : 1 + max(1, len(place) - len(path))]):
        text = f"{{{json.dumps(name)}: {text}}}"
    return masked(
        f"{'.'.join(place)} of a job cannot be changed in place. Make a changed copy: "
        f"job = job.with_options({place[0]}={text})"
    )


def removal_of(owner: type[BaseModel], path: tuple[str, ...]) -> str:
    """Return the sentence that refuses to remove a field of a model, or entries of a mapping that it holds."""
    place, known = _place(owner, path)
    if not known or len(place) > 1:
        return change_of(owner, path, ...)
    return (
        f"{place[0]} of a job cannot be changed in place. Make a copy with another value: "
        f'job = job.model_copy(update={{"{place[0]}": ...}})'
    )


def _place(owner: type[BaseModel], path: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Return where in a job a field is, and whether the model is a job, or known to be a part of one."""
    known = hasattr(owner, "with_options")
    while owner in HELD_BY:
        owner, name = HELD_BY[owner]
        path, known = (name, *path), True
    return path, known


def _shown(value: Any, *, hidden: bool, merged: bool) -> str:
    """Return a value as it is written in a program; ``...`` where it is long, an object, or hidden."""
    if type(value) is dict and merged:
        pairs = (f"{json.dumps(str(key))}: {_shown(each, hidden=hidden, merged=False)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if hidden or not isinstance(value, str | int | float | None):
        return "..."
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else "..."
