"""Sources of preemption notices that are polled on threads, and the marker file."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from azureml_elastic.node.preemption.notices import Announcement

__all__ = ["MarkerFile", "PolledSource"]

_LOG = logging.getLogger(__name__)


class PolledSource(ABC):
    """Source of notices that is polled on its own thread, because a poll may hang.

    Args:
        name: name of the thread.
        announce: callback for each conclusive poll, with the current announcements by name.
        interval: seconds between two polls.
    """

    def __init__(self, name: str, announce: Callable[[Mapping[str, Announcement]], None], interval: float) -> None:
        self._announce = announce
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, after the poll in progress."""
        self._stopped.set()

    @abstractmethod
    def poll(self) -> float:
        """Poll once and return the seconds until the next poll."""

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._stopped.wait(self.poll())


class MarkerFile(PolledSource):
    """File whose existence is a preemption notice, for an operator, a sidecar or another scheduler.

    Args:
        path: path of the file.
        announce: see :class:`PolledSource`.
        interval: see :class:`PolledSource`.
    """

    def __init__(
        self, path: str, announce: Callable[[Mapping[str, Announcement]], None], *, interval: float = 1.0
    ) -> None:
        super().__init__("preemption-marker", announce, interval)
        self._path = Path(path)

    def poll(self) -> float:
        """Look for the file; an error of the mount is inconclusive and leaves the last state."""
        try:
            self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self._announce({})
        except OSError as error:
            _LOG.debug("The marker file %s cannot be read: %s", self._path, error)
        else:
            self._announce({str(self._path): Announcement(f"marker file {self._path}")})
        return self._interval
