"""Horovod's elastic mode on local nodes: a node is lost, one comes, and one leaves with notice."""

from __future__ import annotations

import os
import signal
from threading import Thread

import psutil
import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ledger.events import NodeStarted, RoundEntered
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import start_node
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.waiting import until

pytest.importorskip("horovod", reason="Horovod is not installed")

PROGRAM = str(PROGRAMS / "horovod_program.py")


class Run:
    """A run of the program, and faults at its own points."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "run"

    def run(self, faults, nodes, chaos="", **options):
        injecting = Thread(target=self._inject, args=(faults,))
        injecting.start()
        cluster = LocalCluster(
            nodes,
            popen=start_node,
            chaos=parse_schedule(chaos) if chaos else None,
            run_dir=self.path,
            timeout_s=240,
            distribution=ElasticDistribution(framework="horovod", process_count_per_instance=1),
            **options,
        )
        report = cluster.run([PROGRAM, str(self.folder)])
        injecting.join()
        assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
        assert float((self.folder / "result").read_text()) < 0.1
        assert all(node.leftovers == 0 for node in report.nodes)
        return report

    def lines(self):
        path = self.folder / "trace"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def entries(self):
        """Return the first batch, the number of workers and their processes of each generation."""
        found = {}
        for word, *values in self.lines():
            if word == "enter":
                batch, size, pid = map(int, values)
                if not found or len(found[key := next(reversed(found))]) == key[2]:
                    found[len(found), batch, size] = set()
                found[next(reversed(found))].add(pid)
                assert next(reversed(found))[1:] == (batch, size), "the workers do not agree"
        return [(batch, size, pids) for (_, batch, size), pids in found.items() if len(pids) == size]

    def last_commit(self, before=None):
        """Return the batch of the last commit, or of the last one before an entry."""
        last = 0
        for word, batch, *values in self.lines():
            if word == "commit":
                last = int(batch)
            elif before is not None and int(batch) == before[0] and int(values[1]) in before[2]:
                break
        return last

    def wait_for(self, size, entries, batches=25):
        """Wait for so many workers to have trained some batches, in this start of training."""
        until(lambda: len(self.entries()) >= entries and self.entries()[-1][1] == size, timeout=180)
        after = self.entries()[-1][0] + batches
        until(lambda: self.last_commit() >= after, timeout=60)

    def members(self):
        """Return the nodes of the newest round in rank order."""
        entries = [each for each in read_events(self.path / "events") if isinstance(each, RoundEntered)]
        return max(entries, key=lambda each: each.round).members

    def agent(self, node):
        events = read_events(self.path / "events")
        return next(each.pid for each in events if isinstance(each, NodeStarted) and each.node == node)

    def _inject(self, faults):
        try:
            faults()
            until(lambda: self.last_commit() >= 200, timeout=60)  # so that the model has learnt
        finally:
            (self.folder / "enough").touch()


@pytest.fixture
def horovod(tmp_path):
    return Run(tmp_path)


def kill_tree(pid):
    agent = psutil.Process(pid)
    for process in (*agent.children(recursive=True), agent):
        process.kill()


def test_workers_stay_while_nodes_are_lost_come_and_leave_and_no_commit_is_lost(horovod):
    committed = []

    def faults():
        horovod.wait_for(size=2, entries=1)
        kill_tree(horovod.agent(horovod.members()[0]))
        committed.append(horovod.last_commit())
        horovod.wait_for(size=1, entries=2)
        horovod.wait_for(size=2, entries=3)
        os.kill(horovod.agent(horovod.members()[0]), signal.SIGTERM)  # a preemption notice
        horovod.wait_for(size=1, entries=4)

    report = horovod.run(faults, nodes=(1, 2), chaos="add@step:6")
    first, lost, grown, left = horovod.entries()
    assert lost[0] in (committed[0], committed[0] + 5)  # a commit may be recorded before all workers have kept it
    assert lost[2] < first[2]
    assert lost[2] < grown[2]
    assert left[2] < grown[2]
    assert left[2] != lost[2], "the node that came has the state alone now"
    for entry in (grown, left):  # no batch is trained again
        assert horovod.last_commit(before=entry) == entry[0]
    assert [len(round_.members) for round_ in report.rounds] == [2, 1, 2, 1]


def test_a_run_that_has_lost_all_workers_goes_on_from_the_checkpoint_of_a_commit(horovod):
    def faults():
        horovod.wait_for(size=1, entries=1)
        kill_tree(horovod.agent(horovod.members()[0]))
        horovod.wait_for(size=1, entries=2)

    horovod.run(faults, nodes=(1, 1), chaos="add@step:3", checkpoint_steps=2)
    (_, _, before), (batch, _, after) = horovod.entries()
    assert batch >= 10
    assert batch % 10 == 0
    assert before != after


def test_the_sample_learns_through_the_loss_of_its_first_node(tmp_path):
    report = LocalCluster(
        (1, 2),
        popen=start_node,
        chaos=parse_schedule("kill=rank0@step:30"),
        run_dir=tmp_path / "run",
        distribution=ElasticDistribution(framework="horovod"),
    ).run([str(SAMPLES / "horovod_digits.py"), "--epochs", "6"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    lines = [line for path in (tmp_path / "run/logs").iterdir() for line in path.read_text().splitlines()]
    accuracies = {line.split()[4]: float(line.split()[-1]) for line in lines if "accuracy" in line}
    assert set(accuracies) == {"1", "2", "3", "4", "5", "6"}
    assert accuracies["6"] > 0.9
    assert [len(round_.members) for round_ in report.rounds] == [2, 1]
