"""Horovod's elastic mode on local nodes: a node is lost, one comes, and one leaves with notice."""

from __future__ import annotations

from threading import Thread

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.horovod_trace import Trace
from tests.support.local_nodes import LocalNodes
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS, SAMPLES

pytest.importorskip("horovod", reason="Horovod is not installed")


@pytest.fixture
def trace(tmp_path):
    return Trace(tmp_path)


@pytest.fixture
def nodes(tmp_path):
    return LocalNodes(tmp_path / "run")


@pytest.fixture
def train(tmp_path, trace):
    """Return a function that runs the program to its end while it injects faults, and returns the report."""

    def run(faults, limits, chaos, **options):
        def inject():
            try:
                faults()
                trace.wait_for_commit(200)  # so that the model has learnt
            finally:
                (tmp_path / "enough").touch()

        injecting = Thread(target=inject)
        injecting.start()
        cluster = LocalCluster(
            limits,
            start=FORKED,
            chaos=parse_schedule(chaos),
            run_dir=tmp_path / "run",
            distribution=ElasticDistribution(framework="horovod", process_count_per_instance=1),
            **options,
        )
        report = cluster.run([str(PROGRAMS / "horovod_program.py"), str(tmp_path)])
        injecting.join()
        assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
        assert float((tmp_path / "result").read_text()) < 0.1
        assert all(node.leftovers == 0 for node in report.nodes)
        return report

    return run


def test_workers_stay_while_nodes_are_lost_come_and_leave_and_no_commit_is_lost(train, trace, nodes):
    committed = []

    def faults():
        trace.wait_for(size=2, entries=1)
        nodes.kill(nodes.members()[0])
        committed.append(trace.last_commit())
        trace.wait_for(size=1, entries=2)
        trace.wait_for(size=2, entries=3)
        nodes.preempt(nodes.members()[0])
        trace.wait_for(size=1, entries=4)

    report = train(faults, (1, 2), "add@step:6")
    first, lost, grown, left = trace.entries()
    assert lost.batch in (committed[0], committed[0] + 5)  # a commit is recorded before all workers have kept it
    assert lost.pids < first.pids
    assert lost.pids < grown.pids
    assert left.pids < grown.pids
    assert left.pids != lost.pids, "the node that came has the state alone now"
    for entry in (grown, left):  # no batch is trained again
        assert trace.last_commit(before=entry) == entry.batch
    assert [len(round_.members) for round_ in report.rounds] == [2, 1, 2, 1]


def test_a_run_that_has_lost_all_workers_goes_on_from_the_checkpoint_of_a_commit(train, trace, nodes):
    def faults():
        trace.wait_for(size=1, entries=1)
        nodes.kill(nodes.members()[0])
        trace.wait_for(size=1, entries=2)

    train(faults, (1, 1), "add@step:3", checkpoint=CheckpointPolicy(every_steps=2))
    before, after = trace.entries()
    assert after.batch >= 10
    assert after.batch % 10 == 0
    assert before.pids != after.pids


def test_the_sample_learns_through_the_loss_of_its_first_node(tmp_path):
    report = LocalCluster(
        (1, 2),
        start=FORKED,
        chaos=parse_schedule("kill=rank0@step:25"),  # amid epoch 3: a line just printed would be lost with the node
        run_dir=tmp_path / "run",
        distribution=ElasticDistribution(framework="horovod"),
    ).run([str(SAMPLES / "horovod_digits.py"), "--epochs", "6"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    lines = [line for path in (tmp_path / "run/logs").iterdir() for line in path.read_text().splitlines()]
    accuracies = {line.split()[4]: float(line.split()[-1]) for line in lines if "accuracy" in line}
    assert set(accuracies) == {"1", "2", "3", "4", "5", "6"}
    assert accuracies["6"] > 0.9
    assert [len(round_.members) for round_ in report.rounds] == [2, 1]
