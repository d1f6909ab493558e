"""When checkpoints are taken, where they go and how many are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, PositiveDuration

__all__ = ["CheckpointPolicy"]


class CheckpointPolicy(ConfigModel):
    """The checkpoints of a run.

    Besides these, a checkpoint is taken whenever the round is about to change and the workers can still
    reach a step boundary: at a join and at a preemption notice.

    Args:
        path: a folder or mount that every node sees; ``None`` lets the submission or the local cluster choose.
        every: wall time between two checkpoints; ``"auto"`` takes the time that costs the run least, from what
            checkpoints and losses have cost so far; ``None`` takes none by time.
        every_steps: optimizer steps between two checkpoints; ``None`` takes none by steps.
        snapshot_every: wall time between two copies in memory, on two nodes each, which cost less than checkpoints:
            they are where the run goes on when no worker with the whole state is left, as with sharded state. They
            take four times the memory of a rank's share. ``None`` takes none by time.
        snapshot_every_steps: optimizer steps between two of them; ``None`` takes none by steps.
        snapshot_path: a folder on each node's own disk where they are as well, for an agent that is started again on
            the same machine; of the job's policy, not of ``train.start()``. ``None`` leaves them in memory alone.
        keep: committed checkpoints to keep, at least 2, so that a damaged one has a predecessor.
        keep_every: optimizer steps; of each so many, the first checkpoint is kept for good. ``None`` keeps none.
    """

    path: str | None = None
    every: Literal["auto"] | PositiveDuration | None = timedelta(minutes=5)
    every_steps: int | None = Field(default=None, ge=1)
    snapshot_every: PositiveDuration | None = None
    snapshot_every_steps: int | None = Field(default=None, ge=1)
    snapshot_path: str | None = None
    keep: int = Field(default=2, ge=2)
    keep_every: int | None = Field(default=None, ge=1)
