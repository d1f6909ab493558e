"""The notices that stand against a node, as data: what was announced, since when, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Announcement", "Notice", "first", "merge"]


@dataclass(frozen=True)
class Announcement:
    """What a source says now.

    Args:
        reason: names the source.
        seconds_left: until the node may be gone, ``None`` or nothing positive if that is not known.
        event: the id of the scheduled event that concerns this machine alone, so that it may be acknowledged.
    """

    reason: str
    seconds_left: float | None = None
    event: str | None = None


@dataclass(frozen=True)
class Notice:
    """A notice that stands.

    Args:
        reason: names the source.
        since: when it came, in seconds of the monotonic clock.
        until: when the workers have had their time, by the same clock.
        exit_code: of a node that leaves for it.
        event: see :class:`Announcement`.
    """

    reason: str
    since: float
    until: float
    exit_code: int
    event: str | None = None

    @classmethod
    def of(cls, announcement: Announcement, now: float, grace: float, exit_code: int) -> Notice:
        """Return the notice of an announcement that is new."""
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
    """Return the notices that stand after a source has spoken: all of its own, and nothing else of its own.

    A notice keeps the time at which it came. Its end only ever comes nearer: whoever was told to hurry cannot rely on
    having understood the second announcement better than the first.

    Args:
        standing: by key; the source's keys begin with its name and a colon.
        source: its name.
        announced: what it says now, by its own keys.
        now: seconds of the monotonic clock.
        grace: seconds.
        exit_code: of a node that leaves for it.
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
