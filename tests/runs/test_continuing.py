"""A run that continues a failed one: from its last committed checkpoint, and each sample once over both."""

import contextlib

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, TableRendezvous
from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.events import Restored
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import Paths, Report, load_report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.node.table.checkpoint_pointer import CHECKPOINT_KEY
from azureml_elastic.node.table.sqlite import SqliteTable
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS

SCRIPT = str(PROGRAMS / "failing.py")


def cluster(folder, count, **options):
    options |= {
        "checkpoint": CheckpointPolicy(every_steps=3),
        "audit": True,
        "distribution": ElasticDistribution(max_restarts=0),
    }
    return LocalCluster((count, count), start=FORKED, run_dir=folder, **options)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_sample_is_trained_once_over_a_failed_run_and_the_one_that_continues_it(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    failed = cluster(first, 2).run([SCRIPT, "all", str(tmp_path / "notes"), "8"])
    assert failed.outcome == "failed"
    with contextlib.closing(SqliteTable(first / "table.sqlite", TableRendezvous().table, failed.run_id)) as table:
        committed = table.get(CHECKPOINT_KEY).value["pointer"]["step"]
    before = files(first / "checkpoints")

    report = cluster(second, 1, resume_from=first).run([SCRIPT, "never", str(tmp_path / "notes")])
    assert report.outcome == "succeeded", report.message
    restored = [event.step for event in read_events(second / "events") if isinstance(event, Restored)]
    assert restored == [committed]
    assert report.last_step == 20
    assert report.audit.complete
    assert (report.audit.seen, report.audit.steps) == (80, 20)
    assert load_report(second).resumed_from == first
    assert files(first / "checkpoints") == before
    assert list((second / "checkpoints").glob("step-000000000020*"))


def test_what_one_rank_has_not_failed_at_is_not_trained_again(tmp_path):
    """The other rank hands its state over, and its agent keeps it as it ends with the run."""
    first, second = tmp_path / "first", tmp_path / "second"
    failed = cluster(first, 2).run([SCRIPT, "once", str(tmp_path / "notes"), "8"])
    assert failed.outcome == "failed"
    report = cluster(second, 1, resume_from=first).run([SCRIPT, "never", str(tmp_path / "notes")])
    assert report.outcome == "succeeded", report.message
    (restored,) = [event for event in read_events(second / "events") if isinstance(event, Restored)]
    assert restored.step == 8
    assert (report.audit.complete, report.audit.rolled_back_steps) == (True, 0)


def test_a_run_without_a_committed_checkpoint_is_refused_before_a_folder_is_made(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    program = [SCRIPT, "never", str(tmp_path / "notes")]
    with pytest.raises(UsageError, match=r"contains neither report\.json nor events"):
        cluster(second, 1, resume_from=first).run(program)
    first.mkdir()
    Report(outcome="failed", exit_code=1, paths=Paths.of(first)).write()
    with pytest.raises(UsageError, match="has no committed checkpoint"):
        cluster(second, 1, resume_from=first).run(program)
    assert not second.exists()
