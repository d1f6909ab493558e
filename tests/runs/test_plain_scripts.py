"""Whole runs of scripts without a session: their time to save when they are stopped, and what they end with."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING


def test_what_a_script_saves_on_sigterm_is_what_the_next_round_continues_from(tmp_path):
    """The preempted node has the time of its notice for it, however soon the others are stopped."""
    cluster = LocalCluster(
        (1, 2),
        chaos=parse_schedule("preempt=node-0@2s/30s"),
        distribution=ElasticDistribution(stop_timeout=timedelta(seconds=0.2)),
        rendezvous=GATHERING,
        run_dir=tmp_path / "run",
        start=FORKED,
        timeout=120,
    )
    # The worker of the other node ends at once, so that a round could begin before the save.
    report = cluster.run(["python", str(PROGRAMS / "terminated.py"), str(tmp_path), "1.5"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.world_sizes == (2, 1)
    assert {node.name: node.exit_code for node in report.nodes} == {"node-0": 143, "node-1": 0}
    step = (tmp_path / "step.txt").read_text()
    assert f"begins at step {step}" in (report.paths.logs / "node-1.log").read_text()


@pytest.mark.parametrize(
    ("words", "code", "rounds", "why"),
    [
        (("2",), 2, 2, "have not begun to connect"),
        # The number with which a worker with a session ends when its round is over.
        (("75", "connected"), 75, 3, "max_restarts=2 allows 2"),
    ],
    ids=["before it connects", "after it has connected"],
)
def test_a_code_of_the_scripts_own_is_a_failure_and_the_runs_code(tmp_path, words, code, rounds, why):
    cluster = LocalCluster(
        (2, 2), run_dir=tmp_path / "run", start=FORKED, distribution=ElasticDistribution(max_restarts=2), timeout=120
    )
    report = cluster.run(["python", str(PROGRAMS / "ending.py"), *words])
    assert (report.outcome, report.exit_code) == ("failed", code), report.message
    assert {node.exit_code for node in report.nodes} == {code}
    assert len(report.rounds) == rounds
    assert why in report.message


@pytest.mark.parametrize("words", [("trains",), ()], ids=["trains", "does not train"])
def test_a_fault_in_seconds_comes_in_a_script_that_only_names_the_library(tmp_path, words):
    """Such a script would report its steps, if it had opened a session."""
    cluster = LocalCluster(
        (1, 2), chaos=parse_schedule("kill=rank0@0.5s"), run_dir=tmp_path / "run", rendezvous=GATHERING, start=FORKED,
        timeout=120,
    )  # fmt: skip
    report = cluster.run(["python", str(PROGRAMS / "branching.py"), *words])
    assert (report.outcome, report.exit_code, report.missed_faults) == ("succeeded", 0, ()), report.message
    assert report.world_sizes == (2, 1)
    assert ("trains all its steps again" in (report.paths.logs / "node-0.log").read_text()) == bool(words)


def test_a_model_that_is_released_after_its_group_does_not_keep_the_script_from_ending(tmp_path):
    cluster = LocalCluster((1, 1), run_dir=tmp_path / "run", start=FORKED, timeout=60)
    report = cluster.run([str(PROGRAMS / "released_models.py")])
    assert report.outcome == "succeeded", report.message
