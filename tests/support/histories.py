"""Made-up histories of runs, for the tests of the ledger and of the reports."""

import math

from hypothesis import strategies as st

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    HangDetected,
    Metrics,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    RanksConnecting,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    StateSaved,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import FaultRecord, MissedFault, NodeSummary, Paths, Report


def enter(number, members, *, at, slots=1, ran=True):
    """The events of all members at the beginning of a round."""
    found = []
    for rank, node in enumerate(members):
        stamp = {"node": node, "round": number}
        size = len(members) * slots
        found.append(RoundEntered(time=at, rank=rank, members=tuple(members), world_size=size, **stamp))
        if ran:
            found.append(WorkersStarted(time=at + 0.5, pids=(1,), **stamp))
    return found


def steps(number, nodes, first, last, *, at, each=1.0):
    """Progress of some nodes; the first step is reported at ``at``."""
    return [
        Progress(time=at + each * (step - first), node=node, round=number, step=step)
        for node in nodes
        for step in range(first, last + 1)
    ]


def loss_and_newcomer():
    """Three nodes train; node-0 is lost after step 12 (restored: 10) at 23.0; node-3 comes at step 20."""
    return [
        *(NodeStarted(time=1.0, node=f"node-{index}", host="h", pid=index + 1) for index in range(4)),
        *enter(1, ["node-0", "node-1", "node-2"], at=10.0),
        Restored(time=10.9, node="node-0", round=1, step=0),
        *steps(1, ["node-0", "node-1", "node-2"], 1, 12, at=11.0),
        RoundReopened(time=23.5, node="node-2", round=1, reason="node-0 is lost", lost=("node-0",)),
        *enter(2, ["node-1", "node-2"], at=24.0),
        Restored(time=24.9, node="node-1", round=2, step=10),
        *steps(2, ["node-1", "node-2"], 11, 20, at=25.0),
        RoundReopened(time=35.0, node="node-1", round=2, reason="node-3 is ready"),
        *enter(3, ["node-1", "node-2", "node-3"], at=36.0),
        Restored(time=36.9, node="node-1", round=3, step=20),
        *steps(3, ["node-1", "node-2", "node-3"], 21, 30, at=37.0),
        RunEnded(time=47.0, node="node-1", round=3, succeeded=True),
        *(NodeLeft(time=48.0, node=f"node-{index}", round=3, reason="done", exit_code=0) for index in (1, 2, 3)),
    ]


def long_run(events=100_000, *, nodes=8, rounds=200, failing=5):
    """A run of about so many events: each round loses a node that the next one has again, some of them by a failure."""
    names = [f"node-{index}" for index in range(nodes)]
    found = [NodeStarted(time=0.5 * index, node=name, host="h", pid=1) for index, name in enumerate(names)]
    each = max(2, events // (rounds * (nodes + 1)))
    step, clock = 0, 10.0
    for number in range(1, rounds + 1):
        members = names if number % 2 else [name for name in names if name != names[number % nodes]]
        found += enter(number, members, at=clock)
        found.append(Restored(time=clock + 1.0, node=members[0], round=number, step=step))
        clock += 2.0
        found += steps(number, members, step + 1, step + each, at=clock, each=0.5)
        for at in range(step + 1, step + each + 1):
            time = clock + 0.5 * (at - step - 1)
            rate = 1e-3 * min(1.0, at / 500)
            values = {"loss": 2.5 / (1 + at / 900) + 0.1 * math.sin(at * 1.7), "learning_rate": rate}
            found.append(Metrics(time=time, node=members[0], round=number, step=at, values=values))
        clock += 0.5 * each
        done = step + each
        found.append(
            CheckpointCommitted(
                time=clock - 0.2,
                node=members[0],
                round=number,
                step=done - 1,
                directory=f"step-{done - 1}",
                seconds=0.05,
            )
        )
        stamp = {"node": members[0], "round": number}
        if number == rounds:
            found.append(RunEnded(time=clock, succeeded=True, **stamp))
        elif number % max(1, rounds // failing) == 0:
            message = (
                f"Traceback (most recent call last):\n  File 'train.py', line {number}\nRuntimeError: round {number}"
            )
            found.append(WorkerFailed(time=clock, rank=1, exit_code=1, message=message, step=done, **stamp))
            found.append(RoundReopened(time=clock, reason="worker 1 on node-1 failed with exit code 1", **stamp))
        else:
            lost = names[(number + 1) % nodes]
            found.append(RoundReopened(time=clock, reason=f"{lost} is lost", lost=(lost,), **stamp))
        step = done - 1
        clock += 1.0
    found += [NodeLeft(time=clock, node=name, round=rounds, reason="done", exit_code=0) for name in names]
    return found


def report_of_loss(folder, events=None, **changes):
    """Return the report of :func:`loss_and_newcomer`, or of other events, with fields of its own."""
    made = Report(
        paths=Paths.of(folder),
        outcome="succeeded",
        exit_code=0,
        name="run-7",
        nodes=(
            NodeSummary(name="node-0", exit_code=-9, ending="killed", pool="spot", size="Small", tier="low_priority"),
            *(NodeSummary(name=f"node-{index}", exit_code=0, ending="exited", pool="base") for index in (1, 2, 3)),
        ),
        faults=(FaultRecord(fault="kill=rank0@step:12", nodes=("node-0",), step=12, time=23.0),),
        missed_faults=(MissedFault(fault="kill=node-9@step:3", reason="there was no node-9"),),
        audit=SampleAudit(dataset_size=100, epochs=3, steps=30, seen=300, rolled_back_steps=2, rolled_back_samples=20),
    )
    picture = Picture.of(loss_and_newcomer() if events is None else events)
    return made.with_timeline(picture).model_copy(update=changes)


def write_events(folder, events):
    """Write events into the files of their nodes, as nodes do."""
    folder.mkdir(parents=True, exist_ok=True)
    for event in events:
        with (folder / f"{event.node}.jsonl").open("a") as file:
            file.write(event.model_dump_json() + "\n")


NUMBERS, STEPS, NODES = st.integers(0, 4), st.integers(0, 10**9), st.sampled_from(["a", "b", "c"])


def _drawn(kind, **fields):
    return st.builds(kind, time=st.floats(0, 100) | st.floats(0, 1e10), node=NODES, round=NUMBERS, **fields)


REPORTED = st.one_of(
    _drawn(Restored, step=NUMBERS | STEPS),
    _drawn(Progress, step=NUMBERS | STEPS, samples=st.none() | st.integers(0, 10**12)),
    _drawn(Metrics, step=STEPS, values=st.dictionaries(st.text(max_size=3), st.floats(), max_size=3)),
)
UNREPORTED = st.one_of(
    _drawn(NodeStarted, host=st.text(max_size=3), pid=st.just(1)),
    _drawn(RoundEntered, rank=NUMBERS, members=st.tuples(NODES, NODES), world_size=st.integers(1, 10**6)),
    _drawn(WorkersStarted, pids=st.just((1,))),
    _drawn(CheckpointCommitted, step=NUMBERS, directory=st.text(max_size=5), seconds=st.floats(0, 1e6)),
    _drawn(WorkerFailed, rank=NUMBERS, exit_code=NUMBERS, message=st.text()),
    _drawn(HangDetected, step=NUMBERS, seconds=st.just(1.0), limit_seconds=st.just(1.0)),
    _drawn(RoundReopened, reason=st.text(), lost=st.tuples(NODES)),
    _drawn(RunEnded, succeeded=st.booleans(), message=st.text()),
    _drawn(NodeLeft, reason=st.text(), exit_code=NUMBERS),
    *map(_drawn, (NodeReady, RanksConnecting, StateSaved)),
)


def any_events():
    """Events in any order, also torn and contradictory ones; those of some runs are of a script without a session."""
    return st.lists(UNREPORTED | REPORTED, max_size=60) | st.lists(UNREPORTED, max_size=60)
