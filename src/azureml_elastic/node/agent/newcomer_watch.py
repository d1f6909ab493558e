"""When waiting nodes may end a round whose workers have no session.

A program with a session stops at a step boundary. One without is ended, and the next round begins where the program
itself resumes. Whether it resumes shows only in what it reads: a program that saves and never reads begins anew. So a
round goes on until the program has saved, while nodes wait, a file that it has looked for at its start. Then next to
nothing is lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

from azureml_elastic.node.agent.newcomers import describe_wait
from azureml_elastic.node.agent.saved_files import SavedFiles, scan, stop_between_saves
from azureml_elastic.node.preload.state_lookups import Lookups, read_lookups

__all__ = ["NewcomerWatch", "SaveWatch"]

_LOG = logging.getLogger(__name__)

_SCAN_SECONDS = 1.0
"""Pause between two looks at the files."""

_SCAN_SHARE = 20
"""The pause is at least this many times as long as the look before it, so that slow storage is rarely read."""

_GONE_SECONDS = 5.0
"""Time without a waiting node after which the next one waits anew; hubs hold nodes back for less when several come."""


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
        """Forget what was saved before, and look for saves from now on.

        Args:
            pids: process ids of the workers.
        """
        self._pids = tuple(pids)
        self.lookups = Lookups()
        self.scans = 0
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

    @property
    def saved(self) -> bool:
        """Whether the program has saved since :meth:`begin`."""
        files = self._files
        return files is not None and files.saved is not None

    def stop_workers(self) -> bool:
        """Stop the workers unless they save at this moment, and return whether they are stopped now."""
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
    """Decides when waiting nodes may end a round whose workers have no session. For the thread of rank 0's agent.

    Args:
        saves: watch of what the program saves.
        timeout: time after which nodes end the round without a save, ``None`` for never.
        clock: clock in monotonic seconds.

    Attributes:
        waits: which nodes wait for what, in one sentence; empty where none waits.
    """

    def __init__(
        self, saves: SaveWatch, timeout: timedelta | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._saves = saves
        self._timeout = None if timeout is None else timeout.total_seconds()
        self._clock = clock
        self._size = 0
        self._pids: tuple[int, ...] = ()
        self._since: float | None = None
        self._seen = 0.0
        self.waits = ""

    def begin(self, world_size: int, pids: Sequence[int]) -> None:
        """The workers of a round that this node leads have been started.

        Args:
            world_size: number of workers of the round.
            pids: process ids of those on this node, with rank 0.
        """
        self.rest()
        self._size, self._pids = world_size, tuple(pids)

    def rest(self) -> None:
        """Stop looking: the round has ended, or its workers have a session."""
        self._saves.pause()
        self._since, self.waits = None, ""

    def nobody_waits(self) -> None:
        """No node waits at this moment."""
        if self._since is not None and self._clock() - self._seen >= _GONE_SECONDS:
            self.rest()

    def may_end_round(self, waiting: Iterable[str], *, connected: bool) -> bool:
        """Return whether these nodes may end the round now, and log what they wait for.

        The workers of this node are stopped then, so that they begin no save before they get SIGTERM.

        Args:
            waiting: names of the waiting nodes.
            connected: whether workers of the round have begun to connect to each other. What several workers save
                before may be prepared data.
        """
        self._seen = now = self._clock()
        if self._since is None:
            self._since = now
            self._saves.begin(self._pids)
        connected = connected or self._size == 1
        if connected and self._saves.saved and self._saves.stop_workers():
            return True
        left = None if self._timeout is None else self._timeout - (now - self._since)
        if left is not None and left <= 0:
            return True
        waits = describe_wait(waiting, self._saves.lookups, self._timeout)
        # The first look is not yet made at once; what it has found is said, and again where that changes.
        if waits != self.waits and now - self._since >= _SCAN_SECONDS:
            self.waits = waits
            _LOG.info("%s", waits)
        return False

    def close(self) -> None:
        """Stop looking for files."""
        self._saves.close()
