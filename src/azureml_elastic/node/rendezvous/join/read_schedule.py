"""When a node that waits for an open round reads the rows, and when it decides by what its hub has received."""

from __future__ import annotations

__all__ = ["ReadSchedule"]

_POLL_SECONDS = (0.1, 2.0)
"""First and longest pause between two reads of a node that looks after the round."""

_CHECK_SECONDS = (10.0, 60.0)
"""The same for a node to which a hub sends changes, in case the hub fails to."""

_GATHER_SECONDS = 0.02
"""Time between two decisions by what the node's hub has received, since many nodes come at once."""


class ReadSchedule:
    """The schedule of one node, by its own monotonic clock.

    Args:
        now: current monotonic time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._active = False
        self._read_last = now - _POLL_SECONDS[0]
        self._poll = _POLL_SECONDS[0]
        self._check = _CHECK_SECONDS[0]
        self._decided_last = now - _GATHER_SECONDS
        self._received = True
        self._read_at = now + self._check

    def set_active(self, active: bool, now: float) -> None:
        """Set whether this node looks after the round; when that begins it reads at once."""
        if active and not self._active:
            self._poll = _POLL_SECONDS[0]
            self._read_at = now
        self._active = active

    def candidate_came(self) -> None:
        """Read again soon: a node has come that only the rows name."""
        self._poll = _POLL_SECONDS[0]
        self._read_at = min(self._read_at, self._read_last + self._poll)

    def read_now(self, now: float) -> None:
        """Read at once: what was known has changed."""
        self._read_at = min(self._read_at, now)

    def hub_received(self) -> None:
        """Decide again soon: this node's hub may have received something."""
        self._received = True

    def take_decision(self, now: float) -> bool:
        """Return, once for each time that it is due, whether to decide by what the hub has received."""
        if not self._active or not self._received or now < self._decided_last + _GATHER_SECONDS:
            return False
        self._decided_last, self._received = now, False
        return True

    def should_read(self, now: float) -> bool:
        """Return whether to read the rows."""
        return now >= self._read_at

    def has_read(self, now: float, next_change: float) -> None:
        """Record a read; ``next_change`` is the number of seconds until time alone may change the decision."""
        self._read_last = now
        self._read_at = now + min(next_change, self._poll if self._active else self._check)
        if self._active:
            self._poll = min(self._poll * 1.5, _POLL_SECONDS[1])
        else:
            self._check = min(self._check * 2, _CHECK_SECONDS[1])

    def has_decided(self, now: float, next_change: float) -> None:
        """Record a decision by what the hub has received; for the arguments see :meth:`has_read`."""
        self._read_at = min(self._read_at, now + next_change)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until a read or a decision is due, unless the node is woken."""
        until = self._read_at
        if self._active and self._received:
            until = min(until, self._decided_last + _GATHER_SECONDS)
        return max(0.0, until - now)
