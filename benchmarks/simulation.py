"""Compare the simulator with runs of real processes, the checkpoint interval with a sweep, and measure its speed.

Prints tables and writes ``benchmarks/results/simulation.md``. Exit code 1 means that a limit was exceeded: a
median error of 10 %, an interval that is 5 % more expensive than the best one, or 10 s of processor time for a week of
64 nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from string import Template

from measurements import machine
from simulated_chaos import Prediction, median_error, predict_all, run_chaos

from azureml_elastic.checkpoint.save.schedule import optimal_interval
from azureml_elastic.config import CheckpointPolicy, NodePool, ReplacementPolicy
from azureml_elastic.simulate.comparison import simulate
from azureml_elastic.simulate.scenario import Outcome, Parameters, Scenario, SimulatedPool, Strategy
from azureml_elastic.simulate.traces import Hazard, synthetic_trace

HERE = Path(__file__).parent
PAGE = HERE / "results" / "simulation.md"
LONGEST_ERROR, LARGEST_EXCESS, LONGEST_SECONDS = 0.10, 0.05, 10.0

FACTORS = (0.25, 0.4, 0.55, 0.75, 1.0, 1.35, 1.8, 2.5, 4.0)
HAZARDS = (1800.0, 7200.0, 43200.0)
COSTS = (1.0, 10.0, 60.0)
SEEDS = range(4)


@dataclass(frozen=True)
class Interval:
    """Wall times of one hazard and cost of a checkpoint, as means over the seeds.

    Args:
        between_losses: mean seconds between two losses.
        cost: seconds of a checkpoint.
        formula: Young/Daly interval in seconds.
        best: best interval of the sweep in seconds.
        excess: how much longer the run takes with the formula's interval than with the best one.
        auto_excess: the same for ``every="auto"``, which measures cost and losses during the run.
    """

    between_losses: float
    cost: float
    formula: float
    best: float
    excess: float
    auto_excess: float


@dataclass(frozen=True)
class Week:
    """Simulation of 64 nodes: the time and processor time that it took, and its result."""

    strategy: str
    seconds: float
    processor_seconds: float
    result: Outcome


def sweep_interval(between_losses: float, cost: float) -> Interval:
    """Simulate a node that restarts from checkpoints, with intervals around the formula's."""
    formula = optimal_interval(cost, between_losses)
    work = int(60 * between_losses)

    def mean_seconds(policy: CheckpointPolicy) -> float:
        return fmean(_restarted(between_losses, cost, work, policy, seed).seconds for seed in SEEDS)

    swept = {factor: mean_seconds(CheckpointPolicy(every=formula * factor)) for factor in FACTORS}
    best = min(swept, key=lambda factor: swept[factor])
    auto = mean_seconds(CheckpointPolicy(every="auto"))
    return Interval(between_losses, cost, formula, formula * best, swept[1.0] / swept[best] - 1, auto / swept[best] - 1)


def _restarted(between_losses: float, cost: float, work: int, policy: CheckpointPolicy, seed: int) -> Outcome:
    limit = 6.0 * work
    trace = synthetic_trace(Hazard(loss_every=between_losses, back_after=60), 1, limit, seed)
    durations = Parameters(
        step_seconds={1: 1.0},
        provisioning_seconds=30,
        checkpoint_pause_seconds=cost,
        checkpoint_write_seconds=0,
    )
    pool = SimulatedPool(NodePool("spot", max_instance_count=1), trace)
    result = simulate(Scenario((pool,), 1, 1, work, durations, checkpoint=policy, limit_seconds=limit), "restart")
    if not result.finished:
        raise RuntimeError(f"A loss every {between_losses:g} s and {policy.every}: {result.why}")
    return result


def simulate_week() -> list[Week]:
    """Simulate 64 nodes that train for about a week, each lost twice a day, and half of them reclaimed once a day."""
    week = 7 * 86400.0
    trace = synthetic_trace(Hazard(loss_every=12 * 3600, reclaim_every=86400), 72, 2 * week, seed=1)
    pool = SimulatedPool(NodePool("spot", max_instance_count=64), trace)
    scenario = Scenario(
        (pool,),
        1,
        64,
        2_850_000,
        Parameters(step_seconds={1: 10.0}, serial_fraction=0.005),
        replacement=ReplacementPolicy(max_replacements=100_000),
        limit_seconds=2 * week,
    )
    found = []
    strategies: tuple[Strategy, ...] = ("elastic", "restart")
    for strategy in strategies:
        begun, processor = time.perf_counter(), time.process_time()
        result = simulate(scenario, strategy)
        found.append(Week(strategy, time.perf_counter() - begun, time.process_time() - processor, result))
    return found


def chaos(folder: Path, seeds: Sequence[int]) -> list[Prediction]:
    """Run the seeds that the folder does not have yet, and predict all."""
    folders = {seed: folder / f"seed-{seed}" for seed in seeds}
    for seed, own in folders.items():
        if not (own / "report.json").exists():
            begun = time.perf_counter()
            run_chaos(seed, own)
            print(f"seed {seed}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    return predict_all(folders)


def predictions_table(found: Sequence[Prediction]) -> str:
    lines = ["| seed | faults at steps | measured | predicted | error |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {each.seed} | {each.faults} | {each.measured:.1f} s | {each.predicted:.1f} s | {each.error:+.1%} |"
        for each in found
    ]
    return "\n".join(lines)


def intervals_table(found: Sequence[Interval]) -> str:
    lines = [
        '| a loss every | checkpoint | Young/Daly | best of the sweep | longer by Young/Daly | by `every="auto"` |',
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.between_losses / 3600:g} h | {each.cost:g} s | {each.formula:.0f} s | {each.best:.0f} s "
        f"| {each.excess:.1%} | {each.auto_excess:.1%} |"
        for each in found
    ]
    return "\n".join(lines)


def weeks_table(found: Sequence[Week]) -> str:
    lines = [
        "| strategy | simulated | rounds or restarts | simulated in | processor time |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.strategy} | {each.result.seconds / 86400:.1f} d | {each.result.restarts:,} | {each.seconds:.1f} s "
        f"| {each.processor_seconds:.1f} s |"
        for each in found
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs of real processes; runs that it has are used again"
    )
    parser.add_argument("--seeds", type=int, default=24, help="number of runs of real processes")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    weeks = simulate_week()
    print(weeks_table(weeks), flush=True)
    intervals = [sweep_interval(between, cost) for between in HAZARDS for cost in COSTS]
    print(intervals_table(intervals), flush=True)
    with tempfile.TemporaryDirectory(prefix="simulation-") as temporary:
        predictions = chaos(arguments.runs or Path(temporary), range(arguments.seeds))
    print(predictions_table(predictions))
    error, excess = median_error(predictions), max(each.excess for each in intervals)
    auto_excess = max(each.auto_excess for each in intervals)
    print(f"median error {error:.1%}, largest excess {excess:.1%}, of auto {auto_excess:.1%}")
    page = Template((HERE / "simulation_page.md").read_text("utf-8")).substitute(
        date=datetime.now().astimezone().date().isoformat(),
        machine=machine(),
        load=f"{load:.1f}",
        runs=len(predictions),
        error=f"{error:.1%}",
        worst=f"{max(abs(each.error) for each in predictions):.0%}",
        predictions=predictions_table(predictions),
        intervals=intervals_table(intervals),
        weeks=weeks_table(weeks),
    )
    PAGE.write_text(page, "utf-8")
    slow = max(each.processor_seconds for each in weeks) > LONGEST_SECONDS
    return int(slow or error > LONGEST_ERROR or excess > LARGEST_EXCESS)


if __name__ == "__main__":
    sys.exit(main())
