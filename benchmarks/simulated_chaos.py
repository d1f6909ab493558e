"""Runs of real processes under random faults, and the same runs in the simulator with the same schedules of faults."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # the program, and the server from which nodes are forked, are those of the tests

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, HealthPolicy, RendezvousTimings  # noqa: E402
from azureml_elastic.ledger.events import Event, NodeStarted, RunEnded  # noqa: E402
from azureml_elastic.ledger.reading import read_events  # noqa: E402
from azureml_elastic.local.cluster import LocalCluster  # noqa: E402
from azureml_elastic.local.faults.model import Add, AtStep, Fault, Freeze, Kill, Preempt, Schedule  # noqa: E402
from azureml_elastic.local.faults.schedule import ChaosState, due, reached  # noqa: E402
from azureml_elastic.node.core.round import Limits  # noqa: E402
from azureml_elastic.simulate.calibration import calibrate  # noqa: E402
from azureml_elastic.simulate.elastic import ElasticRun  # noqa: E402
from azureml_elastic.simulate.scenario import Parameters  # noqa: E402
from tests.support.node_server import FORKED  # noqa: E402
from tests.support.paths import PROGRAMS  # noqa: E402

__all__ = ["Prediction", "chaos_schedule", "median_error", "predict", "predict_all", "run_chaos"]

STEPS, NODES, CHECKPOINT_STEPS = 80, (1, 3), 7
KINDS = ("kill", "preempt", "add", "freeze")
LOCAL = Parameters(provisioning_seconds=0, preload_seconds=0, restore_seconds=0)
"""What a calibration does not show: machines are there, and the checkpoint is a small file on the same disk."""

_POLL_SECONDS = 0.05
_UNAPPLIED_FAULT_SECONDS = 60.0
_MODES = ("restart", "in_process")


@dataclass(frozen=True)
class Prediction:
    """Wall time of one run.

    Args:
        seed: number from which the faults were drawn.
        faults: faults in words.
        measured: seconds from the start of the first node to the end of the run.
        predicted: the same in the simulator, whose parameters are from the other runs.
    """

    seed: int
    faults: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def chaos_schedule(seed: int) -> Schedule:
    """Draw two to four faults at random steps that never take the last node.

    The first loss is a sudden one, of rank 0's node. There are never more nodes than at the start.
    """
    rng = random.Random(seed)
    drawn: list[Fault] = []
    living, lost = NODES[1], False
    for step in sorted(rng.sample(range(5, 61), 2 + seed % 3)):
        when = AtStep(step)
        if rng.random() < 1 / 2:
            rng.choice(("freeze",))  # a draw all the same: the seeds are those of the page of results
            duration_s = float(rng.randint(1, 8))
            drawn.append(Freeze(rng.choice(["rank0", "any"]), when, duration_s))
        elif living == 1 or (living < NODES[1] and rng.random() < 1 / 2):
            drawn.append(Add(when, rng.randint(1, NODES[1] - living)))
            living += drawn[-1].count
        else:
            target = rng.choice(["rank0", "any"]) if lost else "rank0"
            notice_s = float(rng.randint(2, 10))
            kill = rng.choice(["kill", "preempt"]) == "kill" or not drawn
            drawn.append(Kill(target, when) if kill else Preempt(target, when, notice_s))
            living, lost = living - 1, True
    return Schedule(tuple(drawn), seed)


def run_chaos(seed: int, folder: Path) -> None:
    """Run the program under the faults of a seed.

    Raises:
        RuntimeError: the run did not succeed.
    """
    cluster = LocalCluster(
        NODES,
        start=FORKED,
        chaos=chaos_schedule(seed),
        run_dir=folder,
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=CHECKPOINT_STEPS),
        distribution=ElasticDistribution(recovery="in_process" if seed % 2 else "restart"),
        health=HealthPolicy(quarantine_strikes=None),
        timeout=200,
    )
    report = cluster.run([str(PROGRAMS / "chaos_train.py")])
    if report.outcome != "succeeded":
        raise RuntimeError(f"The run of seed {seed} in {folder} has not succeeded: {report.message}")


def measured_seconds(events: Iterable[Event]) -> float:
    """Return the seconds from the start of the first node to the end of the run."""
    events = list(events)
    began = min(event.began or event.time for event in events if isinstance(event, NodeStarted))
    return min(event.time for event in events if isinstance(event, RunEnded)) - began


def launch_gap(events: Iterable[Event]) -> float:
    """Return the seconds between the starts of two of the first nodes, which the launcher starts one by one."""
    began = [event.began or event.time for event in events if isinstance(event, NodeStarted)]
    first = sorted(began)[: NODES[1]]
    return (first[-1] - first[0]) / (NODES[1] - 1)


def predict_all(folders: Mapping[int, Path]) -> list[Prediction]:
    """Predict each run with parameters from all others of the same recovery.

    Args:
        folders: folders of the runs by seed.
    """
    events = {seed: read_events(folder / "events") for seed, folder in folders.items()}
    found = []
    for seed in sorted(events):
        others = [own for other, own in events.items() if other != seed and other % 2 == seed % 2]
        schedule = chaos_schedule(seed)
        predicted = predict(schedule, calibrate(others, LOCAL), median(map(launch_gap, others)))
        faults = ", ".join(map(str, schedule.faults))
        found.append(Prediction(seed, faults, measured_seconds(events[seed]), predicted))
    return found


def median_error(predictions: Sequence[Prediction]) -> float:
    """Return the median of the absolute relative errors."""
    return median(abs(each.error) for each in predictions)


def predict(schedule: Schedule, parameters: Parameters, gap: float = 0.0) -> float:
    """Return the wall time of a run under a schedule of faults, which are due by the launcher's own decisions.

    Args:
        schedule: schedule of faults.
        parameters: durations.
        gap: seconds between the starts of two of the first nodes.
    """
    run = ElasticRun(
        STEPS,
        Limits(*NODES),
        parameters,
        CheckpointPolicy(every=timedelta(seconds=10), every_steps=CHECKPOINT_STEPS),
        RendezvousTimings(table_heartbeat_interval=timedelta(seconds=1)),
    )
    for number in range(NODES[1]):
        run.advance(until=number * gap)
        run.add(f"node-{number}")
    started, fired, frozen = NODES[1], set[int](), dict[str, float]()
    ever = set(run.nodes)
    unapplied_since: float | None = None
    while not run.over:
        living = frozenset(name for name in run.nodes if frozen.get(name, 0.0) <= run.now)
        rank0 = run.members[0] if run.members and run.members[0] in living else None
        state = ChaosState(
            run.training.steps, run.now, living, frozenset(ever - run.nodes.keys()), rank0, frozenset(fired)
        )
        for decision in due(schedule, state):
            fired.add(decision.index)
            match decision.fault:
                case Add(count=count):
                    for _ in range(count):
                        run.add(f"node-{started}")
                        ever.add(f"node-{started}")
                        started += 1
                case Freeze(duration_s=seconds) if decision.victim is not None and seconds is not None:
                    frozen[decision.victim] = run.now + seconds
                    run.freeze(decision.victim, seconds)
                case Kill() if decision.victim is not None:
                    run.lose(decision.victim, silent=False)
                case Preempt(notice_s=seconds) if decision.victim is not None:
                    run.preempt(decision.victim, seconds)
        waiting = [fault for index, fault in enumerate(schedule.faults) if index not in fired]
        overdue = any(reached(fault.when, state) for fault in waiting)
        unapplied_since = run.now if overdue and unapplied_since is None else unapplied_since if overdue else None
        if overdue and unapplied_since is not None and run.now < unapplied_since + _UNAPPLIED_FAULT_SECONDS:
            run.advance(until=run.now + _POLL_SECONDS)
        else:
            steps = [fault.when.step for fault in waiting if isinstance(fault.when, AtStep)]
            run.advance(step=min((step for step in steps if step > run.training.steps), default=None))
    return run.now
