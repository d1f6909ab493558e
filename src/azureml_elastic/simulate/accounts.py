"""Accounting of simulated nodes: each second of each node has one activity, as in :mod:`ledger.accounting`.

Times are multiples of 2^-20 s, about a microsecond. Sums and differences of such floats are exact up to 2^33 s, which
is two million node-hours: the accounted node-seconds are the delivered ones to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from azureml_elastic.ledger.accounting import Activity, Cause, Total

_RESOLUTION = 2.0**-20


def exact(seconds: float) -> float:
    """Return a time rounded to the resolution of the simulation."""
    return seconds if math.isinf(seconds) else round(seconds / _RESOLUTION) * _RESOLUTION


def later(now: float, seconds: float) -> float:
    """Return a time that is at least this much later than ``now``, and not equal to it."""
    return seconds if math.isinf(seconds) else now + max(1, math.ceil(seconds / _RESOLUTION)) * _RESOLUTION


@dataclass(frozen=True)
class Life:
    """Lifetime of the process of a simulated node, or of several that begin and end together.

    Args:
        began: start in seconds since the submission of the run.
        ended: end in seconds since the submission of the run.
    """

    node: str
    pool: int
    began: float
    ended: float
    nodes: int = 1

    @property
    def seconds(self) -> float:
        """Time for which each node was delivered."""
        return self.ended - self.began


@dataclass
class Accounts:
    """Node-seconds of a run by activity and cause."""

    lives: list[Life] = field(default_factory=list)
    _seconds: dict[tuple[Activity, Cause | None], float] = field(default_factory=dict)

    def add(self, activity: Activity, node_seconds: float, cause: Cause | None = None) -> None:
        """Add node-seconds to an activity."""
        key = activity, cause
        self._seconds[key] = self._seconds.get(key, 0.0) + node_seconds

    def lose(self, node_seconds: float, cause: Cause) -> None:
        """Make training that has to be repeated lost work."""
        self.add("training", -node_seconds)
        self.add("lost work", node_seconds, cause)

    @property
    def delivered(self) -> float:
        """Node-seconds of the lifetimes."""
        return sum(life.seconds * life.nodes for life in self.lives)

    def totals(self) -> tuple[Total, ...]:
        """Return the node-seconds by activity and cause, the largest first."""
        found: Iterable[Total] = (Total(*key, seconds) for key, seconds in self._seconds.items() if seconds)
        return tuple(sorted(found, key=lambda total: -total.seconds))
