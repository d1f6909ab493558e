"""Detector of workers that no longer complete steps; :mod:`azureml_elastic.node.core.hangs` defines the limits.

A first evaluation longer than the floor cannot be distinguished from a hang. Each verdict therefore doubles the limits
for a good while: an evaluation of up to 64 floors is over after a few restarts, and is learned from then on.

All times are seconds of one agent's monotonic clock. Time in which this agent itself did not run (a frozen machine)
does not count, for neither did its workers then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from azureml_elastic.ipc.agent_messages import HangLesson
from azureml_elastic.node.core.events import Hang, Phase
from azureml_elastic.node.core.hangs import HangPolicy, pause_limit, step_limit

_REMEMBERED_STEPS = 512
_MOST_DOUBLINGS = 6
_EXTENSION_FACTOR = 20.0
"""How long doubled limits last after a verdict, in multiples of the limit."""

_FALLBACK_FACTOR = 2.0
_FALLBACK_SECONDS = 10.0
"""How much longer an agent that does not lead waits: it acts only when rank 0's agent itself is stuck."""

_LONGEST_LOOK_SECONDS = 5.0
"""Between two looks of an agent that runs; it looks ten times a second."""

_NEWS = 1.1
"""Learned durations are broadcast once they have grown by this factor."""


class HangDetector:
    """Watches the steps of one node's workers, through all rounds. Thread-safe."""

    def __init__(self, policy: HangPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.RLock()
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest = 0.0
        self._longest_pause = 0.0
        self._broadcast = (0.0, 0.0)
        self._doublings = 0
        self._extended_until = 0.0
        self._looked = clock()
        self._reset()

    def _reset(self) -> None:
        self._steps: dict[int, int] = {}
        self._busy: dict[int, bool] = {}
        self._open = False
        self._over = False
        self._phase: Phase = "start"
        self._since = self._looked

    def begin(self) -> None:
        """A round begins; what was learned stays."""
        with self._lock:
            self._look()
            self._reset()
            self._broadcast = (0.0, 0.0)  # there may be nodes that have not received it

    def opened(self) -> None:
        """A local worker has opened its session. Until then nothing is watched: it may be a program without one."""
        with self._lock:
            now = self._look()
            if not self._open:
                self._open = True
                self._since = now

    def completed(self, step: int, local_rank: int = 0) -> None:
        """A local worker has completed a step, and so is not busy any more."""
        with self._lock:
            now = self._look()
            self._open = True
            # The furthest worker counts. One that does not come along stops the others at the next collective.
            advances = step > self.step
            self._steps[local_rank] = max(step, self._steps.get(local_rank, 0))
            self._busy.pop(local_rank, None)
            if advances:
                self._learn(now - self._since)
                self._since = now
                self._phase = "step"
            self._turn(now)

    def busy(self, local_rank: int = 0, *, bounded: bool = True) -> None:
        """A local worker announces that its next step will take its time.

        Args:
            bounded: whether a pause's limit applies. Without it none does, until :meth:`free` or the next step: for
                waits that have a limit of their own.
        """
        with self._lock:
            self._busy[local_rank] = bounded
            self._turn(self._look())

    def free(self, local_rank: int = 0) -> None:
        """What the worker has announced is over; time counts anew."""
        with self._lock:
            self._busy.pop(local_rank, None)
            self._turn(self._look())

    def finished(self) -> None:
        """A local worker's training has ended, or it has left at a boundary: nothing more to watch in this round."""
        with self._lock:
            self._over = True

    def fired(self, hang: Hang) -> None:
        """Take in a verdict, one's own or another agent's: no second one in this round, longer limits in the next."""
        with self._lock:
            now = self._look()
            self._over = True
            self._doublings = min(_MOST_DOUBLINGS, self._doublings + 1) if now < self._extended_until else 1
            self._extended_until = now + _EXTENSION_FACTOR * 2.0 * hang.limit

    def verdict(self, *, leads: bool = True) -> Hang | None:
        """Return a hang, once a round. To be asked several times a second.

        Args:
            leads: whether this is rank 0's agent. The others wait for more than twice as long.
        """
        with self._lock:
            now = self._look()
            if not self._policy.enabled or self._over or not self._open or self._phase == "free":
                return None
            limit = self.limit if leads else self.limit * _FALLBACK_FACTOR + _FALLBACK_SECONDS
            waited = now - self._since
            if waited <= limit:
                return None
            hang = Hang(self.step, round(waited, 3), round(limit, 3), self._phase)
            self.fired(hang)
            return hang

    @property
    def limit(self) -> float:
        """Seconds that the leader allows in the present phase."""
        with self._lock:
            limit = step_limit(self._policy, self._gaps, self._longest)
            if self._phase != "step":
                limit = pause_limit(self._policy, limit, self._longest_pause)
            extended = self._policy.fixed is None and self._looked < self._extended_until
            return limit * 2.0**self._doublings if extended else limit

    @property
    def step(self) -> int:
        """The furthest step that a local worker has completed in this round."""
        with self._lock:
            return max(self._steps.values(), default=0)

    @property
    def steps(self) -> dict[int, int]:
        """The last step that each local rank has completed in this round."""
        with self._lock:
            return dict(self._steps)

    def lesson(self) -> HangLesson | None:
        """Return the learned durations if rank 0's agent must broadcast them: new nodes have not seen the long gaps."""
        with self._lock:
            sent, learned = self._broadcast, (self._longest, self._longest_pause)
            # In the first step all have taken part, so that all receive it.
            if self._phase != "step" or not any(new > _NEWS * old for new, old in zip(learned, sent, strict=True)):
                return None
            self._broadcast = learned
            return HangLesson(self._longest, self._longest_pause)

    def learn(self, lesson: HangLesson) -> None:
        """Adopt longer durations that another agent has learned."""
        with self._lock:
            self._longest = max(self._longest, lesson.longest)
            self._longest_pause = max(self._longest_pause, lesson.longest_pause)

    def _learn(self, seconds: float) -> None:
        """Learn from a stretch that has ended well."""
        if self._phase == "step":
            self._gaps.append(seconds)
            self._longest = max(self._longest, seconds)
        elif self._phase != "free":
            self._longest_pause = max(self._longest_pause, seconds)

    def _turn(self, now: float) -> None:
        """Enter the phase that the workers' announcements call for."""
        phase: Phase = "step" if self._steps else "start"
        if self._busy:
            phase = "pause" if all(self._busy.values()) else "free"
        if phase == self._phase:
            return
        # A pause ends well with any announcement; a step that one breaks off was no whole step, and teaches nothing.
        if self._phase == "pause":
            self._learn(now - self._since)
        self._phase = phase
        self._since = now

    def _look(self) -> float:
        """Return the time, and leave out what has passed while this process did not run."""
        now = self._clock()
        if now - self._looked > _LONGEST_LOOK_SECONDS:
            self._since += now - self._looked
        self._looked = now
        return now
