"""When waiting nodes may end a round, and when that would cost more than it brings.

A program with a session stops at a step boundary. One without is ended, and the next round begins where the program
itself resumes. Whether it resumes shows only in what it reads: a program that saves and never reads begins anew. So a
round goes on until the program has saved, while nodes wait, a file that it has looked for at its start. Then next to
nothing is lost.
"""

from __future__ import annotations

from azureml_elastic.node.core.training_actions import AwaitSave, ForgetSaves, HoldWorkers, TrainingAction
from azureml_elastic.node.core.training_events import Pace

__all__ = ["Newcomers", "ends_soon", "seconds_left"]

_REMAINING_SECONDS = 1.0
"""A newcomer is not let in any more when the run will end sooner than this: it would only hold it up."""

_GONE_SECONDS = 5.0
"""Time without a waiting node after which the next one waits anew; hubs hold nodes back for less when several come."""


def seconds_left(pace: Pace | None, expected: int | None, step: int, now: float) -> float | None:
    """Return the seconds that training will take at its pace so far, ``None`` where that is unknown.

    Args:
        pace: when and at which step it began.
        expected: number of steps of the whole run, if known.
        step: the furthest step so far.
        now: monotonic seconds.
    """
    if expected is None or pace is None or step <= pace.step:
        return None
    return max(0, expected - step) * (now - pace.moment) / (step - pace.step)


def ends_soon(seconds: float | None) -> bool:
    """Return whether the training ends too soon for newcomers; ``None`` if it is unknown when."""
    return seconds is not None and seconds < _REMAINING_SECONDS


class Newcomers:
    """Decides when waiting nodes may end a round whose workers have no session. On rank 0's node.

    Args:
        timeout: seconds after which nodes end the round without a save, ``None`` for never.
        world_size: number of workers of the round.
    """

    def __init__(self, timeout: float | None, world_size: int) -> None:
        self._timeout = timeout
        self._alone = world_size == 1
        self._since: float | None = None
        self._seen = 0.0
        self._saved = False
        self._awaited: frozenset[str] = frozenset()

    @property
    def until(self) -> float | None:
        """Monotonic seconds at which they may end the round without a save."""
        return None if self._since is None or self._timeout is None else self._since + self._timeout

    def rest(self) -> list[TrainingAction]:
        """Stop looking: the workers have a session, or nobody waits any more."""
        if self._since is None:
            return []
        self._since, self._saved, self._awaited = None, False, frozenset()
        return [ForgetSaves()]

    def nobody_waits(self, now: float) -> list[TrainingAction]:
        """No node waits at this moment."""
        return self.rest() if now - self._seen >= _GONE_SECONDS else []

    def saved(self) -> None:
        """The program has saved since nodes wait."""
        self._saved = self._since is not None

    def wait(self, waiting: frozenset[str], now: float, *, connected: bool) -> tuple[bool, list[TrainingAction]]:
        """Return whether these nodes may end the round now, and what to do.

        The workers of this node are stopped before, so that they begin no save before they get SIGTERM.

        Args:
            waiting: names of the waiting nodes.
            now: monotonic seconds.
            connected: whether workers of the round have begun to connect to each other. What several workers save
                before may be prepared data.
        """
        actions: list[TrainingAction] = []
        self._seen = now
        if self._since is None:
            self._since = now
        if waiting != self._awaited:
            self._awaited = waiting
            actions.append(AwaitSave(waiting))
        if (until := self.until) is not None and now >= until:
            return True, actions
        if self._saved and (connected or self._alone):
            actions.append(HoldWorkers())
        return False, actions
