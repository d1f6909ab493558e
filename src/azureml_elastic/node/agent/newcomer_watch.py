"""Saves of a program without a session, for which waiting nodes wait; :mod:`~azureml_elastic.node.core.boundary`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from azureml_elastic.forks.optimizer_steps import Steps, ask_to_stop, read_steps
from azureml_elastic.forks.state_lookups import Lookups, read_lookups
from azureml_elastic.node.agent.saved_files import (
    SavedFiles,
    is_state_file,
    is_stopped,
    resume,
    scan,
    stop_between_saves,
)
from azureml_elastic.node.core.boundary import SaveRule

_MAX_NAMED = 3


def name_lookups(lookups: Lookups) -> str:
    """Return some of the paths, as a list in a sentence: those with the name of a state first, others may be data."""
    paths = sorted(lookups.files | lookups.folders, key=lambda path: (not is_state_file(Path(path).name), path))
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(paths[:_MAX_NAMED]) + more


def describe_wait(waiting: Iterable[str], lookups: Lookups, timeout: float | None) -> str:
    """Return what nodes wait for that come while a program without a session trains.

    Args:
        timeout: seconds for which they wait at most, ``None`` for no limit.
    """
    limit = "" if timeout is None else f" They wait for {timeout:g} s at most."
    begin = f"{', '.join(sorted(waiting))}: waiting, as the program has no session and is restarted for a new node. "
    named = name_lookups(lookups)
    if not named:
        return (
            f"{begin}It has not looked for a saved state at its start, so it would train all its steps again. New "
            f"nodes are let in when the round ends for another reason.{limit}"
        )
    return (
        f"{begin}They are let in after the next save of a file that it has looked for at its start, once it trains on: "
        f"{named}.{limit}"
    )


_LOG = logging.getLogger(__name__)

_SCAN_SECONDS = 1.0
"""Pause between two looks at the files."""

_SCAN_SHARE = 20
"""The pause is at least this many times as long as the look before it, so that slow storage is rarely read."""


class SaveWatch:
    """Looks for saves of files that the workers have looked for, on a thread: a mount may not answer for minutes.

    Args:
        folder: folder of the agent's socket, in which the workers note their lookups.
        excluded: folder below those of the program that is not read.
    """

    def __init__(self, folder: Path, excluded: Path | None = None) -> None:
        self._folder = folder
        self._excluded = excluded
        self._pids: tuple[int, ...] = ()
        self._files: SavedFiles | None = None
        self._changed = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.lookups = Lookups()
        """Where the workers have looked at their start, as far as was read."""
        self.scans = 0
        """Number of looks at the files since :meth:`begin`."""

    def begin(self, pids: Sequence[int]) -> None:
        """Forget what was saved before, and look for saves from now on."""
        self._pids = tuple(pids)
        self.lookups = Lookups()
        self.scans = 0
        # A new object: the thread may be at a look that began before, which it adds to the old one.
        self._files = SavedFiles()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="save-watch", daemon=True)
            self._thread.start()
        self._changed.set()

    def pause(self) -> None:
        """Stop looking until the next :meth:`begin`."""
        self._files = None

    def close(self) -> None:
        """End the thread, without waiting for a mount that does not answer."""
        self._closed = True
        self._changed.set()

    def take_save(self) -> bool:
        """Return, once for each save since :meth:`begin`, whether the program has saved."""
        files = self._files
        if files is None or files.saved is None:
            return False
        self._files = SavedFiles()
        return True

    def read_steps(self) -> Steps:
        """Return how many steps the workers' optimizers have taken."""
        return read_steps(self._folder, self._pids)

    def ask_to_stop(self, *, ask: bool = True) -> None:
        """Ask the first worker to stop after its next step, or to go on."""
        ask_to_stop(self._folder, self._pids[0], ask=ask)
        if not ask:
            resume(self._pids[:1])

    @property
    def has_stopped(self) -> bool:
        """Whether the first worker has stopped."""
        return is_stopped(self._pids[0])

    def stop_workers(self) -> bool:
        """Stop all workers unless they save at this moment, and return whether they are stopped now; else they run."""
        return stop_between_saves(self._pids, self.lookups.files | self.lookups.folders)

    def _run(self) -> None:
        while not self._closed:
            files, pause = self._files, None
            if files is not None and files.saved is None:
                began = time.monotonic()
                lookups = read_lookups(self._folder, self._pids)
                # One that was asked for before it was made, as folders for output are.
                made = {path for path in lookups.files if os.path.isdir(path)}  # noqa: PTH112
                self.lookups = lookups = Lookups(lookups.files - made, lookups.folders)
                found = scan(lookups, self._excluded)
                now = time.monotonic()
                files.add(found, now)
                self.scans += 1
                pause = max(_SCAN_SECONDS, _SCAN_SHARE * (now - began))
            if self._changed.wait(pause):
                self._changed.clear()


class NewcomerWatch:
    """Looks for what waiting nodes wait for, and says it. For the thread of rank 0's agent.

    Args:
        timeout: time after which nodes end the round without a save, ``None`` for never.

    Attributes:
        waits: which nodes wait for what, in one sentence; empty where none waits.
    """

    def __init__(
        self, saves: SaveWatch, timeout: timedelta | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._saves = saves
        self._timeout = None if timeout is None else timeout.total_seconds()
        self._clock = clock
        self._waiting: frozenset[str] = frozenset()
        self._since = 0.0
        self._rule = SaveRule()
        self._asked = False
        self.waits = ""

    def rest(self) -> None:
        """Stop looking: the round has ended, its workers have a session, or nobody waits any more."""
        if self._asked:
            self._saves.ask_to_stop(ask=False)
        self._asked = False
        self._saves.pause()
        self._waiting, self.waits = frozenset(), ""

    def await_save(self, waiting: frozenset[str], pids: Sequence[int]) -> None:
        """Look for saves from now on, unless that is done already."""
        if not self._waiting:
            self._since, self._rule = self._clock(), SaveRule()
            self._saves.begin(tuple(pids))
        self._waiting = waiting

    def take_saved(self) -> bool:
        """Return whether the program has saved, and has gone on training since the last call.

        What the nodes wait for is logged where that has changed.
        """
        if not self._waiting or self._asked:
            return False
        waits = describe_wait(self._waiting, self._saves.lookups, self._timeout)
        # The first look is not yet made at once; what it has found is said, and again where that changes.
        if waits != self.waits and self._clock() - self._since >= _SCAN_SECONDS:
            self.waits = waits
            _LOG.info("%s", waits)
        saved = self._saves.take_save()
        steps = self._saves.read_steps()  # later than the save
        goes_on = self._rule.goes_on(steps)
        if saved:
            self._rule.saved(steps)
        return goes_on

    def hold(self) -> bool:
        """Stop the workers unless they save at this moment, and return whether they are stopped now.

        Where the program takes steps, the first worker stops itself after the next one instead; see :meth:`take_held`.
        """
        if not any(self._saves.read_steps()):
            return self._saves.stop_workers()
        self._asked = True
        self._saves.ask_to_stop()
        self._rule.goes_on(self._saves.read_steps())  # only steps from now on count, at which it stops
        return False

    def take_held(self) -> bool:
        """Return whether the workers are stopped after a step, for which the first one was asked."""
        if not self._asked or not self._saves.has_stopped:
            return False
        self._asked = False
        if self._rule.goes_on(self._saves.read_steps()) and self._saves.stop_workers():
            return True
        self._saves.ask_to_stop(ask=False)
        return False

    def close(self) -> None:
        """Stop looking for files."""
        self._saves.close()
