"""Steps and checkpoints of a simulated run. The checkpoint schedule is that of the training process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from azureml_elastic.checkpoint.save.schedule import CheckpointSchedule, Decision
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.ledger.accounting import Cause
from azureml_elastic.simulate.accounts import Accounts, exact
from azureml_elastic.simulate.scenario import Parameters


class _Main:
    """The control group of the simulated ranks, which agree."""

    def from_main(self, value: Decision | None) -> Decision:
        assert value is not None
        return value


@dataclass
class _Stretch:
    """Steps that were trained by equally many nodes since the last checkpoint."""

    first: int
    last: int
    node_seconds_per_step: float


class Training:
    """Training of one run, from step to step, by the members of successive rounds.

    Time between two interesting steps is skipped: those at which a checkpoint may be due or has been written, and the
    ones at which training is to stop.

    Attributes:
        committed: steps in the newest committed checkpoint.
        at: time up to which the members' seconds are accounted.
        stop: step after which :meth:`advance` stops.
    """

    def __init__(self, work: int, parameters: Parameters, policy: CheckpointPolicy, accounts: Accounts) -> None:
        self.work = work
        self.steps = self.committed = self.lost_steps = 0
        self.at = 0.0
        self.stop: float = math.inf
        self._parameters, self._policy, self._accounts = parameters, policy, accounts
        self._pause = exact(parameters.checkpoint_pause_seconds)
        self._write = exact(parameters.checkpoint_write_seconds)
        self._members, self._pace = 0, 1.0
        self._schedule = self._new_schedule()
        self._candidate: int | None = None
        self._paused_until: float | None = None
        self._must_commit = False
        self._written: tuple[int, float] | None = None
        self._unsaved_seconds = 0.0
        self._save_again = False
        self._stretches: list[_Stretch] = []

    @property
    def done(self) -> bool:
        """Whether all steps are completed."""
        return self.steps >= self.work

    @property
    def seconds_left(self) -> float:
        """Seconds that the remaining steps take at the present pace."""
        return (self.work - self.steps) * self._pace

    def begin(self, now: float, members: int, losses: int = 0, seconds: float = 0.0) -> None:
        """Begin a round.

        Args:
            now: time at which its first step begins.
            seconds: duration of the rounds before.
        """
        self.at, self._members = now, members
        # At least two units of time: with steps that take none the simulated time would stand still.
        self._pace = max(exact(self._parameters.step_time(members)), exact(2e-6))
        self._schedule = self._new_schedule()
        self._schedule.begin(self.steps, self._unsaved_seconds, (losses, seconds))
        self._candidate = self._schedule.next_candidate(self.steps)
        if self._save_again:
            self.save()

    def advance(self, until: float) -> bool:
        """Train until a time, or until a step after which to stop; return whether that step is completed."""
        while True:
            if self._paused_until is not None:
                end = min(until, self._paused_until)
                self._accounts.add("saving", (end - self.at) * self._members)
                self.at = end
                if end < self._paused_until:
                    return False
                self._end_pause()
            if self.steps >= min(self.work, self.stop):
                return True
            target = self._next_step()
            count = target - self.steps
            if self.at + count * self._pace > until:
                count = _whole(until - self.at, self._pace)
            self._train(count)
            if self.steps < target:
                return False
            self._after_step()

    def save(self, *, must_commit: bool = False) -> None:
        """Begin a checkpoint of the last step; with ``must_commit`` training waits until it is written."""
        begun = self.at
        if self._written is not None:  # one save at a time
            begun = max(begun, self._written[1])
            self._commit()
        self._schedule.saving(self.steps)
        self._must_commit, self._save_again = must_commit, False
        self._paused_until = begun + self._pause + (self._write if must_commit else 0.0)

    def interrupt(self, now: float) -> None:
        """End the round at a time up to which it has been advanced; the step in progress is not completed."""
        if self._written is not None and self._written[1] <= now:  # on storage, and only not noticed yet
            self._commit()
        # A checkpoint that is not written ends with its round, and the next one begins it again.
        self._save_again = self._written is not None or self._paused_until is not None
        self._written = self._paused_until = None
        self._unsaved_seconds = self._schedule.unsaved_seconds

    def roll_back(self, cause: Cause) -> None:
        """Continue from the last checkpoint, because no node has a newer state in memory."""
        for stretch in self._stretches:
            lost = stretch.last - max(stretch.first, self.committed)
            self._accounts.lose(lost * stretch.node_seconds_per_step, cause)
        self.lost_steps += self.steps - self.committed
        self.steps, self._stretches = self.committed, []
        self._unsaved_seconds, self._save_again = 0.0, False

    def _new_schedule(self) -> CheckpointSchedule:
        return CheckpointSchedule(self._policy, _Main(), clock=lambda: self.at)

    def _next_step(self) -> int:
        """Return the next step after which something has to be done."""
        target = min(self.work, self.stop, math.inf if self._candidate is None else self._candidate)
        if self._written is not None:  # noticed at the first step boundary after it
            target = min(target, self.steps + max(1, math.ceil((self._written[1] - self.at) / self._pace)))
        return int(target)

    def _train(self, count: int) -> None:
        if count <= 0:
            return
        per_step = self._pace * self._members
        self._accounts.add("training", count * per_step)
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.node_seconds_per_step == per_step:
            last.last += count
        else:
            self._stretches.append(_Stretch(self.steps, self.steps + count, per_step))
        self.steps += count
        self.at += count * self._pace

    def _after_step(self) -> None:
        if self._written is not None and self._written[1] <= self.at:
            self._commit()
        if self._candidate is not None and self.steps >= self._candidate and not self.done:
            if self._schedule.due(self.steps):
                self.save()
            self._candidate = self._schedule.next_candidate(self.steps)

    def _end_pause(self) -> None:
        self._paused_until = None
        self._schedule.saved()
        self._written = self.steps, self.at + (0.0 if self._must_commit else self._write)
        if self._must_commit:
            self._commit()

    def _commit(self) -> None:
        assert self._written is not None
        self.committed, self._written = self._written[0], None
        self._schedule.written(self.steps)
        self._stretches = [stretch for stretch in self._stretches if stretch.last > self.committed]


def _whole(seconds: float, pace: float) -> int:
    """Return the number of steps that are completed within a time, exactly."""
    # The quotient is rounded, and may be one step off. Products of the times are exact.
    count = int(seconds / pace)
    while count * pace > seconds:
        count -= 1
    while (count + 1) * pace <= seconds:
        count += 1
    return max(0, count)
