"""When checkpoints are taken, where they go and how many are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, PositiveDuration

__all__ = ["CheckpointPolicy", "NonFinitePolicy"]

_DEFAULT_OUTPUT = "azureml://datastores/workspaceblobstore/paths/azureml-elastic/"

NonFinitePolicy = Literal["warn", "stop", "rollback"]
"""Response to a loss or to weights that are NaN or infinite."""


class CheckpointPolicy(ConfigModel):
    """The checkpoints of a run.

    A checkpoint is also taken whenever the round is about to change and the workers can still reach a step boundary: at
    a join and at a preemption notice.

    Args:
        path: folder or mount that every node sees; ``None`` for one that the submission or the local cluster chooses.
        every: wall time between two checkpoints; ``"auto"`` for the Young/Daly interval of the measured cost and loss
            rate; ``None`` for no checkpoints by time.
        every_steps: optimizer steps between two checkpoints; ``None`` for no checkpoints by steps.
        snapshot_every: wall time between two snapshots in the memory of two nodes each. They cost less than
            checkpoints, and the run continues from them when no worker with the full state is left, as with sharded
            state. They take four times the memory of a rank's shard. ``"auto"`` for the interval by which the measured
            cost and loss rate lose the least time, where the loss of a worker would lose steps, the nodes have the
            memory, and ``snapshot_every_steps`` is not given; ``None`` for no snapshots by time.
        snapshot_every_steps: optimizer steps between two snapshots; ``None`` for no snapshots by steps.
        snapshot_path: folder on each node's own disk for copies of the snapshots, from which an agent that is restarted
            on the same machine recovers. Read from the job's policy, not from ``train.start()``. ``None`` for none.
        keep: number of committed checkpoints to keep, at least 2, so that a damaged one has a predecessor.
        keep_every_steps: optimizer steps between two checkpoints that are kept for good; ``None`` for none.
        on_nonfinite: response to a loss or to weights that are NaN or infinite, of which no checkpoint is taken:
            ``"warn"`` continues, ``"stop"`` ends the run without a restart, and ``"rollback"`` restarts it from its
            last checkpoint once the weights are affected.
    """

    path: str | None = None
    every: Literal["auto"] | PositiveDuration | None = timedelta(minutes=5)
    every_steps: int | None = Field(default=None, ge=1)
    snapshot_every: Literal["auto"] | PositiveDuration | None = "auto"
    snapshot_every_steps: int | None = Field(default=None, ge=1)
    snapshot_path: str | None = None
    keep: int = Field(default=2, ge=2)
    keep_every_steps: int | None = Field(default=None, ge=1)
    on_nonfinite: NonFinitePolicy = "warn"

    @property
    def chooses_snapshots(self) -> bool:
        """Whether it follows from the state and the nodes if there are snapshots, and how many."""
        return self.snapshot_every == "auto" and self.snapshot_every_steps is None

    @property
    def output(self) -> str | None:
        """URI of a submitted job's output for checkpoints; ``None`` if the nodes use the path as it is.

        All nodes and runs share the URI; the nodes create a folder per run below it.
        """
        if self.path is None:
            return _DEFAULT_OUTPUT
        return self.path if self.path.startswith("azureml:") else None
