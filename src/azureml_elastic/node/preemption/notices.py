"""Preemption notices of a node, merged from the announcements of several sources. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["Announcement", "Notice", "merge"]


@dataclass(frozen=True)
class Announcement:
    """Current announcement of one source.

    Args:
        reason: description of the source.
        seconds_left: seconds until the node may be lost; ``None`` or at most 0 if unknown.
        event: id of the scheduled event if it concerns this machine alone, so that it may be acknowledged.
    """

    reason: str
    seconds_left: float | None = None
    event: str | None = None


@dataclass(frozen=True)
class Notice:
    """Active notice.

    Args:
        reason: description of the source.
        since: time of arrival, in seconds of the monotonic clock.
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
        left = announcement.seconds_left
        until = now + (min(grace, left) if left is not None and left > 0 else grace)
        return cls(announcement.reason, now, until, exit_code, announcement.event)


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
        source: name of the source.
        announced: current announcements of the source by name.
        now: current monotonic time in seconds.
        grace: seconds that workers have to save and leave.
        exit_code: exit code of a node that leaves because of the notice.
    """
    merged = {key: notice for key, notice in active.items() if not key.startswith(f"{source}:")}
    for name, announcement in announced.items():
        key, new = f"{source}:{name}", Notice.of(announcement, now, grace, exit_code)
        old = active.get(key, new)
        merged[key] = replace(old, until=min(old.until, new.until))
    return merged
