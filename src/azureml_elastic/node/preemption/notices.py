"""Preemption notices of a node, merged from announcements of several sources, and the polled sources."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announcement:
    """Current announcement of one source.

    Args:
        seconds_left: seconds until the node may be lost; ``None`` or at most 0 if unknown.
    """

    reason: str
    seconds_left: float | None = None


@dataclass(frozen=True)
class Notice:
    """Active notice.

    Args:
        since: time of arrival, in seconds of the monotonic clock.
        until: deadline of the workers, by the same clock.
    """

    reason: str
    since: float
    until: float
    exit_code: int

    @classmethod
    def of(cls, announcement: Announcement, now: float, grace: float, exit_code: int) -> Notice:
        """Return the notice for a new announcement."""
        left = announcement.seconds_left
        until = now + (min(grace, left) if left is not None and left > 0 else grace)
        return cls(announcement.reason, now, until, exit_code)


def merge(
    active: Mapping[str, Notice],
    source: str,
    announced: Mapping[str, Announcement],
    *,
    now: float,
    grace: float,
    exit_code: int,
) -> dict[str, Notice]:
    """Return the active notices after a source has announced its complete current state.

    A notice keeps its arrival time, and its deadline is never extended.

    Args:
        active: active notices by key, ``<source>:<name>``.
        announced: current announcements of the source by name.
        grace: seconds that workers have to save and leave.
    """
    merged = {key: notice for key, notice in active.items() if not key.startswith(f"{source}:")}
    for name, announcement in announced.items():
        key, new = f"{source}:{name}", Notice.of(announcement, now, grace, exit_code)
        old = active.get(key, new)
        merged[key] = replace(old, until=min(old.until, new.until))
    return merged


class PolledSource(ABC):
    """Source of notices that is polled on its own thread, because a poll may hang.

    Args:
        announce: callback for each conclusive poll, with the current announcements by name.
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
    """File whose existence is a preemption notice, for an operator, a sidecar or another scheduler."""

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
