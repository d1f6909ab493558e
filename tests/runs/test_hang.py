"""A worker that hangs: all stacks are written down, the round is restarted, and the run ends well."""

from __future__ import annotations

import sys

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.ledger.events import HangDetected, HostStruck, Progress, RoundEntered, RoundReopened, read_event
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.sentences import describe
from azureml_elastic.ledger.timeline import recoveries
from azureml_elastic.local.cluster import LocalCluster
from tests.support.paths import PROGRAMS

TRAINING = PROGRAMS
PROGRAM = str(TRAINING / "hanging.py")


def test_a_hanging_run_tells_where_and_goes_on(tmp_path):
    victim = 1
    cluster = LocalCluster(
        (2, 2),
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=10),
        node_command=(sys.executable, str(TRAINING / "impatient_node.py")),
    )
    report = cluster.run([PROGRAM, str(victim), str(tmp_path / "slept")])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.last_step == 40
    assert report.audit.complete, report.audit
    first, second = report.rounds
    assert first.last_step <= 20  # progress is not written down at every step
    assert first.reason.startswith("hang: no step after step 20 for ")
    assert second.restored_step == 20
    assert second.last_step == 40

    hangs = [event for event in read_events(report.paths.events) if isinstance(event, HangDetected)]
    assert [(event.node, event.round, event.step) for event in hangs] == [(first.members[0], 1, 20)]
    assert 10 <= hangs[0].seconds < 60
    (recovery,) = report.recoveries
    assert recovery.since == "last step"
    assert recovery.seconds > 10

    for rank, node in enumerate(first.members):
        log = (report.paths.logs / f"{node}.log").read_text()
        written = (report.paths.run_dir / "stacks" / f"round-1.{node}.txt").read_text()
        for text in (log, written):
            assert f"===== Stacks of {node}, round 1: hang: no step after step 20" in text
            assert f"----- rank {rank}, pid " in text
            assert "after step 20: " in text
            assert f'File "{PROGRAM}", line ' in text
            assert ("in sleep_for_ever" in text) == (rank == victim)
        assert "Stacks of" not in log.partition("===== End of the stacks")[2]
    assert all(node.leftovers == 0 for node in report.nodes)


DIFFERENT = TRAINING / "different_collectives.py"


def line_of(call: str) -> int:
    lines = DIFFERENT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == call)


WAITING = (
    f"rank 0 waits in barrier, called at {DIFFERENT}:{line_of('dist.barrier()')} in save",
    f"rank 1 waits in all_reduce, called at {DIFFERENT}:{line_of('dist.all_reduce(torch.ones(1))')} in average",
)


def test_ranks_that_wait_in_different_collectives_are_no_lost_nodes(tmp_path):
    """Each node's log says where its ranks wait."""
    cluster = LocalCluster(
        (2, 2),
        run_dir=tmp_path / "run",
        node_command=(sys.executable, str(TRAINING / "impatient_node.py")),
        distribution=ElasticDistribution(max_restarts=0),
    )
    report = cluster.run([str(DIFFERENT)])
    assert report.outcome == "failed"
    assert "hang: no step after step 8" in report.message
    for node, waiting in zip(report.rounds[0].members, WAITING, strict=True):
        assert waiting in (report.paths.logs / f"{node}.log").read_text()
    assert not [each for each in read_events(report.paths.events) if isinstance(each, HostStruck | RoundReopened)]


def test_a_hang_is_a_pause_since_the_last_step():
    events = [
        RoundEntered(time=0, node="a", round=1, rank=0, members=("a",), world_size=1),
        Progress(time=10, node="a", round=1, step=5),
        HangDetected(time=310, node="a", round=1, step=5, seconds=300.1, limit_seconds=300),
        RoundReopened(time=311, node="a", round=1, reason="hang: no step"),
        RoundEntered(time=312, node="a", round=2, rank=0, members=("a",), world_size=1),
        Progress(time=320, node="a", round=2, step=6),
    ]
    assert [read_event(event.model_dump_json()) for event in events] == events
    (recovery,) = recoveries(Picture.of(events))
    assert (recovery.round, recovery.resumed, recovery.since, recovery.seconds) == (1, 2, "last step", 310)
    assert [node.state for node in Picture.of(events[:3]).now.nodes] == ["hung"]
    assert describe(events[2]) == (
        "no step for 300.1 s (limit 300.0 s) after step 5; the stacks of all workers are in the nodes' logs"
    )
