"""A file that, while it exists, is the notice to leave: for an operator, a sidecar, or another scheduler.

It may lie on a mount that hangs, so it has a thread of its own.
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
    """Looks for the file again and again.

    Args:
        path: of the file.
        announce: called after each look that could tell, with the notice or with nothing.
        interval: seconds between two looks.
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
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the look that is under way."""
        self._stopped.set()

    def look(self) -> None:
        """Look once."""
        try:
            self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._announce({})
        except OSError as error:
            # A mount that is away says nothing about the file: what was known stands.
            _LOG.debug("The marker %s cannot be looked at: %s", self._path, error)
        else:
            self._announce({str(self._path): Announcement(f"marker file {self._path}")})

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(self._interval)
