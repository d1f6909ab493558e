"""Goodput of simulated runs by number of nodes and by how often each is lost: elastic beside restarts.

``python benchmarks/simulated_scale.py`` prints the table of ``docs/explanation/scale.md``, with the processor time of
each simulation.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from azureml_elastic.config import NodePool, ReplacementPolicy
from azureml_elastic.simulate.comparison import simulate
from azureml_elastic.simulate.scenario import Outcome, Parameters, Scenario, SimulatedPool, Strategy
from azureml_elastic.simulate.traces import Hazard, synthetic_trace

DAY = 86400.0
STEP_SECONDS = 2.0
SPARE_MACHINES = 1.02
"""Machines for each node of the maximum: where one is lost, its replacement mostly finds another one."""


@dataclass(frozen=True)
class Row:
    """Nodes, days between two losses of each of them, and simulated days."""

    nodes: int
    loss_days: float
    days: float


ROWS = (Row(10, 30, 30), Row(10, 1, 30), Row(100, 30, 30), Row(100, 1, 7), Row(1000, 30, 30), Row(1000, 7, 7))


def run(row: Row, strategy: Strategy) -> tuple[Outcome, float]:
    """Simulate a run that lasts as long as the row says; return its outcome and the processor time."""
    seconds = row.days * DAY
    machines = round(row.nodes * SPARE_MACHINES + 1)
    pool = NodePool("spot", max_instance_count=row.nodes)
    scenario = Scenario(
        (SimulatedPool(pool, synthetic_trace(Hazard(loss_every=row.loss_days * DAY), machines, seconds, seed=0)),),
        max(1, row.nodes * 9 // 10),
        row.nodes,
        10**9,
        Parameters(step_seconds={row.nodes: STEP_SECONDS}),
        replacement=ReplacementPolicy(max_replacements=10**6),
        limit_seconds=seconds,
    )
    began = time.process_time()
    return simulate(scenario, strategy), time.process_time() - began


def lost_time(outcome: Outcome) -> str:
    """Return where the node-seconds went that were no training, the largest shares first."""
    shares: Counter[str] = Counter()
    for total in outcome.activities:
        if total.activity != "training":
            shares[total.activity] += total.seconds / outcome.node_seconds
    return ", ".join(f"{activity} {share:.2%}" for activity, share in shares.most_common(3))


def main() -> None:
    """Print the table."""
    print("| nodes | each is lost every | restarts | elastic | what elastic runs lose | rounds | simulated in (CPU) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        restarted, _ = run(row, "restart")
        elastic, seconds = run(row, "elastic")
        print(
            f"| {row.nodes:,} | {row.loss_days:g} d | {restarted.goodput:.1%} | {elastic.goodput:.2%} "
            f"| {lost_time(elastic)} | {elastic.restarts + 1:,} in {row.days:g} d | {seconds:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
