"""Programs with Ray on local nodes: the head's node is lost, a node comes, and a node leaves with notice.

Ray puts the machine's own address in the place of 127.0.0.1, so the nodes run in a network that has nothing else.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from threading import Thread

import psutil
import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.local_nodes import LocalNodes
from tests.support.node_server import StartAt
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.waiting import until

pytest.importorskip("ray", reason="the extra ray is not installed")

PROGRAM = str(PROGRAMS / "ray_program.py")
TASKS = 12


@pytest.fixture(scope="module")
def network():
    """Return the name of a network namespace with nothing but 127.0.0.1."""
    name = f"ray-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the nodes need a network namespace of their own, as root: {error}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class Run:
    """A run of the program, and faults at its own points."""

    def __init__(self, folder, network):
        self.folder = folder
        self.path = folder / "run"
        self.nodes = LocalNodes(self.path)
        self._start = StartAt(network=lambda _: network)
        self._network = network

    def run(self, command, nodes, chaos="", fault=lambda: None, cpus=2):
        """Run a command to its end; ``fault`` is injected once the program has computed."""
        injecting = Thread(target=fault, daemon=True)
        injecting.start()
        cluster = LocalCluster(
            nodes,
            start=self._start,
            chaos=parse_schedule(chaos) if chaos else None,
            run_dir=self.path,
            distribution=ElasticDistribution(framework="ray", process_count_per_instance=cpus),
        )
        temporary = set(self.temporary())
        report = cluster.run(command)
        injecting.join()
        assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
        until(lambda: not self.processes())  # the agents of a raylet that was killed look for it now and then
        assert all(node.leftovers == 0 for node in report.nodes)
        lost = {node for round_ in report.rounds for node in round_.lost}
        assert len(set(self.temporary()) - temporary) <= len(lost)  # the next node on the machine removes them
        return report

    def computed(self):
        until((self.folder / "computed").exists, timeout=180)

    def temporary(self):
        return [*Path(tempfile.gettempdir()).glob("elastic-*/r*"), *Path("/tmp").glob("ray*/session*")]

    def processes(self):
        pids = subprocess.run(["ip", "netns", "pids", self._network], capture_output=True, text=True, check=True).stdout
        return [pid for pid in pids.split() if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def ray(tmp_path, network):
    return Run(tmp_path, network)


def log(run, node):
    return (run.path / "logs" / f"{node}.log").read_text()


def result(run):
    return int((run.folder / "result").read_text())


def test_the_loss_of_the_heads_node_starts_the_program_again_and_a_node_that_comes_takes_part(ray):
    first = []

    def lose():
        ray.computed()
        first.append(ray.nodes.members()[0])
        ray.nodes.kill(first[0])

    report = ray.run([PROGRAM, str(ray.folder), "lost"], nodes=(1, 2), chaos="add@15s", fault=lose)
    assert len((ray.folder / "starts").read_text()) == 2
    assert result(ray) == sum(number * number for number in range(TASKS))
    last = report.rounds[-1].members
    assert len(last) == 2
    assert first[0] not in last
    assert first[0] in {node for round_ in report.rounds for node in round_.lost}


def test_nodes_leave_when_their_tasks_have_ended_and_others_come_without_a_restart(ray):
    left = []

    def leave():
        ray.computed()
        left.append(ray.nodes.members()[1])
        ray.nodes.preempt(left[0])

    report = ray.run([PROGRAM, str(ray.folder), "replaced"], nodes=(1, 2), chaos="add@1s", fault=leave)
    assert len((ray.folder / "starts").read_text()) == 1
    assert result(ray) == sum(number * number for number in range(TASKS))
    last = report.rounds[-1].members
    assert len(last) == 2
    assert left[0] not in last
    code, _, output = (ray.folder / "stranger").read_text().partition(" ")
    assert code == "1"
    assert "InvalidAuthToken" in output  # a program with another token is refused


def test_the_sample_goes_on_from_its_checkpoint_when_the_heads_node_is_lost(ray):
    first = []

    def lose():
        state = ray.folder / "digits" / "checkpoint_manager_snapshot.json"  # of Ray: it names the complete checkpoints
        until(lambda: state.exists() and "checkpoint_dir_name" in state.read_text(), timeout=180)
        first.append(ray.nodes.members()[0])
        ray.nodes.kill(first[0])

    command = [str(SAMPLES / "ray_train.py"), "--epochs", "6", "--most-workers", "2", "--output", str(ray.folder)]
    report = ray.run(command, nodes=(1, 2), fault=lose, cpus=1)
    last = log(ray, report.rounds[-1].members[0])
    assert "epoch 0:" in log(ray, first[0])
    assert "epoch 0:" not in last
    assert "after epoch 5" in last
