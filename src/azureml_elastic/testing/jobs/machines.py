"""The compute pools of a local workspace and their machines."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from pydantic import Field

from azureml_elastic.config.base import ConfigModel, Duration
from azureml_elastic.errors import UsageError

__all__ = ["Machine", "Machines", "Pool", "parse_pool"]

_FIRST_ADDRESS = 2
_LAST_ADDRESS = 254
_POLL_S = 0.05
_POOL = re.compile(
    r"(?P<name>[\w-]+)=(?P<nodes>\d+)(?::(?P<tier>low_priority|dedicated))?(?::(?P<seconds>\d+(?:\.\d+)?)s)?", re.ASCII
)


class Pool(ConfigModel):
    """A compute of the workspace.

    Args:
        nodes: maximum number of machines at once.
        tier: tier of the machines; only ``low_priority`` ones are evicted.
        provisioning: time from a request for a machine until it is available.
        refill: time after an eviction until another machine is available; ``None`` for never.
        size: VM size that the compute states, for prices.
    """

    nodes: int = Field(default=8, ge=1)
    tier: Literal["low_priority", "dedicated"] = "low_priority"
    provisioning: Duration = timedelta(0)
    refill: Duration | None = timedelta(0)
    size: str = "STANDARD_DS3_V2"


def parse_pool(text: str) -> tuple[str, Pool]:
    """Parse a pool of the command line: ``name=nodes``, optionally with ``:tier`` and ``:<provisioning seconds>s``.

    Args:
        text: pool such as ``spot=6``, ``sure=2:dedicated`` or ``sure=2:dedicated:5s``.
    """
    match = _POOL.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a pool. Write its name and number of nodes, as in spot=6, optionally followed by the "
            "tier (low_priority or dedicated) and the seconds to provision a machine, as in sure=2:dedicated:5s."
        )
    tier: Literal["low_priority", "dedicated"] = "dedicated" if match["tier"] == "dedicated" else "low_priority"
    return match["name"], Pool(nodes=int(match["nodes"]), tier=tier, provisioning=float(match["seconds"] or 0))


@dataclass(frozen=True)
class Machine:
    """A machine of a pool.

    The name is unique within the workspace and never reused; the address is a loopback address.
    """

    name: str
    address: str
    pool: str
    tier: str


class Machines:
    """All machines of a workspace; thread-safe."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        self.pools = pools
        self._used = dict.fromkeys(pools, 0)
        self._away: dict[str, list[float]] = {name: [] for name in pools}
        self._numbers = itertools.count()
        self._addresses = [f"127.0.0.{number}" for number in range(_FIRST_ADDRESS, _LAST_ADDRESS + 1)]
        self._change = threading.Condition()

    def take(self, pool: str, count: int, cancelled: Callable[[], bool]) -> tuple[Machine, ...] | None:
        """Wait until ``count`` machines are free at once and return them, or ``None`` once cancelled."""
        with self._change:
            while not cancelled():
                machines = self._take(pool, count)
                if machines is not None:
                    return machines
                self._change.wait(_POLL_S)
        return None

    def try_take(self, pool: str) -> Machine | None:
        """Return a machine, or ``None`` if none is free."""
        with self._change:
            machines = self._take(pool, 1)
        return machines[0] if machines else None

    def give_back(self, machine: Machine, *, evicted: bool = False) -> None:
        """Return a machine; an evicted one is missing from its pool until it is refilled."""
        with self._change:
            self._used[machine.pool] -= 1
            if evicted:
                refill = self.pools[machine.pool].refill
                back = math.inf if refill is None else time.monotonic() + refill.total_seconds()
                self._away[machine.pool].append(back)
            self._addresses.append(machine.address)
            self._change.notify_all()

    def refill(self, pool: str) -> None:
        """Replace all evicted machines of a pool, whatever its ``refill``."""
        with self._change:
            self._away[pool].clear()
            self._change.notify_all()

    def _take(self, pool: str, count: int) -> tuple[Machine, ...] | None:
        now = time.monotonic()
        self._away[pool] = [until for until in self._away[pool] if until > now]
        available = self.pools[pool].nodes - len(self._away[pool])
        if available - self._used[pool] < count or len(self._addresses) < count:
            return None
        self._used[pool] += count
        return tuple(
            Machine(f"{pool}-{next(self._numbers)}", self._addresses.pop(0), pool, self.pools[pool].tier)
            for _ in range(count)
        )
