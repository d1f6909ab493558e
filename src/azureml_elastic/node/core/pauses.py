"""How long a peer may be silent: durations without this process's own pauses, and a limit that is learned.

A dead peer and one that pauses (a live migration, swapping, an overloaded machine) look alike until the latter comes
back, so that any fixed timeout either is slow or takes pauses for losses. The limit is therefore short where all peers
have always been regular, and longer than their longest pause where they have not, as accrual failure detectors derive
it from the distribution of the gaps (Hayashibara et al., "The phi accrual failure detector", 2004). What matters here
is the tail of that distribution, of which the longest gap is the only evidence.
"""

from __future__ import annotations

from bisect import bisect_right

from azureml_elastic.config import RendezvousTimings

_MIN_PAUSES = 1000
"""Smallest number of pauses that are remembered; with one a second, a machine cannot train anyway."""

_LOST_BEATS = 4
"""Number of beats that may be late or lost, whatever is known of a peer."""

_KNOWN_BEATS = 12
"""Beats after which it is known whether a peer sends them regularly: its machine starts workers at first."""

_LONGEST_FACTOR = 1.5
"""Largest limit, in heartbeat timeouts: a run must not wait for a dead machine for as long as its longest pause."""


class PauseDetector:
    """Detector of the times in which this process did not run: stopped, swapped out, or on an overloaded machine.

    Messages that arrive during a pause may be read only after the clock. A timeout by the clock alone would then take
    all peers for lost because of a pause of this process.

    All times are those of one monotonic clock, in seconds.

    Args:
        tick: planned seconds between two calls of :meth:`tick`; a call that is more than one tick late ends a pause.
    """

    def __init__(self, now: float, tick: float) -> None:
        self._interval = tick
        self._last = now
        self._ends: list[float] = []
        self._paused = [0.0]
        """Total seconds of pauses, before the first of the ends and up to each of them."""

    def tick(self, now: float) -> None:
        """Record that the process runs."""
        elapsed, self._last = now - self._last, now
        if elapsed > 2 * self._interval:
            self._ends.append(now)
            # One interval without a tick is the plan, the rest a pause.
            self._paused.append(self._paused[-1] + elapsed - self._interval)
            if len(self._ends) > 2 * _MIN_PAUSES:
                # The totals are one more than the ends, and stay so: the first is that before all ends that are left.
                del self._ends[:_MIN_PAUSES], self._paused[:_MIN_PAUSES]

    def silence(self, since: float, now: float) -> float:
        """Return the seconds since a moment, without those of pauses."""
        return now - since - self._paused_since(since)

    def was_given_up(self, timeout: float, now: float) -> bool:
        """Return whether others may have given this process up, so that the end of a connection says nothing of them.

        At the beginning of a pause the last message to them is up to a tick old, and a pause is counted without a tick.

        Args:
            timeout: seconds of silence after which others give up.
        """
        self.tick(now)  # what others have done during a pause may be handled before the next tick
        return self._paused_since(now - 2 * timeout) >= timeout - 2 * self._interval

    def _paused_since(self, since: float) -> float:
        return self._paused[-1] - self._paused[bisect_right(self._ends, since)]


class SilenceLimit:
    """The seconds of silence after which a peer counts as lost, by the pauses of all peers that this node knows of.

    A node has one for all of its connections, over all rounds: what pauses one machine of a run pauses others. Nodes
    exchange their longest pause with their beats.

    Args:
        timings: ``heartbeat_timeout`` is the limit for a peer whose beats are not known yet.

    Attributes:
        tick: seconds between two beats of a peer.
        timeout: limit of a peer whose beats are not known yet.
        pause: longest pause so far, in seconds. It does not fade: how often pauses come cannot be learned from a few.
    """

    def __init__(self, timings: RendezvousTimings) -> None:
        self.timeout = timings.heartbeat_timeout.total_seconds()
        self.tick = timings.heartbeat_interval.total_seconds() / 2
        self.shortest = min(self.timeout, max(self.timeout / 3, _LOST_BEATS * self.tick))
        self.longest = _LONGEST_FACTOR * self.timeout
        self.pause = 0.0
        self._pause_before = 0.0
        self._learned_at = float("-inf")
        self._given_up: dict[str, float] = {}

    def seconds(self, beats: int) -> float:
        """Return the limit for a peer that has sent so many beats."""
        learned = self._for(self.pause)
        return learned if beats >= _KNOWN_BEATS else max(learned, self.timeout)

    def smallest(self, now: float) -> float:
        """Return the smallest limit that another node may have had a moment ago: it learns of a pause when it ends."""
        recently = now - self._learned_at < 2 * self.longest
        return self._for(self._pause_before if recently else self.pause)

    def learn(self, pause: float, now: float) -> None:
        """Take a pause into account. One beyond the largest limit teaches nothing: no limit would outlast it."""
        if self.pause < pause <= self.longest:
            # Of several pauses in quick succession, others may still use the limit from before the first one.
            if now - self._learned_at >= 2 * self.longest:
                self._pause_before = self.pause
            self.pause, self._learned_at = pause, now

    def gave_up(self, incarnation: str, last_received: float) -> None:
        """Record that a process counts as lost because it has been silent since a moment."""
        self._given_up[incarnation] = last_received

    def returned(self, incarnation: str, now: float) -> None:
        """Record that a process sends again: if it was given up, that was a pause."""
        since = self._given_up.pop(incarnation, None)
        if since is not None:
            self.learn(now - since - self.tick, now)

    def _for(self, pause: float) -> float:
        # Twice the longest gap that a living peer has had: its pause, and the tick until its next beat.
        return min(self.longest, max(self.shortest, 2 * (self.tick + pause)))


class BeatWatch:
    """The beats of one peer.

    Args:
        last_received: moment of the connection's start.
    """

    def __init__(self, limit: SilenceLimit, pauses: PauseDetector, last_received: float) -> None:
        self._limit = limit
        self._pauses = pauses
        self._last = last_received
        self._beats = 0

    def is_lost(self, last_received: float, now: float) -> bool:
        """Take the moment of the last message into account, at each tick; return whether the peer counts as lost."""
        if last_received > self._last:
            # A gap between two beats is one tick, and another one where a beat was not looked at.
            late = self._pauses.silence(self._last, last_received) - 2 * self._limit.tick
            self._limit.learn(late, now)
            self._last = last_received
            self._beats += 1
        return self._pauses.silence(self._last, now) > self._limit.seconds(self._beats)
