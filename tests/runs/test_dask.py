"""Programs with Dask on local nodes: the scheduler's node is lost, a node comes, and a node leaves with notice."""

from __future__ import annotations

import json
from threading import Thread

import psutil
import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.local_nodes import LocalNodes
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.waiting import until

pytest.importorskip("distributed", reason="the extra dask is not installed")

PROGRAM = str(PROGRAMS / "dask_program.py")
TASKS = 24


class Run:
    """A run of the program, and faults at its own points."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "run"
        self.nodes = LocalNodes(self.path)

    def run(self, mode, chaos="", nodes=(2, 2), fault=lambda: None):
        """Run the program to its end; ``fault`` is injected once it has computed."""
        injecting = Thread(target=self._inject, args=(fault,))
        injecting.start()
        cluster = LocalCluster(
            nodes,
            start=FORKED,
            chaos=parse_schedule(chaos) if chaos else None,
            run_dir=self.path,
            distribution=ElasticDistribution(framework="dask", process_count_per_instance=1),
        )
        report = cluster.run([PROGRAM, str(self.folder), mode])
        injecting.join()
        assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
        assert (self.folder / "result").read_text() == str(sum(number * number for number in range(TASKS)))
        assert all(node.leftovers == 0 for node in report.nodes)
        assert not [each for each in psutil.process_iter(["cmdline"]) if self._is_ours(each)]
        return report

    def executions(self):
        return [len((self.folder / f"executed-{number}").read_text()) for number in range(TASKS)]

    def starts(self):
        return len((self.folder / "starts").read_text())

    def _inject(self, fault):
        until((self.folder / "computed").exists, timeout=180)
        fault()

    def _is_ours(self, process):
        return str(self.folder) in " ".join(process.info["cmdline"] or ())


@pytest.fixture
def dask(tmp_path):
    return Run(tmp_path)


def test_the_loss_of_the_schedulers_node_starts_the_program_again_and_a_node_that_comes_takes_part(dask):
    first = []

    def lose():
        first.append(dask.nodes.members()[0])
        dask.nodes.kill(first[0])

    report = dask.run("lost", chaos="add@15s", nodes=(1, 3), fault=lose)
    assert dask.starts() == 2
    last = report.rounds[-1].members
    assert len(last) == 3
    assert first[0] not in last
    assert first[0] in {node for round_ in report.rounds for node in round_.lost}


def test_nodes_leave_with_their_results_moved_and_others_come_without_a_restart(dask):
    left = []

    def leave():
        left.append(dask.nodes.members()[1])
        dask.nodes.preempt(left[0])

    report = dask.run("replaced", chaos="add@1s", nodes=(1, 2), fault=leave)
    assert dask.starts() == 1
    assert dask.executions() == [1] * TASKS
    last = report.rounds[-1].members
    assert len(last) == 2
    assert left[0] not in last


def test_the_sample_searches_on_all_nodes(tmp_path):
    report = LocalCluster(
        (1, 2), start=FORKED, run_dir=tmp_path / "run", distribution=ElasticDistribution(framework="dask")
    ).run([str(SAMPLES / "dask_search.py"), "--output", str(tmp_path / "search.jsonl")])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    found = [json.loads(line)["accuracy"] for line in (tmp_path / "search.jsonl").read_text().splitlines()]
    assert len(found) == 16
    assert max(found) > 0.97
