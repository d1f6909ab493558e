"""The checkpoint schedule, on which all ranks agree without a collective at every step.

A schedule by steps is the same on all ranks. By wall time the ranks' clocks differ, so rank 0 decides for all, but only
at *decision steps*: each decision names the step of the next one, estimated from the pace so far. After the start, when
the pace is unknown, decisions come after 1, 2, 4, 8, ... steps; later there are about two for each checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from azureml_elastic.config import CheckpointPolicy

_EXPECTED_SECONDS = 7200.0
"""Prior of the mean time between losses, as if two hours without a loss had preceded the run."""

_LONGEST_SECONDS = 3600.0
"""Longest interval that is chosen."""

_TOLERANCE = 0.02
"""Fraction of the interval by which a checkpoint may be early."""

_WRITES = 3
"""Shortest interval as a multiple of the duration of a write."""

_LOG = logging.getLogger(__name__)

_MOST_LOST = 0.01
"""Share of the time from which on the log says that snapshots and losses cost it."""


def optimal_interval(cost: float, between_losses: float) -> float:
    """Return the Young/Daly interval: the seconds of training between checkpoints that minimize the total loss.

    It follows from the cost of a checkpoint and the mean time between losses, in seconds. Source: J. T. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37, whose first term is J. W.
    Young's (1974).
    """
    ratio = cost / (2 * between_losses)
    if ratio >= 1:
        return between_losses
    return math.sqrt(2 * cost * between_losses) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def lost_share(interval: float, cost: float, between_losses: float) -> float:
    """Return the share of the time that is lost on average: by copies in each interval, and half of it by each loss."""
    return cost / interval + interval / (2 * between_losses)


@dataclass(frozen=True)
class Decision:
    """Decision of rank 0 at a decision step: whether to save now, and the number of steps until the next decision."""

    save: bool
    steps_to_next: int


def decide(every_seconds: float, since_save_seconds: float, steps_seen: int, seconds_per_step: float) -> Decision:
    """Decide whether a checkpoint is due, and at which step to decide again.

    Steps are counted since the start of this process, and ``seconds_per_step`` is their mean duration.
    """
    remaining = every_seconds - since_save_seconds
    save = remaining <= _TOLERANCE * every_seconds
    # The first steps, which compile and allocate, tell little of the pace: as many again are looked ahead at most.
    target = every_seconds if save else remaining
    estimate = int(target / seconds_per_step) if seconds_per_step > 0 else steps_seen
    return Decision(save=save, steps_to_next=max(1, min(estimate, steps_seen)))


class Main(Protocol):
    """Rank 0's decision on every rank: the control group, without torch, which simulated runs do without."""

    def from_main(self, value: Decision | None) -> Decision:
        """Return rank 0's value on every rank."""


class CheckpointSchedule:
    """Schedule of checkpoints, the same on every rank.

    The cost of a checkpoint is the time that training waits for the copy, and the slowdown of the steps while it is
    written, compared to their pace while nothing is written.

    The control group is used at decision steps only, and of the clocks only that of rank 0.

    Attributes:
        cost_seconds: seconds of training that a checkpoint costs, as an exponential mean; a guess before the first.
        write_seconds: duration of the last write.
    """

    first_cost_seconds = 1.0
    """Guess of the cost before the first."""

    shortest_seconds = 10.0
    """Shortest interval that is chosen."""

    def __init__(self, policy: CheckpointPolicy, control: Main, *, clock: Callable[[], float]) -> None:
        self._policy, self._control, self._clock = policy, control, clock
        self.cost_seconds, self.write_seconds = self.first_cost_seconds, 0.0
        self._measured = False
        self._quiet: tuple[int, float] | None = None
        self._pace: float | None = None
        self._stopped: tuple[int, float] | None = None
        self._first_step, self._next_decision = 0, 1
        self._losses, self._seconds = 0, 0.0
        self._began = self._saved_time = clock()

    def begin(self, step: int, unsaved_seconds: float = 0.0, history: tuple[int, float] = (0, 0.0)) -> None:
        """Start the schedule after this step, with the age of the last checkpoint.

        The history is the number of losses and the seconds of training of the run before this round.
        """
        self._first_step, self._next_decision = step, step + 1
        self._began = self._clock()
        self._saved_time = self._began - unsaved_seconds
        self._losses, self._seconds = history
        self._quiet, self._stopped = (step, self._began), None

    def enter(self, control: Main) -> None:
        """Continue with the ranks of another round."""
        self._control = control

    @property
    def unsaved_seconds(self) -> float:
        """Seconds since the last checkpoint, or since the start."""
        return self._clock() - self._saved_time

    def saving(self, step: int) -> None:
        """Record that a checkpoint is taken after this step, and training waits for the copy."""
        now = self._clock()
        if self._quiet is not None and step > self._quiet[0]:
            self._pace = (now - self._quiet[1]) / (step - self._quiet[0])
        self._stopped = step, now

    def saved(self) -> None:
        """Record that a checkpoint was copied, and training continues while it is written."""
        self._saved_time = self._clock()

    def written(self, step: int) -> None:
        """Record that the last checkpoint was written by this step."""
        now = self._clock()
        if self._stopped is not None:
            saved_at, stopped = self._stopped
            self.write_seconds = now - self._saved_time
            # Without a pace to compare with, no step counts as slowed down.
            expected = (step - saved_at) * (self._pace if self._pace is not None else self.write_seconds)
            cost = self._saved_time - stopped + max(0.0, self.write_seconds - expected)
            # Half of what was known: one slow write alone does not set the interval.
            self.cost_seconds = (self.cost_seconds + cost) / 2 if self._measured else cost
            self._measured = True
        self._quiet, self._stopped = (step, now), None

    def disturbed(self, step: int) -> None:
        """Record that something else has slowed the steps up to this one, so that they do not tell the pace."""
        if self._stopped is None:
            self._quiet = step, self._clock()

    @property
    def between_losses(self) -> float:
        """The mean time between two losses in seconds, as far as it is known."""
        return (self._seconds + self._clock() - self._began + _EXPECTED_SECONDS) / (self._losses + 1)

    @property
    def lost_share(self) -> float:
        """The share of the time that copies and losses cost on average; see :func:`lost_share`."""
        return lost_share(self.every, self.cost_seconds, self.between_losses)

    @property
    def every(self) -> float:
        """The interval between two checkpoints in seconds."""
        if isinstance(self._policy.every, timedelta):
            return self._policy.every.total_seconds()
        shortest = max(self.shortest_seconds, _WRITES * self.write_seconds)
        return min(max(optimal_interval(self.cost_seconds, self.between_losses), shortest), _LONGEST_SECONDS)

    def next_candidate(self, step: int) -> int | None:
        """Return the first step later than ``step`` at which one may be due; ``None`` without checkpoints."""
        by_steps, by_time = self._policy.every_steps, self._policy.every
        found = [] if by_steps is None else [(step // by_steps + 1) * by_steps]
        found += [] if by_time is None else [max(step + 1, self._next_decision)]
        return min(found, default=None)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step. A collective at decision steps."""
        due = self._policy.every_steps is not None and step % self._policy.every_steps == 0
        if self._policy.every is None or step < self._next_decision:
            return due
        now = self._clock()
        seen = step - self._first_step
        decision = self._control.from_main(decide(self.every, now - self._saved_time, seen, (now - self._began) / seen))
        self._next_decision = step + decision.steps_to_next
        return due or decision.save


class SnapshotSchedule(CheckpointSchedule):
    """Schedule of snapshots by the policy's intervals for them; see :class:`CheckpointSchedule`."""

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
