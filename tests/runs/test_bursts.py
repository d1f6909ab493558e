"""Three minutes of losses and arrivals of several of twelve nodes at a time: the run ends well, and no sample is lost.

``python -m nox -s chaos`` runs it, and ``-s`` shows the figures. Other seeds: ``BURST_SEEDS=0:10``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.ledger.events import Event, Progress
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.model import Add, AfterSeconds, Fault, Kill, Schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING

PROGRAM = str(PROGRAMS / "chaos_train.py")
NODES = 12
SECONDS = 180.0
EPOCHS, EPOCH_STEPS = 15, 20
STEP_SECONDS = 0.45
FIRST, LAST = (int(number) for number in os.environ.get("BURST_SEEDS", "0:2").split(":"))


def bursts(seed: int) -> Schedule:
    """Draw bursts of one to six kills, some with rank 0's node, and arrivals of as many nodes up to 12 s later."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    now = 5.0
    while now < SECONDS - 20:
        count = rng.randint(1, 6)
        # Kills of one burst are up to a second apart, so that some hit the round that recovers from the others.
        times = [AfterSeconds(round(now + rng.uniform(0, 1), 2)) for _ in range(count)]
        faults += [Kill("rank0" if rng.random() < 1 / 3 else "any", time) for time in times]
        now += rng.uniform(2, 12)
        faults.append(Add(AfterSeconds(round(now, 2)), count))
        now += rng.uniform(6, 12)
    return Schedule(tuple(faults), seed)


def goodput(events: Iterable[Event]) -> tuple[float, int, float]:
    """Return the share of the first three minutes in which steps were completed, the number of pauses, and the longest.

    A pause is a time between two successive steps of more than three times the median. Of a step that was trained again
    the last time counts.
    """
    done: dict[int, tuple[int, float]] = {}
    for event in events:
        if isinstance(event, Progress):
            latest = (-event.round, event.time)
            done[event.step] = min(done.get(event.step, latest), latest)
    times = [done[step][1] for step in sorted(done)]
    assert times[-1] - times[0] > SECONDS, "training was over too early"
    times = [time for time in times if time - times[0] < SECONDS]
    gaps = [after - before for before, after in pairwise([*times, times[0] + SECONDS])]
    pauses = [gap for gap in gaps if gap > 3 * median(gaps)]
    return 1 - sum(pauses) / SECONDS, len(pauses), max(pauses, default=0.0)


@pytest.mark.chaos
@pytest.mark.limits(cpu_s=900, wait_s=900)
@pytest.mark.parametrize("recovery", ["restart", "in_process"])
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_bursts_of_losses_and_arrivals(tmp_path, seed, recovery):
    schedule = bursts(seed)
    cluster = LocalCluster(
        (1, NODES),
        start=FORKED,
        chaos=schedule,
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=50),
        timeout=840,
        distribution=ElasticDistribution(recovery=recovery),
        rendezvous=GATHERING,
    )
    report = cluster.run([PROGRAM, "--epochs", str(EPOCHS), "--step-delay", str(STEP_SECONDS)])
    trail = f"seed {seed}: {schedule}: {report.message}; files in {report.paths.run_dir}"
    assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
    assert len(report.faults) == len(schedule.faults), trail
    share, pauses, longest = goodput(EventReader(report.paths.events).read())
    lost = sum(len(fault.nodes) for fault in report.faults if fault.fault.startswith("kill"))
    print(
        f"\nseed {seed}, {recovery}: goodput {share:.1%}; {lost} nodes killed in {len(report.rounds)} rounds, world "
        f"sizes {min(report.world_sizes)} to {max(report.world_sizes)}; {pauses} pauses, the longest {longest:.1f} s; "
        f"{report.audit.rolled_back_steps} steps trained again"
    )
    assert report.audit.complete, (report.audit, trail)
    assert (report.audit.missing, report.audit.repeated) == (0, 0), trail
    assert report.audit.steps == EPOCHS * EPOCH_STEPS, trail
    assert max(report.world_sizes) == NODES, trail
    assert all(node.leftovers == 0 for node in report.nodes), trail
    assert share > 1 / 5, "on two busy cores; most of the time would be lost only if recoveries did not end"
