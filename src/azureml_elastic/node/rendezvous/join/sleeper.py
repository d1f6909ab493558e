"""The sleep of a node that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from azureml_elastic.node.rendezvous.reachability.probing import PeerProber
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability

__all__ = ["Sleeper"]

_MAX_SECONDS = 5.0
"""Longest sleep while an unreachable node is to be probed again."""


class Sleeper:
    """Sleep that other threads can end, and that starts the probes which are due.

    Args:
        wake: event that ends a sleep.
        clock: clock in monotonic seconds.
        prober: prober whose due probes are started before each sleep.
        reachability: pairs that are to be probed again.
        cancelled: function that returns whether to raise ``InterruptedError`` after a sleep.
    """

    def __init__(
        self,
        wake: threading.Event,
        clock: Callable[[], float],
        prober: PeerProber,
        reachability: Reachability,
        cancelled: Callable[[], bool],
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._prober = prober
        self._reachability = reachability
        self._cancelled = cancelled

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, at most for this time; return whether the node was woken.

        Raises:
            InterruptedError: the wait was cancelled.
        """
        self._prober.tick()
        woken = self._wake.wait(min(seconds, _MAX_SECONDS) if self._reachability.pairs() else seconds)
        self._wake.clear()
        if self._cancelled():
            raise InterruptedError("the node is leaving the run")
        return woken

    def sleep(self, seconds: float) -> None:
        """Sleep for this time, even if woken.

        Raises:
            InterruptedError: the wait was cancelled.
        """
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self.wait(left)
