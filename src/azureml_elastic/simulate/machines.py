"""Changes of the machines of all pools in the order of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.simulate.accounts import exact
from azureml_elastic.simulate.scenario import SimulatedPool

__all__ = ["Machine", "MachineChange", "machine_changes"]

Machine = tuple[int, int]
"""Index of the pool, and of the machine within it."""


@dataclass(frozen=True)
class MachineChange:
    """A machine becomes available, is about to be reclaimed, or is gone."""

    time: float
    machine: Machine
    kind: Literal["up", "notice", "down"]


def machine_changes(pools: Sequence[SimulatedPool], notice_seconds: float = 0.0) -> list[MachineChange]:
    """Return the changes of all machines; those without a trace are available from the beginning.

    Args:
        pools: pools in the order of preference.
        notice_seconds: time between the announcement of a loss and the loss; 0 for none.
    """
    found: list[MachineChange] = []
    for number, pool in enumerate(pools):
        if pool.trace is None:
            found += [MachineChange(0.0, (number, index), "up") for index in range(pool.machines)]
            continue
        up_since: dict[int, float] = {}
        for change in pool.trace.changes:
            time, machine = exact(change.time), (number, change.machine)
            if change.up:
                up_since[change.machine] = time
            elif notice_seconds:
                noticed = max(up_since.get(change.machine, -math.inf), time - exact(notice_seconds))
                found.append(MachineChange(noticed, machine, "notice"))
            found.append(MachineChange(time, machine, "up" if change.up else "down"))
    return sorted(found, key=lambda change: change.time)  # stable: changes of a machine keep their order
