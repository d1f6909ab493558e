"""Base class and field types of the configuration models."""

from __future__ import annotations

import difflib
from datetime import timedelta
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import Self

__all__ = ["ConfigModel", "Count", "Duration", "PositiveDuration", "meant"]


class ConfigModel(BaseModel):
    """A frozen pydantic model that rejects unknown fields by name and serializes durations as seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_timedelta="float", validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate, and complete the errors of unknown fields by the field that was probably meant."""
        try:
            return handler(value)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if not any(each["type"] == "extra_forbidden" and len(each["loc"]) == 1 for each in details):
                raise
            hidden = bool(cls.model_config.get("hide_input_in_errors"))
            lines = [_line(each, cls) for each in details]
            raise ValidationError.from_exception_data(error.title, lines, hide_input=hidden) from None


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


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number; give a whole number")  # noqa: TRY004 - pydantic reports a ValueError
    return value


def _duration(value: Any, handler: Any) -> timedelta:
    try:
        return handler(value)  # type: ignore[no-any-return]
    except ValueError:
        shown = f"{value!r} is" if isinstance(value, str | bool) else f"a value of the type {type(value).__name__} is"
        text = f"{shown} no duration; give a number of seconds, a timedelta, or text such as 'PT2H' or '02:00:00'"
        raise PydanticCustomError("time_delta_parsing", "{text}", {"text": text}) from None


def _not_negative(value: timedelta) -> timedelta:
    if value < timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is negative; give 0 s or more")
    return value


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is not positive; give more than 0 s")
    return value


Count = Annotated[int, BeforeValidator(_no_truth_value)]
"""A whole number, which ``True`` and ``False`` are not."""

Duration = Annotated[timedelta, WrapValidator(_duration), AfterValidator(_not_negative)]
"""A ``timedelta`` of zero or more; a plain number is read as seconds."""

PositiveDuration = Annotated[timedelta, WrapValidator(_duration), AfterValidator(_positive)]
"""A ``timedelta`` greater than zero; a plain number is read as seconds."""
