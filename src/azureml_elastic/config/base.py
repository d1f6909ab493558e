"""Base class and field types of the configuration models."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from datetime import timedelta
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar, Union, get_args, get_origin, overload

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import Never, Self

from azureml_elastic.config.frozen import HELD_BY, change_of, freeze, removal_of
from azureml_elastic.errors import UsageError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)

_OF_PYDANTIC = frozenset(dir(BaseModel))

_Held_co = TypeVar("_Held_co", covariant=True)
_Given_contra = TypeVar("_Given_contra", contravariant=True)

if TYPE_CHECKING:

    class Takes(Generic[_Held_co, _Given_contra]):
        """The type of a field that takes more than it holds: ``Takes[timedelta, timedelta | float | str]``.

        Type checkers read it as a descriptor, of whose two types they take the second for the constructor; no model is
        a ``frozen``, so that they refuse to set it. pydantic sees the first type alone. The default is written
        ``default(...)``, as no value is a descriptor.
        """

        @overload
        def __get__(self, instance: None, owner: Any) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> _Held_co: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...
        def __set__(self, frozen: Never, value: _Given_contra) -> None: ...
else:

    class Takes:  # noqa: D101 - see above
        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


def default(value: object) -> Any:
    """Return the default of a field of type :class:`Takes`."""
    return value


class ConfigModel(BaseModel):
    """A frozen pydantic model that rejects unknown fields by name, and serializes durations as seconds.

    Mappings are read only, and ``repr`` leaves out what has its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_timedelta="float", validate_default=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, field in cls.model_fields.items():
            for kind in _kinds(field.annotation):
                if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, ConfigModel):
                    HELD_BY.setdefault(kind, (cls, name))

    if not TYPE_CHECKING:  # type checkers would take any attribute for one that can be set

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise AttributeError(self._absent(name), name=name)

        def __setattr__(self, name: str, value: Any) -> NoReturn:
            known = name in type(self).model_fields
            raise AttributeError(change_of(type(self), (name,), value) if known else self._absent(name))

        def __delattr__(self, name: str) -> NoReturn:
            known = name in type(self).model_fields
            raise AttributeError(removal_of(type(self), (name,)) if known else self._absent(name))

    @classmethod
    def _absent(cls, name: str) -> str:
        """Return what is said of a name that the model does not have."""
        return f"{name} is no field of {cls.__name__}{meant(name, cls)}"

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        made = super().__deepcopy__(memo)
        freeze(made)
        return made

    def __dir__(self) -> list[str]:
        """Return the names of this library, without those that every pydantic model has."""
        own = {
            name
            for kind in type(self).__mro__
            if kind.__module__.startswith("azureml_elastic.")
            for name, value in vars(kind).items()
            if not name.startswith("_") and (callable(value) or name not in _OF_PYDANTIC)
        }
        return sorted({*dir(object), *type(self).model_fields, *own})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            if name not in fields or fields[name].is_required() or value != fields[name].default:
                yield name, value

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate; refuse truth values as numbers, and add the nearest field to the errors of unknown ones."""
        # A model that was validated before comes here as an object, and is passed on.
        wrong = [*_truth_values(value, cls)] if type(value) is dict else []
        try:
            if not wrong:
                made = handler(value)
                freeze(made)
                return made
            details = []
        except ValidationError as error:
            details = error.errors(include_url=False)
            if not any(each["type"] == "extra_forbidden" and len(each["loc"]) == 1 for each in details):
                raise
        # Errors that are raised anew show what was given, also where the model has it hidden.
        hidden = bool(cls.model_config.get("hide_input_in_errors"))
        lines = wrong + [_line(each, cls) for each in details]
        raise ValidationError.from_exception_data(cls.__name__, lines, hide_input=hidden) from None


def _truth_values(fields: dict[str, Any], model: type[BaseModel]) -> Iterator[InitErrorDetails]:
    """Yield an error for each number that was given as a truth value, which pydantic reads as 0 or 1."""
    for name, value in fields.items():
        if isinstance(value, bool) and name in model.model_fields and _is_number(model, name):
            text = f"{value} is no number; give a number"
            custom = PydanticCustomError("value_error", "{text}", {"text": text})
            yield InitErrorDetails(type=custom, loc=(name,), input=value)


def meant(name: str, model: type[BaseModel]) -> str:
    """Return ``"; did you mean NAME?"`` if a field of the model has a similar name, otherwise an empty text."""
    near = difflib.get_close_matches(name, model.model_fields, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _line(error: Any, model: type[BaseModel]) -> InitErrorDetails:
    """Return an error to raise again, with the name of a similar field if it is that of an unknown one."""
    kind, location, text = error["type"], error["loc"], error["msg"]
    if kind == "extra_forbidden" and len(location) == 1:
        text = f"{location[0]} is no field of {model.__name__}{meant(str(location[0]), model)}"
    # A custom error keeps type and text, whichever context the error had.
    custom = PydanticCustomError(kind, "{text}", {**error.get("ctx", {}), "text": text})
    return InitErrorDetails(type=custom, loc=location, input=error["input"])


@functools.cache
def _is_number(model: type[BaseModel], field: str) -> bool:
    """Return whether a field takes numbers or durations, which pydantic also reads from truth values."""
    kinds = set(_kinds(model.model_fields[field].annotation))
    return bool(kinds & {int, float, timedelta}) and bool not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types of which a value may be one, without those of what it contains."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def parse_duration(text: str) -> timedelta | None:
    """Return the duration of a text such as ``10m``, ``1h30m`` or ``90``, which is seconds; ``None`` for others."""
    rest, seconds, parts = text.strip().lower(), 0.0, 0
    while rest:
        match = _PART.match(rest)
        # A number without a unit must stand alone: 1h30 may mean minutes or seconds.
        if match is None or match[2] not in _UNITS or (not match[2] and (parts or match.end() < len(rest))):
            return None
        seconds += float(match[1]) * _UNITS[match[2]]
        rest, parts = rest[match.end() :], parts + 1
    try:
        return timedelta(seconds=seconds) if parts else None
    except OverflowError:
        return None


def _duration(value: Any, handler: Any) -> timedelta:
    if isinstance(value, str) and (parsed := parse_duration(value)) is not None:
        return parsed
    try:
        return handler(value)  # type: ignore[no-any-return]  # a number, a timedelta, or ISO 8601 such as PT2H
    except ValueError:
        shown = f"{value!r} is" if isinstance(value, str | bool) else f"a value of the type {type(value).__name__} is"
        text = f"{shown} no duration; give a number of seconds, a timedelta, or text such as '10m' or '1h30m'"
        raise PydanticCustomError("time_delta_parsing", "{text}", {"text": text}) from None


def _not_negative(value: timedelta) -> timedelta:
    if value < timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is negative; give 0 s or more")
    return value


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is not positive; give more than 0 s")
    return value


Span = timedelta | float | str
"""What is taken for a duration: a ``timedelta``, a number of seconds, or a text such as ``"10m"``."""

Duration = Annotated[timedelta, WrapValidator(_duration), AfterValidator(_not_negative)]
"""A ``timedelta`` of zero or more, also given as a number of seconds or as text such as ``"10m"``."""

PositiveDuration = Annotated[timedelta, WrapValidator(_duration), AfterValidator(_positive)]
"""A ``timedelta`` greater than zero, also given as a number of seconds or as text such as ``"10m"``."""

_POSITIVE: TypeAdapter[timedelta] = TypeAdapter(PositiveDuration)


def positive_duration(name: str, value: Span) -> timedelta:
    """Return the duration that an argument or an option was given.

    Raises:
        UsageError: the value is no duration, or not positive; the message has the name.
    """
    try:
        return _POSITIVE.validate_python(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{name}: {problem}.") from None
