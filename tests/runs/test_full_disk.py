"""Runs whose folder is on a small disk, a real one in memory: what is wrong is said where it is seen."""

from __future__ import annotations

import re

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, HealthPolicy
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.events import Restored
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.view import View
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.small_disk import disk, fill, fill_for
from tests.support.whole_runs import GATHERING, at_step

PROGRAM = str(PROGRAMS / "chaos_train.py")


class Notes(View):
    """A view that keeps what is said about the whole run."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


def test_a_run_folder_with_too_little_space_is_refused_before_a_node_starts(tmp_path):
    with (
        disk(tmp_path / "small", 300) as small,
        pytest.raises(UsageError, match=r"run folder .* MiB free, and each node requires 512 MiB"),
    ):
        LocalCluster((1, 2), start=FORKED, run_dir=small / "run").run([PROGRAM])
    with disk(tmp_path / "again", 300) as small:
        health = HealthPolicy(disk_mib=200)
        cluster = LocalCluster((1, 2), start=FORKED, run_dir=small / "run", health=health, rendezvous=GATHERING)
        report = cluster.run([PROGRAM, "--epochs", "1"])
        assert report.outcome == "succeeded"


def test_a_disk_that_fills_up_is_named_at_the_terminal_and_in_the_report(tmp_path):
    """Output, events, checkpoints and the table are on it: the nodes wait, and the launcher says for what."""
    notes = Notes()
    with disk(tmp_path / "small", 600) as small:
        running = LocalCluster(
            (1, 2),
            start=FORKED,
            run_dir=small / "run",
            audit=True,
            checkpoint=CheckpointPolicy(every_steps=10),
            rendezvous=GATHERING,
            timeout=25,
            view=notes,
        )
        with at_step(small / "run", 25, 2, lambda _: fill(small)):
            report = running.run([PROGRAM, "--gather", "2", "--step-delay", "0.1"])
        said = f"the disk of the run folder {small / 'run'} is full"
        assert [note for note in notes.said if note.startswith(said)]
        assert (report.outcome, said[1:] in report.message) == ("failed", True), report.message
        assert load_report(small / "run") == report
        log = "".join(path.read_text() for path in report.paths.logs.iterdir())
    assert "is full" in log
    assert "No space left" in log or "what the worker printed last may be missing" in log, log


def test_what_is_written_for_people_is_dropped_while_the_disk_is_full_and_costs_no_step(tmp_path):
    with disk(tmp_path / "small", 600) as small:
        running = LocalCluster((2, 2), start=FORKED, run_dir=small / "run", audit=True, rendezvous=GATHERING)
        with at_step(small / "run", 25, 2, lambda _: fill_for(small, 10)):
            report = running.run([PROGRAM, "--epochs", "12", "--step-delay", "0.15"])  # the last save needs space again
        assert (report.outcome, report.world_sizes) == ("succeeded", (2,)), report.message
        log = "".join(path.read_text() for path in report.paths.logs.iterdir())
        assert len(report.rounds) == 1, log
    assert re.search(r"[1-9]\d* lines of samples were dropped", log), log
    assert re.search(r"[1-9]\d* events were dropped", log), log


@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_a_node_that_leaves_while_the_disk_is_full_costs_the_others_no_step(tmp_path, recovery):
    with disk(tmp_path / "small", 600) as small:
        running = LocalCluster(
            (1, 3),
            start=FORKED,
            run_dir=small / "run",
            checkpoint=CheckpointPolicy(every_steps=1000),
            distribution=ElasticDistribution(recovery=recovery),
            chaos=parse_schedule("preempt=any@step:40"),
            rendezvous=GATHERING,
        )
        with at_step(small / "run", 27, 3, lambda _: fill_for(small, 8)):
            report = running.run([PROGRAM, "--epochs", "8", "--step-delay", "0.1"])
        assert (report.outcome, report.world_sizes) == ("succeeded", (3, 2)), report.message
        restored = [event for event in read_events(report.paths.events) if isinstance(event, Restored)]
    assert max(restored, key=lambda event: event.round).step >= 40
