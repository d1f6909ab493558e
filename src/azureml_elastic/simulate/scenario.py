"""What is simulated: pools of machines with their availability, the program, the work and policies; and the outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from azureml_elastic.config import CheckpointPolicy, NodePool, RendezvousTimings, ReplacementPolicy
from azureml_elastic.config.base import ConfigModel
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.accounting import Cause, Total, goodput
from azureml_elastic.ledger.bill import Bill, NodeUse, Prices, Tier, bill
from azureml_elastic.simulate.accounts import Accounts, exact
from azureml_elastic.simulate.traces import Trace

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_StepSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_CAUSES: tuple[Cause, ...] = ("preemption", "node loss", "worker crash", "scale-up", "hang", "connection")


class Parameters(ConfigModel):
    """Durations in seconds. The defaults are guesses for a GPU node; :mod:`calibration` measures them.

    Args:
        step_seconds: duration of a step by number of nodes, at least one entry. Between entries a step's duration is
            linear in 1/nodes; outside of them it follows from ``serial_fraction``.
        serial_fraction: share of a step on one node that more nodes do not shorten (Amdahl's law).
        provisioning_seconds: time from a free machine to the start of the node's process, which is not billed.
        start_seconds: time from the start of a node's process until it is ready.
        preload_seconds: further time of a node that joins a run that has begun, for its imports.
        first_step_seconds: time from the last node's readiness to the first step of a round without a survivor.
        restore_seconds: further time to read a checkpoint.
        recovery_seconds: time from the end of a round to the first step of the next one, by cause.
        checkpoint_pause_seconds: pause of training for a checkpoint.
        checkpoint_write_seconds: time after the pause until the checkpoint is committed.
        notice_seconds: time between the announcement and the loss of a machine; 0 for losses without announcement.
        finish_seconds: time from the last step to the end of the nodes.
    """

    step_seconds: Mapping[int, _StepSeconds] = Field(default={1: 1.0}, min_length=1)
    serial_fraction: float = Field(default=0.05, ge=0, le=1)
    provisioning_seconds: _Seconds = 180.0
    start_seconds: _Seconds = 30.0
    preload_seconds: _Seconds = 10.0
    first_step_seconds: _Seconds = 10.0
    restore_seconds: _Seconds = 10.0
    recovery_seconds: Mapping[Cause, _Seconds] = dict.fromkeys(_CAUSES, 5.0)
    checkpoint_pause_seconds: _Seconds = 1.0
    checkpoint_write_seconds: _Seconds = 10.0
    notice_seconds: _Seconds = 0.0
    finish_seconds: _Seconds = 5.0

    @field_validator("step_seconds")
    @classmethod
    def _counts_are_positive(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        if (least := min(value)) < 1:
            raise ValueError(f"step_seconds has {least} nodes; the smallest number of nodes is 1")
        return dict(sorted(value.items()))

    @field_validator("recovery_seconds")
    @classmethod
    def _all_causes_are_known(cls, value: Mapping[Cause, float]) -> Mapping[Cause, float]:
        """Complete missing causes by the longest known recovery."""
        if not value:
            raise ValueError(f"recovery_seconds is empty; give the seconds of one of {', '.join(_CAUSES)} or more")
        return {cause: value.get(cause, max(value.values())) for cause in _CAUSES}

    def step_time(self, nodes: int) -> float:
        """Return the duration of a step on a number of nodes, in seconds."""
        known = list(self.step_seconds)
        below = max((count for count in known if count <= nodes), default=None)
        above = min((count for count in known if count >= nodes), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return self.step_seconds[nearest] * self._amdahl(nodes) / self._amdahl(nearest)
        if below == above:
            return self.step_seconds[below]
        share = (1 / below - 1 / nodes) / (1 / below - 1 / above)
        return self.step_seconds[below] + share * (self.step_seconds[above] - self.step_seconds[below])

    def _amdahl(self, nodes: int) -> float:
        return self.serial_fraction + (1 - self.serial_fraction) / nodes


Strategy = Literal["rigid", "restart", "elastic"]
"""How a run deals with losses.

- ``rigid``: waits for all nodes; any loss ends it, and it starts again from scratch.
- ``restart``: waits for all nodes; after a loss it starts again from its last checkpoint when all are there.
- ``elastic``: starts with the minimum, grows, shrinks, and continues from the survivors' memory.
"""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class SimulatedPool:
    """A node pool and the availability of its machines.

    Args:
        trace: availability of its machines; ``None`` for machines that are always there.
    """

    pool: NodePool
    trace: Trace | None = None
    size: str | None = None
    tier: Tier | None = None

    @property
    def machines(self) -> int:
        """Number of machines that may be there."""
        return self.pool.max_instance_count if self.trace is None else self.trace.machines


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Args:
        minimum: number of nodes below which training pauses.
        maximum: number of nodes that may train at once; that of the rigid strategies.
        replacement: replacement policy of the elastic run.
        prices: prices by VM size and tier; ``None`` for those of the pools.
        limit_seconds: simulated time after which a run is given up.
    """

    pools: tuple[SimulatedPool, ...]
    minimum: int
    maximum: int
    work: int
    parameters: Parameters = field(default_factory=Parameters)
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    replacement: ReplacementPolicy = field(default_factory=ReplacementPolicy)
    timings: RendezvousTimings = field(default_factory=RendezvousTimings)
    prices: Prices | None = None
    limit_seconds: float = 30 * 86400.0

    def __post_init__(self) -> None:
        capacity = sum(pool.pool.max_instance_count for pool in self.pools)
        if not 1 <= self.minimum <= self.maximum:
            raise UsageError(
                f"{self.minimum}:{self.maximum} nodes are no range; give a minimum of 1 or more and a maximum that is "
                "not below it, as in 1:16."
            )
        if capacity < self.minimum:
            raise UsageError(
                f"The pools have {capacity} nodes and the minimum is {self.minimum}; lower the minimum or add machines."
            )
        if self.work < 1:
            raise UsageError(f"The work of {self.work} steps is below the limit of 1 step; give more.")
        if not 0 < self.limit_seconds < math.inf:
            raise UsageError(f"A time limit of {self.limit_seconds:g} s is not above 0; give a time such as 30d.")


@dataclass(frozen=True)
class Outcome:
    """Result of a simulated run.

    Args:
        seconds: time from the submission to the end of the run, or to the point at which it was given up.
        why: reason why it was not done, or what else the run's owner should know.
        lost_steps: number of steps that were trained again.
        restarts: number of times that training began again, or of rounds after the first.
    """

    strategy: Strategy
    seconds: float
    steps: int
    finished: bool
    why: str
    lost_steps: int
    restarts: int
    node_seconds: float
    activities: tuple[Total, ...]
    bill: Bill

    @property
    def goodput(self) -> float:
        """Share of the nodes' time that was training which was kept."""
        return goodput(self.activities) or 0.0

    @property
    def node_hours(self) -> float:
        """Hours of all nodes."""
        return self.node_seconds / 3600

    @property
    def cost(self) -> Decimal | None:
        """Cost of the nodes; ``None`` without prices."""
        return self.bill.cost if self.bill.lines else Decimal()


def outcome(
    strategy: Strategy,
    scenario: Scenario,
    accounts: Accounts,
    *,
    seconds: float,
    steps: int,
    lost_steps: int,
    rounds: int,
    why: str | None = None,
) -> Outcome:
    """Return the result of a run from its accounts.

    Args:
        rounds: number of times that training has begun.
        why: what the run's owner should know; by default only that the work was not done.
    """
    finished = steps >= scenario.work
    uses: Sequence[NodeUse] = [
        NodeUse(
            seconds=life.seconds,
            nodes=life.nodes,
            pool=scenario.pools[life.pool].pool.compute,
            size=scenario.pools[life.pool].size,
            tier=scenario.pools[life.pool].tier,
            price_per_hour=scenario.pools[life.pool].pool.price_per_hour,
        )
        for life in accounts.lives
    ]
    return Outcome(
        strategy=strategy,
        seconds=seconds,
        steps=steps,
        finished=finished,
        why=why or ("" if finished else f"The work was not done within {scenario.limit_seconds / 3600:g} h."),
        lost_steps=lost_steps,
        restarts=max(0, rounds - 1),
        node_seconds=accounts.delivered,
        activities=accounts.totals(),
        bill=bill(uses, scenario.prices),
    )


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
                # Not before the machine was there.
                noticed = max(up_since.get(change.machine, -math.inf), time - exact(notice_seconds))
                found.append(MachineChange(noticed, machine, "notice"))
            found.append(MachineChange(time, machine, "up" if change.up else "down"))
    return sorted(found, key=lambda change: change.time)  # stable: changes of a machine keep their order
