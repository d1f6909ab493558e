"""What is simulated: pools of machines with their availability, the work, the policies; and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from azureml_elastic.config import CheckpointPolicy, NodePool, RendezvousTimings, ReplacementPolicy
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.accounting import Total, goodput
from azureml_elastic.ledger.bill import Bill, NodeUse, Prices, Tier, bill
from azureml_elastic.simulate.accounts import Accounts
from azureml_elastic.simulate.parameters import Parameters
from azureml_elastic.simulate.traces import Trace

__all__ = ["Outcome", "Scenario", "SimulatedPool", "Strategy", "outcome"]

Strategy = Literal["rigid", "restart", "elastic"]
"""How a run deals with losses.

- ``rigid``: waits for all nodes; any loss ends it, and it starts again from scratch.
- ``restart``: waits for all nodes; after a loss it starts again from its last checkpoint when all are there.
- ``elastic``: starts with the minimum, grows, shrinks, and continues from the survivors' memory.
"""


@dataclass(frozen=True)
class SimulatedPool:
    """A node pool and the availability of its machines.

    Args:
        trace: availability of its machines; ``None`` for machines that are always there.
        size: VM size, for the price.
        tier: tier, for the price.
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
        pools: pools in the order of preference.
        minimum: number of nodes below which training pauses.
        maximum: number of nodes that may train at once; that of the rigid strategies.
        work: number of steps.
        parameters: durations.
        checkpoint: checkpoint policy.
        replacement: replacement policy of the elastic run.
        timings: timeouts of the rendezvous.
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
        steps: number of completed steps.
        finished: whether the work was done.
        why: reason why it was not done, or what else the run's owner should know.
        lost_steps: number of steps that were trained again.
        restarts: number of times that training began again, or of rounds after the first.
        node_seconds: time for which nodes were delivered.
        activities: node-seconds by activity and cause.
        bill: cost of the nodes.
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
    restarts: int,
    why: str = "",
) -> Outcome:
    """Return the result of a run from its accounts."""
    uses: Sequence[NodeUse] = [
        NodeUse(
            seconds=life.seconds,
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
        finished=steps >= scenario.work,
        why=why,
        lost_steps=lost_steps,
        restarts=restarts,
        node_seconds=accounts.delivered,
        activities=accounts.totals(),
        bill=bill(uses, scenario.prices),
    )
