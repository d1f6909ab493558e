"""The expectations of the demo are checked against its report."""

from pathlib import Path

import pytest

from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import FaultRecord, Paths, Report
from azureml_elastic.local.demo import judge

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
