"""Nodes of Azure ML under the names of their jobs."""

from azureml_elastic.ledger.events import NodeStarted, RoundEntered, RoundReopened, Unreachable
from azureml_elastic.ledger.reading import NodeNames

LABELS = {"run-1": "spot_0", "run-2": "spot_1"}


def started(node, job):
    return NodeStarted(time=0, node=node, host="h", pid=1, job=job)


def test_names_are_replaced_in_fields_and_sentences():
    names = NodeNames(LABELS.get)
    entered = RoundEntered(time=1, node="vm-b", rank=0, members=("vm-b", "vm-a"), world_size=2)
    first = names.apply([entered, started("vm-a", "run-1"), started("vm-b", "run-2")])
    assert [event.node for event in first] == ["spot_1", "spot_0", "spot_1"]
    assert first[0].members == ("spot_1", "spot_0")
    reopened = RoundReopened(time=2, node="vm-b", reason="lost vm-a", lost=("vm-a",))
    unreachable = Unreachable(time=2, node="vm-a", host="h", peer="vm-b", address="h:1", purpose="x", error="no vm-b")
    later = names.apply([reopened, unreachable])
    assert (later[0].reason, later[0].lost) == ("lost spot_0", ("spot_0",))
    assert (later[1].peer, later[1].error) == ("spot_1", "no spot_1")


def test_further_nodes_of_a_job_are_numbered_and_unknown_jobs_keep_their_names():
    names = NodeNames(LABELS.get)
    events = names.apply([started("a1", "run-1"), started("b2", "run-1"), started("c3", "run-9"), started("d4", "")])
    assert [event.node for event in events] == ["spot_0", "spot_0.1", "c3", "d4"]
