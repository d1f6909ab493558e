"""Active preemption notices of a node: source, time of arrival and deadline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Announcement", "Notice", "first", "merge"]


@dataclass(frozen=True)
class Announcement:
    """A current announcement of one source.

    Args:
        reason: description of the source.
        seconds_left: seconds until the node may be lost; ``None`` or at most 0 if unknown.
        event: the id of the scheduled event that concerns this machine alone, so that it may be acknowledged.
    """

    reason: str
    seconds_left: float | None = None
    event: str | None = None


@dataclass(frozen=True)
class Notice:
    """An active notice.

    Args:
        reason: description of the source.
        since: arrival, in seconds of the monotonic clock.
        until: deadline of the workers, by the same clock.
        exit_code: exit code of a node that leaves because of the notice.
        event: see :class:`Announcement`.
    """

    reason: str
    since: float
    until: float
    exit_code: int
    event: str | None = None

    @classmethod
    def of(cls, announcement: Announcement, now: float, grace: float, exit_code: int) -> Notice:
        """Return the notice for a new announcement."""
        until = _until(announcement, now, grace)
        return cls(announcement.reason, now, until, exit_code, announcement.event)


def merge(
    standing: Mapping[str, Notice],
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
        standing: active notices by key, ``<source>:<name>``.
        source: name of the source.
        announced: current announcements of the source, by its own keys.
        now: current monotonic time in seconds.
        grace: seconds that workers have to save and leave.
        exit_code: exit code of a node that leaves because of the notice.
    """
    merged = {key: notice for key, notice in standing.items() if not key.startswith(f"{source}:")}
    for name, announcement in announced.items():
        key = f"{source}:{name}"
        new = Notice.of(announcement, now, grace, exit_code)
        old = standing.get(key)
        merged[key] = new if old is None else replace(old, until=min(old.until, _until(announcement, now, grace)))
    return merged


def first(notices: Iterable[Notice]) -> Notice | None:
    """Return the notice that came first, if there is any."""
    return min(notices, key=lambda notice: notice.since, default=None)


def _until(announcement: Announcement, now: float, grace: float) -> float:
    left = announcement.seconds_left
    return now + (min(grace, left) if left is not None and left > 0 else grace)
