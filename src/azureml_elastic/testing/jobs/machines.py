"""The pools of a local workspace: how many machines there are, of which tier, and how long a new one takes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.errors import UsageError

__all__ = ["Machine", "Machines", "Pool", "parse_pool"]

_FIRST_ADDRESS = 2
_LAST_ADDRESS = 254
_LOOK_S = 0.05
_POOL = re.compile(
    r"(?P<name>[\w-]+)=(?P<nodes>\d+)(?::(?P<tier>low_priority|dedicated))?(?::(?P<seconds>\d+(?:\.\d+)?)s)?", re.ASCII
)


@dataclass(frozen=True)
class Pool:
    """A compute of the workspace.

    Args:
        nodes: the most machines at once.
        tier: only ``low_priority`` machines are evicted.
        provisioning_s: from the wish for a machine to its being there.
        refill_s: after an eviction, before Azure has another machine in its place; ``math.inf`` for never.

    Raises:
        UsageError: a value makes no sense.
    """

    nodes: int = 8
    tier: Literal["low_priority", "dedicated"] = "low_priority"
    provisioning_s: float = 0.0
    refill_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.provisioning_s < 0 or self.refill_s < 0:
            raise UsageError(f"{self} makes no sense: a pool has at least one node, and none is there before its time.")


def parse_pool(text: str) -> tuple[str, Pool]:
    """Read a pool as the command line has it: ``name=nodes``, with ``:tier`` and ``:seconds`` to get a machine.

    Args:
        text: such as ``spot=6``, ``sure=2:dedicated`` or ``sure=2:dedicated:5s``.

    Raises:
        UsageError: it is of another form.
    """
    match = _POOL.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no pool. Write its name and its nodes, as in spot=6, and with colons its tier (low_priority "
            "or dedicated) and the seconds until a machine is there, as in sure=2:dedicated:5s."
        )
    tier: Literal["low_priority", "dedicated"] = "dedicated" if match["tier"] == "dedicated" else "low_priority"
    return match["name"], Pool(int(match["nodes"]), tier, float(match["seconds"] or 0))


@dataclass(frozen=True)
class Machine:
    """A machine of a pool.

    Args:
        name: unique within the workspace; a machine that was taken away never comes back.
        address: its own, on this machine's loopback.
        pool: name of its pool.
        tier: of its pool.
    """

    name: str
    address: str
    pool: str
    tier: str


class Machines:
    """All machines of a workspace, for several threads.

    Args:
        pools: by name.
    """

    def __init__(self, pools: dict[str, Pool]) -> None:
        self._pools = pools
        self._used = dict.fromkeys(pools, 0)
        self._away: dict[str, list[float]] = {name: [] for name in pools}
        self._made = 0
        self._addresses = [f"127.0.0.{number}" for number in range(_FIRST_ADDRESS, _LAST_ADDRESS + 1)]
        self._change = threading.Condition()

    def pool(self, name: str) -> Pool | None:
        """Return the pool of this name."""
        return self._pools.get(name)

    def take(self, pool: str, count: int, cancelled: Callable[[], bool]) -> tuple[Machine, ...] | None:
        """Wait until so many machines are free at once and return them; ``None`` once cancelled.

        Args:
            pool: its name.
            count: of machines.
            cancelled: asked again and again.
        """
        with self._change:
            while not cancelled():
                machines = self._take(pool, count)
                if machines is not None:
                    return machines
                self._change.wait(_LOOK_S)
        return None

    def try_take(self, pool: str) -> Machine | None:
        """Return a machine if one is free."""
        with self._change:
            machines = self._take(pool, 1)
        return machines[0] if machines else None

    def give_back(self, machine: Machine, *, evicted: bool = False) -> None:
        """Free a machine's place, because its job is over or it was taken away.

        Args:
            machine: that is not used any more.
            evicted: whether it was taken away: then the pool has one machine less until it is refilled.
        """
        with self._change:
            self._used[machine.pool] -= 1
            if evicted:
                self._away[machine.pool].append(time.monotonic() + self._pools[machine.pool].refill_s)
            self._addresses.append(machine.address)
            self._change.notify_all()

    def refill(self, pool: str) -> None:
        """Have machines in the places of all that were taken away, whatever the pool's ``refill_s``."""
        with self._change:
            self._away[pool].clear()
            self._change.notify_all()

    def _take(self, pool: str, count: int) -> tuple[Machine, ...] | None:
        now = time.monotonic()
        self._away[pool] = [until for until in self._away[pool] if until > now]
        there = self._pools[pool].nodes - len(self._away[pool])
        if there - self._used[pool] < count or len(self._addresses) < count:
            return None
        self._used[pool] += count
        machines = []
        for _ in range(count):
            name = f"{pool}-{self._made}"
            machines.append(Machine(name, self._addresses.pop(0), pool, self._pools[pool].tier))
            self._made += 1
        return tuple(machines)
