"""Made-up histories of runs, for the tests of the ledger and of the reports."""

from azureml_elastic.ledger.events import (
    NodeLeft,
    NodeStarted,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkersStarted,
)


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
