"""The sleep of a node that waits."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.errors import NodeLeaving
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.probing import PeerProber

__all__ = ["Sleeper"]

_PROBING_SECONDS = 5.0
"""Longest sleep while an unreachable node is to be probed again."""

_MAX_SECONDS = 3600.0
"""Longest sleep."""


@dataclass(frozen=True)
class Sleeper:
    """Sleep that other threads can end, and that starts the probes which are due.

    Args:
        context: clock and event that ends a sleep.
        prober: prober whose due probes are started before each sleep.
    """

    context: Context
    prober: PeerProber

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, at most for this time; return whether the node was woken.

        Raises:
            NodeLeaving: this node must leave.
        """
        self.prober.tick()
        longest = _PROBING_SECONDS if self.prober.reachability.pairs() else _MAX_SECONDS
        woken = self.context.wake.wait(min(seconds, longest))
        self.context.wake.clear()
        if self.context.surroundings.must_leave():
            raise NodeLeaving("the node is leaving the run")
        return woken

    def sleep(self, seconds: float) -> None:
        """Sleep for this time, even if woken.

        Raises:
            NodeLeaving: this node must leave.
        """
        until = self.context.clock() + seconds
        while (left := until - self.context.clock()) > 0:
            self.wait(left)
