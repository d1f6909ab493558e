"""Watches the progress of rounds without a session, for the decision when newcomers may end them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from azureml_elastic.node.agent.newcomers import RoundProgress, may_end_round, minimum_seconds
from azureml_elastic.node.agent.output_files import SavedFiles, scan

__all__ = ["NewcomerWatch", "OutputWatch"]

_LOG = logging.getLogger(__name__)

_SCAN_SECONDS = 1.0
"""Pause between two scans of the program's output folders."""

_SCAN_SHARE = 20
"""The pause is at least this many times as long as the scan before it, so that slow storage is rarely read."""

_SCAN_AGE_SHARE = 0.02
"""Once the program has saved, the pause is at least this share of the time since the round's beginning: later saves are
for the ledger alone."""

_CONNECTION_SECONDS = 0.1
"""Time between two looks whether the workers have connected."""


class OutputWatch:
    """Looks for files that the program saves, on a thread: a mount may not answer for minutes.

    Args:
        paths: files and folders that the program may save to.
        excluded: folder below them that is not read.
    """

    def __init__(self, paths: Sequence[Path], excluded: Path | None = None) -> None:
        self._paths = tuple(paths)
        self._excluded = excluded
        self._files: SavedFiles | None = None
        self._began = 0.0
        self._changed = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Forget what was saved before, and look for new files from now on."""
        self._began = time.monotonic()
        self._files = SavedFiles()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output-watch", daemon=True)
            self._thread.start()
        self._changed.set()

    def pause(self) -> None:
        """Stop looking for files until the next :meth:`begin`."""
        self._files = None

    def close(self) -> None:
        """End the thread, without waiting for a mount that does not answer."""
        self._closed = True
        self._changed.set()

    @property
    def saved(self) -> bool:
        """Whether the program has saved since :meth:`begin`."""
        return self.saved_at is not None

    @property
    def saved_at(self) -> float | None:
        """When the last save since :meth:`begin` was seen, in monotonic seconds; ``None`` before the first one."""
        files = self._files
        return None if files is None else files.saved_at

    def _run(self) -> None:
        while not self._closed:
            files, pause = self._files, None
            if files is not None:
                began = time.monotonic()
                found = scan(self._paths, self._excluded)
                now = time.monotonic()
                files.add(found, now)
                pause = max(_SCAN_SECONDS, _SCAN_SHARE * (now - began))
                if files.saved:
                    pause = max(pause, _SCAN_AGE_SHARE * (now - self._began))
            if self._changed.wait(pause):
                self._changed.clear()


class NewcomerWatch:
    """Decides when waiting nodes may end a round whose workers have no session. For the thread of rank 0's agent.

    Args:
        outputs: watch of the program's output folders.
        minimum: minimum training time of a round in seconds.
        clock: clock in monotonic seconds.
    """

    def __init__(self, outputs: OutputWatch, minimum: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._outputs = outputs
        self._minimum = minimum
        self._clock = clock
        self._unsaved_rounds = 0
        self._size = 0
        self._started = 0.0
        self._has_connected: Callable[[], bool] = lambda: False
        self._connected: float | None = None
        self._look_at = 0.0
        self._watching = self._logged = False

    @property
    def connected_at(self) -> float | None:
        """When workers of the round have begun to connect to each other, in monotonic seconds; ``None`` before."""
        return self._connected

    @property
    def saved_at(self) -> float | None:
        """When the program's last save in the round was seen, in monotonic seconds; ``None`` before the first one."""
        return self._outputs.saved_at

    def begin(self, world_size: int, has_connected: Callable[[], bool]) -> None:
        """The workers of a round that this node leads have been started.

        Args:
            world_size: number of workers of the round.
            has_connected: function that returns whether workers have used the round's store.
        """
        self.rest()
        self._size = world_size
        self._started = self._look_at = self._clock()
        self._has_connected = has_connected
        self._connected = None
        self._logged = False

    def watch(self) -> None:
        """Look at the progress of the round; called often, while its workers have no session."""
        if not self._watching:
            self._watching = True
            self._outputs.begin()
        now = self._clock()
        if self._connected is None and now >= self._look_at:
            self._look_at = now + _CONNECTION_SECONDS
            if self._has_connected():
                self._connected = now
                self._outputs.begin()  # files from before, such as prepared data, are no sign of training

    def rest(self) -> None:
        """Stop looking: the round has ended, or its workers have a session."""
        if self._outputs.saved:
            self._unsaved_rounds = 0
        self._outputs.pause()
        self._watching = False

    def may_end_round(self, waiting: Iterable[str]) -> bool:
        """Return whether these nodes may end the round now, and log once why they have to wait.

        Args:
            waiting: names of the waiting nodes.
        """
        now = self._clock()
        connected = None if self._connected is None else now - self._connected
        progress = RoundProgress(now - self._started, connected, self._outputs.saved, self._size)
        if may_end_round(progress, self._minimum, self._unsaved_rounds):
            return True
        if not self._logged:
            self._logged = True
            _LOG.info(
                "%s waits: the program has no session, so work since its last save is lost when the round ends. It "
                "ends after the program's next save, or once it has trained for %.0f s.",
                ", ".join(sorted(waiting)), minimum_seconds(self._minimum, self._unsaved_rounds),
            )  # fmt: skip
        return False

    def ends_round(self) -> None:
        """Record that newcomers end the round now."""
        self._unsaved_rounds = 0 if self._outputs.saved else self._unsaved_rounds + 1

    def close(self) -> None:
        """Stop looking for files."""
        self._outputs.close()
