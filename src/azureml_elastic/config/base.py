"""What every model of the specification has in common."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["ConfigModel", "Duration", "PositiveDuration"]


class ConfigModel(BaseModel):
    """A frozen model that refuses fields it does not know."""

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
"""A ``timedelta`` of zero or more; numbers are read as seconds."""

PositiveDuration = Annotated[timedelta, AfterValidator(_positive)]
"""A ``timedelta`` of more than zero; numbers are read as seconds."""
