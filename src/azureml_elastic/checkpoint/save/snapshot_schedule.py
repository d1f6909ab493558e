"""The schedule of snapshots: as that of checkpoints, but for what is cheaper by far."""

from __future__ import annotations

import logging
from collections.abc import Callable

from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule, Main
from azureml_elastic.config import CheckpointPolicy

__all__ = ["SnapshotSchedule"]

_LOG = logging.getLogger(__name__)

_MOST_LOST = 0.01
"""Share of the time from which on the log says that snapshots and losses cost it."""


class SnapshotSchedule(CheckpointSchedule):
    """Schedule of snapshots, the same on every rank; see :class:`CheckpointSchedule`.

    Args:
        policy: checkpoint policy, of which the intervals of snapshots count.
        control: control group, used at decision steps only.
        clock: monotonic clock in seconds; only that of rank 0 is used.
    """

    first_cost_seconds = 0.1
    """So that the first snapshot comes soon and is measured: each round has new processes."""

    shortest_seconds = 1.0

    def __init__(self, policy: CheckpointPolicy, control: Main, *, clock: Callable[[], float]) -> None:
        every = policy.snapshot_every
        if every == "auto" and not policy.chooses_snapshots:  # steps were asked for
            every = None
        snapshots = policy.model_copy(update={"every": every, "every_steps": policy.snapshot_every_steps})
        super().__init__(snapshots, control, clock=clock)
        self._warned = not policy.chooses_snapshots

    def tell_what_is_lost(self) -> None:
        """Log, once, that more time is lost than is meant to be. For rank 0."""
        share = self.lost_share
        if self._warned or share <= _MOST_LOST:
            return
        self._warned = True
        _LOG.warning(
            "A snapshot costs %.2f s of training and a loss comes every %.0f s, so that %.1f %% of the time is lost on "
            "average with a snapshot every %.0f s, the best possible. It would be %.1f %% with a cost of "
            "%.2f s. More ranks make the shards smaller; replicas (nodes_per_replica) make snapshots unnecessary.",
            self.cost_seconds,
            self.between_losses,
            100 * share,
            self.every,
            100 * _MOST_LOST,
            _MOST_LOST**2 / 2 * self.between_losses,
        )
