"""Whole runs that lose what a run rests on: its table, or all nodes at once."""

from __future__ import annotations

import pytest
from azure.data.tables import TableServiceClient

from azureml_elastic.config import TableRendezvous
from azureml_elastic.ledger.events import Restored
from azureml_elastic.ledger.reading import EventReader
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import assert_whole, at_step, gathering_cluster

PROGRAM = str(PROGRAMS / "chaos_train.py")


@pytest.mark.parametrize(
    "chaos",
    ["", pytest.param("kill=rank0@step:45", marks=pytest.mark.chaos)],
    ids=["undisturbed", "rank 0 is lost"],
)
def test_the_table_is_deleted_in_the_middle_of_a_run(tmp_path, azurite, monkeypatch, chaos):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)

    def delete(_) -> None:
        with TableServiceClient.from_connection_string(azurite.connection_string) as service:
            service.delete_table(TableRendezvous().table)

    running = gathering_cluster(tmp_path, chaos, table="azurite")
    with at_step(tmp_path / "run", 25, 2, delete):
        report = running.run([PROGRAM, "--epochs", "6", "--gather", "2", "--step-delay", "0.05"])
    assert_whole(report)
    assert report.audit.rolled_back_steps == 0
    assert len(report.rounds) > 1


@pytest.mark.chaos
def test_all_nodes_are_evicted_and_others_go_on_from_the_newest_checkpoint(tmp_path):
    chaos = "kill=node-0@step:45,kill=node-1@step:45,add@step:45,add@step:45"
    report = gathering_cluster(tmp_path, chaos).run([PROGRAM, "--epochs", "5", "--gather", "2", "--step-delay", "0.05"])
    assert_whole(report)
    restored = [each.step for each in EventReader(report.paths.events).read() if isinstance(each, Restored)]
    assert any(40 <= step <= 50 for step in restored), restored
    assert {node.name: node.exit_code for node in report.nodes if node.exit_code} == {"node-0": -9, "node-1": -9}
