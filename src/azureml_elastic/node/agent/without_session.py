"""Programs that train without a session: what waiting nodes wait for, what restarts cost them, and that they train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from azureml_elastic.forks.optimizer_steps import ask_to_hold, read_training
from azureml_elastic.forks.state_files import is_state_file, read_lookups
from azureml_elastic.ledger.events import TrainsWithoutSession

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

    def __init__(self, folder: Path, timeout: timedelta | None, clock: Callable[[], float]) -> None:
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

    def hold(self) -> None:
        """Keep the program that waits where it is until it gets SIGTERM."""
        self._kept = self._seen


_IMPORT_SECONDS = 30.0
"""Time in which a program opens its session, after the start of its workers."""

_CONNECT_SECONDS = 3.0
"""The same, once its ranks begin to connect to each other."""

_REPORT_SECONDS = 1.0, 2.0
"""Time in which a session reports that it has begun, after a first backward pass; and where one has been opened."""


def describe_restarts(lookups: Collection[str]) -> str:
    """Return what happens to a program without a session when the nodes change.

    Args:
        lookups: where it has looked before its first step.
    """
    begin = (
        "The script trains without a session of this library. When a node is lost or comes, it is started again "
        "from its first line, "
    )
    end = "docs/how-to/stacks/index.md says how a script goes on."
    if named := name_lookups(lookups):
        return (
            f"{begin}and goes on from what it reads there: all that it has not saved and reads back is trained again. "
            f"It has looked for {named}. {end}"
        )
    return f"{begin}and trains all its steps again, as it has not looked for a saved state before its first one. {end}"


class SessionWatch:
    """Looks on rank 0's node whether the workers train without a session, until that is known. For the agent's thread.

    Args:
        folder: folder of the agent's socket, in which the workers note what they do.
        record: function that records an event of a kind in the ledger.
    """

    def __init__(
        self,
        folder: Path,
        record: Callable[[type[TrainsWithoutSession]], None],
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._record = record
        self._clock = clock
        self._began: float | None = None
        self._connecting: float | None = None
        self._training: float | None = None
        self._recorded = self._done = False

    def session_has_begun(self) -> None:
        """Look no more: the program does not train without a session."""
        self._done = True

    def look(self, pids: Sequence[int], *, connecting: bool, opened: bool) -> None:
        """Look once; to be called several times a second until a session has begun.

        Args:
            connecting: whether workers of the round have begun to connect to each other.
            opened: whether a worker has opened a session, which perhaps takes no part in its training.
        """
        if self._done:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._connecting = None if not connecting else now if self._connecting is None else self._connecting
        connects = self._connecting is not None and now - self._connecting >= _CONNECT_SECONDS
        if any(any(read_training(self._folder, pid).steps) for pid in pids):
            self._training = now if self._training is None else self._training
        else:
            self._training = None
        trains = self._training is not None and now - self._training >= _REPORT_SECONDS[opened]
        late = not opened and (connects or now - self._began >= _IMPORT_SECONDS)
        if not self._recorded and (trains or late):
            self._recorded = True
            self._record(TrainsWithoutSession)
        if trains:
            self._done = True
            lookups = read_lookups(self._folder, pids)
            _LOG.log(logging.INFO if lookups else logging.WARNING, "%s", describe_restarts(lookups))
