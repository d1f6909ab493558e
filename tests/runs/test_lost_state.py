"""Whole runs that lose what a run rests on: its table, the agent of rank 0 alone, or all nodes at once."""

from __future__ import annotations

import os
import signal

import pytest
from azure.data.tables import TableServiceClient

from azureml_elastic.config import CheckpointPolicy, TableRendezvous
from azureml_elastic.ledger.events import NodeStarted, Restored, RoundEntered
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING, after_gathering, at_step

PROGRAM = str(PROGRAMS / "chaos_train.py")


def cluster(tmp_path, chaos="", **options):
    return LocalCluster(
        options.pop("nodes", (1, 2)),
        start=FORKED,
        chaos=parse_schedule(chaos) if chaos else None,
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=10),
        rendezvous=GATHERING,
        **options,
    )


def assert_whole(report):
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    assert all(node.leftovers == 0 for node in report.nodes)


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

    running = cluster(tmp_path, chaos, table="azurite")
    with at_step(tmp_path / "run", 25, 2, delete):
        report = running.run([PROGRAM, "--epochs", "6", "--gather", "2", "--step-delay", "0.05"])
    assert_whole(report)
    assert report.audit.rolled_back_steps == 0
    assert len(report.rounds) > 1


def test_the_agent_of_rank_0_alone_is_killed(tmp_path):
    """Its workers must end, and the other node goes on."""

    def kill(events) -> None:
        first = next(each.node for each in reversed(events) if isinstance(each, RoundEntered) and each.rank == 0)
        os.kill(
            next(each.pid for each in events if isinstance(each, NodeStarted) and each.node == first), signal.SIGKILL
        )
        killed.append(first)

    killed: list[str] = []
    with at_step(tmp_path / "run", 25, 2, kill):
        report = cluster(tmp_path).run([PROGRAM, "--epochs", "5", "--gather", "2"])
    assert_whole(report)
    assert after_gathering(report, 2) == (2, 1)
    assert {node.name for node in report.nodes if node.exit_code == -signal.SIGKILL} == set(killed)


@pytest.mark.chaos
def test_all_nodes_are_evicted_and_others_go_on_from_the_newest_checkpoint(tmp_path):
    chaos = "kill=node-0@step:45,kill=node-1@step:45,add@step:45,add@step:45"
    report = cluster(tmp_path, chaos).run([PROGRAM, "--epochs", "5", "--gather", "2", "--step-delay", "0.05"])
    assert_whole(report)
    restored = [each.step for each in EventReader(report.paths.events).read() if isinstance(each, Restored)]
    assert any(40 <= step <= 50 for step in restored), restored
    assert {node.name: node.exit_code for node in report.nodes if node.exit_code} == {"node-0": -9, "node-1": -9}
