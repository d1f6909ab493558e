"""The expectations of the demo are checked against its report."""

from pathlib import Path

import pytest

from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import FaultRecord, Paths, Report
from azureml_elastic.local.demo import SCHEDULE, judge
from azureml_elastic.local.faults.schedule import ChaosState, due

GOOD = Report(
    outcome="succeeded",
    exit_code=0,
    world_sizes=(3, 2, 3),
    faults=(FaultRecord(fault="kill=rank0@step:35", nodes=("node-0",), step=35, time=0.0),),
    audit=SampleAudit(dataset_size=10, epochs=1, steps=1, seen=10),
    paths=Paths.of(Path("run")),
)


def test_a_loss_a_newcomer_and_exactly_once_are_the_proof():
    assert judge(GOOD, 0.95).doubts == ()


@pytest.mark.parametrize(
    ("change", "accuracy", "doubt"),
    [
        ({"outcome": "failed", "message": "why"}, 0.95, "The run failed: why"),
        ({"faults": ()}, 0.95, "was not killed"),
        ({"world_sizes": (1, 3, 2)}, 0.95, "world sizes were 1, 3, 2"),
        ({"audit": None}, 0.95, "exactly once"),
        ({"audit": SampleAudit(dataset_size=10, epochs=1, steps=1, seen=11, repeated=1)}, 0.95, "exactly once"),
        ({"audit": SampleAudit(dataset_size=10, epochs=1, steps=1, seen=9, unfinished=1)}, 0.95, "exactly once"),
        ({}, 0.5, "50.0%"),
        ({}, None, "No accuracy"),
    ],
)
def test_unmet_expectations_are_reported(change, accuracy, doubt):
    doubts = judge(GOOD.model_copy(update=change), accuracy).doubts
    assert len(doubts) == 1
    assert doubt in doubts[0]


def test_on_a_busy_machine_the_faults_wait_for_the_nodes_that_they_are_about():
    def injected(step, members, fired=()):
        nodes = frozenset(f"node-{number}" for number in range(3))
        state = ChaosState(step=step, living=nodes, rank0="node-0", members=members, fired=frozenset(fired))
        return [str(each.fault) for each in due(SCHEDULE, state)]

    assert injected(80, 2) == ["add@step:60"]
    assert injected(35, 3) == ["kill=rank0@step:35"]
    assert injected(80, 3) == ["kill=rank0@step:35"], "the node would come before the loss"
    assert injected(80, 3, fired=[0]) == [], "the nodes that are left have not gone on"
    assert injected(59, 2, fired=[0]) == []
    assert injected(60, 2, fired=[0]) == ["add@step:60"]


@pytest.mark.parametrize(
    ("sizes", "epochs"),
    [
        ([3, 2, 3], 3),
        ([1, 3, 2, 2, 3], 5),
        ([3, 3, 3, 3, 2, 1, 2], 7),
        ([2, 3, 2, 1, 1, 1, 3], 7),
    ],
)
def test_it_trains_on_until_the_arrival_also_where_it_comes_late_and_after_restarts(sizes, epochs):
    demo_train = pytest.importorskip("azureml_elastic.local.demo_train")

    class Run:
        epoch = 0

        def epochs(self, count):
            while self.epoch < count:
                yield self.epoch
                self.epoch += 1

    run, seen = Run(), demo_train.WorldSizes(awaited=True)
    for epoch in demo_train.epochs_of(run, 3, seen):
        seen.add(sizes[epoch])
        state = seen.state_dict()
        seen.load_state_dict({"sizes": []})
        seen.load_state_dict(state)  # as in a new process
    assert run.epoch == epochs
