"""When a whole run goes on after a worker's failure, when it ends, and what its nodes say then."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, RendezvousTimings, TableRendezvous
from azureml_elastic.ledger.events import Event, WorkerFailed
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS, SAMPLES

TRAINING = PROGRAMS

SLOW_HEARTBEAT = TableRendezvous(timings=RendezvousTimings(heartbeat_timeout=timedelta(seconds=30)))
"""A node whose worker has met a peer's end waits this long for the peer's own word, which names the cause."""


BROKEN_STORE = """
import torch.distributed

def refuse(*_, **options):
    raise NotImplementedError("this torch serves no store")

torch.distributed.TCPStore = refuse
"""


def run(tmp_path: Path, way: str = "", *steps: int, program: str = "failing.py", **options) -> Report:
    cluster = LocalCluster(
        options.pop("nodes", (2, 2)),
        start=options.pop("start", FORKED),
        run_dir=tmp_path / "run",
        distribution=ElasticDistribution(max_restarts=options.pop("max_restarts", 3)),
        rendezvous=SLOW_HEARTBEAT,
        **{"checkpoint": CheckpointPolicy(every_steps=5), **options},
    )
    return cluster.run([str(TRAINING / program), way, str(tmp_path / "notes"), *map(str, steps)])


def failures(report: Report) -> list[WorkerFailed]:
    events: list[Event] = EventReader(report.paths.events).read()
    return [event for event in events if isinstance(event, WorkerFailed)]


def assert_reported_by_every_node(report: Report, error: str, *details: str) -> None:
    """The traceback is the first thing behind ``error:``, then comes the paragraph."""
    for node in report.nodes:
        _, _, reported = (report.paths.logs / f"{node.name}.log").read_text().partition("\nerror:")
        assert reported.startswith("\nTraceback (most recent call last):\n"), (node.name, reported)
        traceback, _, paragraph = reported.partition("\n\nWorker ")
        assert error in traceback.splitlines()[-1]
        for detail in details:
            assert detail in paragraph


def assert_failed(report: Report, exit_code: int, rounds: int) -> None:
    assert (report.outcome, report.exit_code) == ("failed", exit_code), report.message
    assert {node.exit_code for node in report.nodes} == {exit_code}
    assert len(report.rounds) == rounds
    assert all(node.leftovers == 0 for node in report.nodes)


@pytest.mark.parametrize("way", ["always", "all"])
def test_the_same_error_without_progress_ends_the_run_at_its_first_repeat(tmp_path, way):
    """Also when another rank has it the second time, and when all ranks have it at once, which is one failure."""
    report = run(tmp_path, way, 7)
    assert_failed(report, 1, rounds=2)
    assert_reported_by_every_node(
        report, "ValueError: the loss is nan at step 7", "at step 7", "not restarted", "round 2"
    )
    assert len({failure.signature for failure in failures(report)}) == 1
    assert {(failure.failure_kind, failure.step) for failure in failures(report)} == {("user", 7)}


def test_an_error_of_the_stores_process_is_said_and_not_taken_for_the_network(tmp_path, monkeypatch):
    """The process is forked from the one that has imported the packages of the program."""
    packages = tmp_path / "packages"
    (packages / "broken_store-1.dist-info").mkdir(parents=True)
    (packages / "broken_store.py").write_text(BROKEN_STORE)
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    report = run(tmp_path, program="without_store.py", start="command")
    assert_failed(report, 1, rounds=2)
    for node in report.nodes:
        _, _, reported = (report.paths.logs / f"{node.name}.log").read_text().partition("\nerror:")
        error, _, paragraph = reported.partition("\n\nThe process of the round's store on node-")
        assert error.splitlines()[-1] == "NotImplementedError: this torch serves no store"
        assert "The same error ended the process of the round's store on node-" in paragraph
        assert "ports" not in reported
    assert {failure.failure_kind for failure in failures(report)} == {"store"}


def test_a_program_that_cannot_be_loaded_is_tried_twice(tmp_path):
    report = run(tmp_path, program="unloadable.py")
    assert_failed(report, 1, rounds=2)
    assert_reported_by_every_node(
        report, "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'", "environment"
    )


def test_the_same_error_after_progress_is_restarted(tmp_path):
    report = run(tmp_path, "once", 4, 8, 12, audit=True)
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit is not None
    assert report.audit.complete, report.audit
    assert "1 of 3" in "".join((report.paths.logs / f"{node.name}.log").read_text() for node in report.nodes)
    assert len(report.rounds) == 4
    assert [failure.step for failure in sorted(failures(report), key=lambda one: one.round)] == [4, 8, 12]
    assert len({failure.signature for failure in failures(report)}) == 1


def test_the_budget_is_the_runs_and_not_each_nodes(tmp_path):
    """Two nodes fail in turn: each of them once or twice, the run three times."""
    report = run(tmp_path, "killed", 4, 8, 12, max_restarts=2)
    assert_failed(report, 137, rounds=3)
    assert len({failure.node for failure in failures(report)}) == 2
    assert {failure.failure_kind for failure in failures(report)} <= {"killed", "out_of_memory"}
    assert "failure 3 within 1 h, and max_restarts=2 allows 2" in report.message


def test_out_of_memory_says_what_to_do(tmp_path):
    report = run(tmp_path, "memory", 3, nodes=(1, 1))
    assert_failed(report, 1, rounds=2)
    assert_reported_by_every_node(report, "DefaultCPUAllocator: can't allocate memory", "ran out of memory", "batch")


def test_an_exit_code_of_the_programs_own_is_the_runs(tmp_path):
    report = run(tmp_path, "code", 3, nodes=(1, 1))
    assert_failed(report, 9, rounds=2)
    assert {failure.failure_kind for failure in failures(report)} == {"exit"}


def test_an_exit_code_behind_a_traceback_is_the_runs_too_and_every_node_shows_the_traceback(tmp_path):
    report = run(tmp_path, "printed", 3)
    assert_failed(report, 9, rounds=2)
    assert {failure.failure_kind for failure in failures(report)} == {"user"}
    for node in report.nodes:
        log = (report.paths.logs / f"{node.name}.log").read_text()
        assert "ValueError: invalid literal for int() with base 10: 'this never works'" in log, node.name


@pytest.mark.parametrize("preload", [True, False], ids=["forked", "plain"])
def test_a_script_s_own_torn_checkpoint_is_named(tmp_path, preload):
    checkpoint = tmp_path / "state.pt"
    torch.save({"model": torch.zeros(1000)}, checkpoint)
    os.truncate(checkpoint, 1500)
    cluster = LocalCluster(
        (1, 1),
        start=FORKED,
        run_dir=tmp_path / "run",
        distribution=ElasticDistribution(max_restarts=1, preload_workers=preload),
    )
    report = cluster.run([str(SAMPLES / "plain_ddp.py"), "--checkpoint", str(checkpoint)])
    assert_failed(report, 1, rounds=2)
    error = f"RuntimeError: while reading {checkpoint} (1500 bytes, modified "
    assert_reported_by_every_node(report, error, "max_restarts=1 allows 1")
    assert [error in round_.reason for round_ in report.rounds] == [True, True]
    assert all("\n" not in round_.reason for round_ in report.rounds)
    assert [error in failure.message for failure in failures(report)] == [True, True]


@pytest.mark.parametrize(
    ("body", "problem"),
    [("os.environ['RANK']", "failed before it could take part"), ("", "ended without train.start()")],
    ids=["reads its rank", "has no session"],
)
def test_a_program_that_in_process_recovery_does_not_suit_says_what_to_do(tmp_path, body, problem):
    script = tmp_path / "train.py"
    script.write_text(f"import os  # without azureml_elastic\n{body}\n")
    distribution = ElasticDistribution(recovery="in_process")
    options = {"start": FORKED, "run_dir": tmp_path / "run", "distribution": distribution}
    report = LocalCluster((1, 1), **options).run([str(script)])
    assert report.outcome == "failed"
    (log,) = report.paths.logs.iterdir()
    last = log.read_text().strip().splitlines()[-1]
    assert problem in last
    assert "RANK and WORLD_SIZE are not set until train.start() returns" in last
    assert 'recovery="restart"' in last


def diverge(tmp_path, policy, step, times=1):
    return run(tmp_path, policy, step, times, program="diverging.py", checkpoint=CheckpointPolicy(every_steps=3))


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_rolls_back_from_weights_that_are_not_finite(tmp_path, times):
    """The second time at the same step it would go on for ever, so the run ends."""
    report = diverge(tmp_path, "rollback", 8, times)
    if times > 1:
        assert_failed(report, 1, rounds=2)
        assert_reported_by_every_node(report, "The weights of step 8 are NaN or infinite", "not restarted")
        return
    assert (report.outcome, report.last_step) == ("succeeded", 20), report.message
    assert [round_.restored_step for round_ in report.rounds] == [0, 6], "the state in memory is not used"
    assert set(json.loads((tmp_path / "weights.json").read_text())) == {True}


def test_a_run_stops_at_weights_that_are_not_finite(tmp_path):
    report = diverge(tmp_path, "stop", 8)
    assert_failed(report, 1, rounds=1)
    assert_reported_by_every_node(
        report, "of step 8", "NaN or infinite", 'on_nonfinite="stop"', "Lower the learning rate"
    )
    assert {failure.failure_kind for failure in failures(report)} == {"nonfinite"}


def test_a_run_that_is_only_warned_keeps_its_last_good_checkpoint(tmp_path):
    report = diverge(tmp_path, "warn", 8)
    assert (report.outcome, report.last_step) == ("succeeded", 20), report.message
    committed = [path for path in report.paths.checkpoints.iterdir() if (path / "committed").exists()]
    assert sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in committed) == [3, 6]
    log = "".join((report.paths.logs / f"{node.name}.log").read_text() for node in report.nodes)
    assert log.count("The loss of step 8: NaN or infinite.") + log.count("The weights of step 8: NaN or infinite.") >= 2
    assert log.count("No checkpoint is taken of step 9") == 1
