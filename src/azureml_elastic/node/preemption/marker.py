"""Marker file whose existence is a preemption notice, for an operator, a sidecar or another scheduler.

The file may be on a mount that hangs, so that it is polled on a separate thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from azureml_elastic.node.preemption.notices import Announcement

__all__ = ["MarkerFileWatcher"]

_LOG = logging.getLogger(__name__)


class MarkerFileWatcher:
    """Poller of the marker file.

    Args:
        path: path of the marker file.
        announce: callback for each conclusive poll, with the announcement or an empty mapping.
        interval: seconds between two polls.
    """

    def __init__(
        self, path: str, announce: Callable[[Mapping[str, Announcement]], None], *, interval: float = 1.0
    ) -> None:
        self._path = Path(path)
        self._announce = announce
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preemption-marker", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, after the poll in progress."""
        self._stopped.set()

    def look(self) -> None:
        """Poll once."""
        try:
            self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._announce({})
        except OSError as error:
            # An unavailable mount is inconclusive: the last known state remains.
            _LOG.debug("The marker %s cannot be looked at: %s", self._path, error)
        else:
            self._announce({str(self._path): Announcement(f"marker file {self._path}")})

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(self._interval)
