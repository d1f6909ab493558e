"""Saves of a program without a session, for which waiting nodes wait; :mod:`~azureml_elastic.node.core.boundary`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from azureml_elastic.forks.optimizer_steps import ask_to_hold, read_training
from azureml_elastic.forks.state_files import is_state_file, read_lookups

_LOG = logging.getLogger(__name__)

_MAX_NAMED = 3

_SAY_SECONDS = 1.0
"""Time between two looks for what is to be said, and before the first: a program may just begin to look for its files.
"""


def name_lookups(lookups: Collection[str]) -> str:
    """Return some of the paths, as a list in a sentence: those with the name of a state first, others may be data."""
    paths = sorted(lookups, key=lambda path: (not is_state_file(path), path))
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(paths[:_MAX_NAMED]) + more


def describe_wait(waiting: Iterable[str], lookups: Collection[str], timeout: float | None) -> str:
    """Return what nodes wait for that come while a program without a session trains.

    Args:
        lookups: where it has looked before its first step.
        timeout: seconds for which they wait at most, ``None`` for no limit.
    """
    limit = "" if timeout is None else f" They wait for {timeout:g} s at most."
    begin = f"{', '.join(sorted(waiting))}: waiting, as the program has no session and is restarted for a new node. "
    if not lookups:
        return (
            f"{begin}It has not looked for a saved state at its start, so it would train all its steps again. New "
            f"nodes are let in when the round ends for another reason.{limit}"
        )
    return (
        f"{begin}They are let in after the next save of a file that it has looked for at its start, once it trains on: "
        f"{name_lookups(lookups)}.{limit}"
    )


class NewcomerWatch:
    """Asks the workers to wait after their next save while nodes wait, and says so. For rank 0's agent's thread.

    Args:
        folder: folder of the agent's socket, in which the workers report.
        timeout: time after which nodes end the round without a save, ``None`` for never.

    Attributes:
        waits: which nodes wait for what, in one sentence; empty where none waits.
    """

    def __init__(self, folder: Path, timeout: timedelta | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._timeout = None if timeout is None else timeout.total_seconds()
        self._clock = clock
        self._pids: Sequence[int] = ()
        self._waiting: frozenset[str] = frozenset()
        self._say_at = 0.0
        self._seen = self._kept = False
        self.waits = ""

    def rest(self) -> None:
        """Look no more: the round has ended, its workers have a session, or nobody waits any more."""
        if not self._kept:  # those are let go once they have got SIGTERM
            ask_to_hold(self._folder, self._pids, ask=False)
        self._waiting, self._pids, self.waits = frozenset(), (), ""
        self._seen = self._kept = False

    def await_save(self, waiting: frozenset[str], pids: Sequence[int]) -> None:
        """Look for saves from now on, unless that is done already."""
        if not self._waiting:
            self._say_at, self._pids = self._clock() + _SAY_SECONDS, tuple(pids)
        self._waiting = waiting

    def take_saved(self) -> bool:
        """Return whether the program has saved and waits in the step that follows; it does so until the next call.

        What the nodes wait for is logged where that has changed.
        """
        if not self._waiting or self._kept:
            return False
        if (now := self._clock()) >= self._say_at:
            self._say_at = now + _SAY_SECONDS
            waits = describe_wait(self._waiting, read_lookups(self._folder, self._pids), self._timeout)
            if waits != self.waits:
                self.waits = waits
                _LOG.info("%s", waits)
        # Each time: a worker may only have begun. One that nobody has kept since the last call goes on.
        ask_to_hold(self._folder, self._pids, ask=not self._seen)
        self._seen = not self._seen and any(read_training(self._folder, pid).held for pid in self._pids)
        return self._seen

    def hold(self) -> bool:
        """Keep the program where it is until it gets SIGTERM; return whether it waits."""
        self._kept = self._seen
        return self._kept
