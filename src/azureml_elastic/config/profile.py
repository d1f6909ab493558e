"""Which steps of a run PyTorch's profiler records, and on which ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel

__all__ = ["Profile", "recorded_after"]


def _ranks(value: tuple[int, ...]) -> tuple[int, ...]:
    wrong = [rank for rank in value if rank < 0]
    if wrong or not value:
        raise ValueError(f'ranks={list(value)} has {wrong or "none"}; give numbers from 0, as in (0, 4), or "all"')
    return tuple(sorted(set(value)))


class Profile(ConfigModel):
    """Recording of a few steps by PyTorch's profiler, for TensorBoard; the other steps are not slowed down.

    Args:
        first_step: first recorded step, counted from 1 over the whole run, restarts included.
        steps: number of consecutive recorded steps, which form one trace.
        warmup_steps: number of steps before them in which the profiler runs without keeping anything.
        every_steps: number of steps between the starts of two recordings; ``None`` to record once.
        each_round: whether steps are counted from 1 in each round, so that every world size has its traces.
        ranks: ranks that record, or ``"all"``; ranks that a round does not have are ignored.
        folder: folder of the traces, in which the node's variables, as in ``"$AZURE_ML_OUTPUT_traces"``, are expanded;
            ``None`` for ``profiles`` in the run folder, which Azure ML uploads.
        record_shapes: whether the shapes of operators' inputs are recorded.
        profile_memory: whether allocations are recorded.
        with_stack: whether source lines are recorded. Each of these three makes the recorded steps slower.
    """

    first_step: int = Field(default=10, ge=1)
    steps: int = Field(default=3, ge=1)
    warmup_steps: int = Field(default=2, ge=0)
    every_steps: int | None = Field(default=None, ge=1)
    each_round: bool = False
    ranks: Literal["all"] | Annotated[tuple[int, ...], AfterValidator(_ranks)] = (0,)
    folder: str | None = Field(default=None, min_length=1)
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False

    @model_validator(mode="after")
    def _recordings_do_not_meet(self) -> Self:
        if self.every_steps is not None and self.every_steps < self.steps + self.warmup_steps:
            raise ValueError(
                f"every_steps={self.every_steps} is below steps + warmup_steps = {self.steps + self.warmup_steps}, so "
                "one recording would begin before the previous one has ended; raise every_steps, or lower one of the "
                "others"
            )
        return self

    def __str__(self) -> str:
        each = "" if self.every_steps is None else f", every {self.every_steps} steps"
        counted = " of each round" if self.each_round else ""
        where = "all ranks" if self.ranks == "all" else f"rank {', '.join(str(rank) for rank in self.ranks)}"
        last = self.first_step + self.steps - 1
        what = f"step {self.first_step}" if last == self.first_step else f"steps {self.first_step} to {last}"
        return f"{what}{counted}{each} on {where}"


def recorded_after(profile: Profile, completed: int, entered: int) -> tuple[int, int] | None:
    """Return the first and the last step of the next complete recording, ``None`` if there is none.

    Args:
        profile: steps to record
        completed: completed steps of the run
        entered: completed steps at the beginning of the round
    """
    origin = entered if profile.each_round else 0
    behind = max(0, completed - origin - (profile.first_step - 1))  # completed steps since the first recording began
    if behind and profile.every_steps is None:
        return None
    each = profile.every_steps or 1
    first = origin + profile.first_step + -(-behind // each) * each
    return first, first + profile.steps - 1
