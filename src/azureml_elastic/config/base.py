"""Base class and duration types of the configuration models."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["ConfigModel", "Duration", "PositiveDuration"]


class ConfigModel(BaseModel):
    """A frozen pydantic model that rejects unknown fields and serializes durations as seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_timedelta="float", validate_default=True)


def _not_negative(value: timedelta) -> timedelta:
    if value < timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is negative; give 0 s or more")
    return value


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError(f"a duration of {value.total_seconds():g} s is not positive; give more than 0 s")
    return value


Duration = Annotated[timedelta, AfterValidator(_not_negative)]
"""A ``timedelta`` of zero or more; a plain number is read as seconds."""

PositiveDuration = Annotated[timedelta, AfterValidator(_positive)]
"""A ``timedelta`` greater than zero; a plain number is read as seconds."""
