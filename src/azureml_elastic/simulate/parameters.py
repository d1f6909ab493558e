"""What the simulation knows of a program and its machines: durations, and the throughput by the number of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator

from azureml_elastic.config.base import ConfigModel
from azureml_elastic.ledger.accounting import Cause

__all__ = ["Parameters"]

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_CAUSES: tuple[Cause, ...] = ("preemption", "node loss", "worker crash", "scale-up", "hang", "connection")


class Parameters(ConfigModel):
    """Durations in seconds. The defaults are guesses for a GPU node; :mod:`calibration` measures them.

    Args:
        step_seconds: duration of a step by number of nodes, at least one entry. Between entries a step's duration is
            linear in 1/nodes; outside of them it follows from ``serial_fraction``.
        serial_fraction: share of a step on one node that more nodes do not shorten (Amdahl's law).
        provisioning_seconds: time from a free machine to the start of the node's process, which is not billed.
        start_seconds: time from the start of a node's process until it is ready.
        preload_seconds: further time of a node that joins a run that has begun, for its imports.
        first_step_seconds: time from the last node's readiness to the first step of a round without a survivor.
        restore_seconds: further time to read a checkpoint.
        recovery_seconds: time from the end of a round to the first step of the next one, by cause.
        checkpoint_pause_seconds: pause of training for a checkpoint.
        checkpoint_write_seconds: time after the pause until the checkpoint is committed.
        notice_seconds: time between the announcement and the loss of a machine; 0 for losses without announcement.
        finish_seconds: time from the last step to the end of the nodes.
    """

    step_seconds: Mapping[int, _StepSeconds] = Field(default={1: 1.0}, min_length=1)
    serial_fraction: float = Field(default=0.05, ge=0, le=1)
    provisioning_seconds: _Seconds = 180.0
    start_seconds: _Seconds = 30.0
    preload_seconds: _Seconds = 10.0
    first_step_seconds: _Seconds = 10.0
    restore_seconds: _Seconds = 10.0
    recovery_seconds: Mapping[Cause, _Seconds] = dict.fromkeys(_CAUSES, 5.0)
    checkpoint_pause_seconds: _Seconds = 1.0
    checkpoint_write_seconds: _Seconds = 10.0
    notice_seconds: _Seconds = 0.0
    finish_seconds: _Seconds = 5.0

    @field_validator("step_seconds")
    @classmethod
    def _counts_are_positive(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        if (least := min(value)) < 1:
            raise ValueError(f"step_seconds has {least} nodes; the smallest number of nodes is 1")
        return dict(sorted(value.items()))

    @field_validator("recovery_seconds")
    @classmethod
    def _all_causes_are_known(cls, value: Mapping[Cause, float]) -> Mapping[Cause, float]:
        """Complete missing causes by the longest known recovery."""
        if not value:
            raise ValueError(f"recovery_seconds is empty; give the seconds of one of {', '.join(_CAUSES)} or more")
        return {cause: value.get(cause, max(value.values())) for cause in _CAUSES}

    def step_time(self, nodes: int) -> float:
        """Return the duration of a step on a number of nodes, in seconds."""
        known = list(self.step_seconds)
        below = max((count for count in known if count <= nodes), default=None)
        above = min((count for count in known if count >= nodes), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return self.step_seconds[nearest] * self._amdahl(nodes) / self._amdahl(nearest)
        if below == above:
            return self.step_seconds[below]
        share = (1 / below - 1 / nodes) / (1 / below - 1 / above)
        return self.step_seconds[below] + share * (self.step_seconds[above] - self.step_seconds[below])

    def _amdahl(self, nodes: int) -> float:
        return self.serial_fraction + (1 - self.serial_fraction) / nodes
