"""The report of a run, written and read back, or recreated from the events."""

import json
import threading

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import FaultRecord, NodeSummary, Paths, Report, audit_folder, load_report
from tests.support.histories import loss_and_newcomer, write_events


def test_a_report_is_written_and_read_back(tmp_path):
    report = Report(
        paths=Paths.of(tmp_path),
        outcome="succeeded",
        exit_code=0,
        name="run",
        nodes=(NodeSummary(name="node-0", exit_code=-9, ending="killed"),),
        faults=(FaultRecord(fault="kill=rank0@step:12", nodes=("node-0",), step=12, time=23.0),),
    ).with_timeline(Picture.of(loss_and_newcomer()), losses=[("node-0", 23.0)])
    assert report.world_sizes == (3, 2, 3)
    assert report.last_step == 30
    assert report.recoveries[0].since == "loss"
    assert report.write() == tmp_path / "report.json"
    assert load_report(tmp_path) == report


def test_a_report_is_replaced_as_a_whole(tmp_path):
    faults = tuple(FaultRecord(fault="kill=any@1s", nodes=("node-0",), step=n, time=23.0) for n in range(3000))
    report = Report(paths=Paths.of(tmp_path), outcome="succeeded", exit_code=0, faults=faults)
    report.write()
    thread = threading.Thread(target=lambda: [report.write() for _ in range(30)])
    thread.start()
    reads = 0
    while thread.is_alive() or not reads:
        assert load_report(tmp_path) == report
        reads += 1
    thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_report_is_recreated_from_the_events(tmp_path):
    write_events(tmp_path / "events", loss_and_newcomer())
    (tmp_path / "samples").mkdir()
    sample = {"round": 1, "step": 1, "epoch": 0, "ids": [0]}
    done = {"round": 1, "step": 1, "done": True}
    (tmp_path / "samples" / "round-1.rank-0.jsonl").write_text(f"{json.dumps(sample)}\n{json.dumps(done)}\n")
    report = load_report(tmp_path)
    assert (report.outcome, report.world_sizes) == ("succeeded", (3, 2, 3))
    assert {node.name: node.ending for node in report.nodes} == {
        "node-0": "unknown",
        "node-1": "exited",
        "node-2": "exited",
        "node-3": "exited",
    }
    assert report.audit.seen == 1


def test_without_sample_files_there_is_no_audit(tmp_path):
    assert audit_folder(Paths.of(tmp_path), Picture()) is None


def test_a_folder_that_is_no_run_s_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"neither report\.json nor events"):
        load_report(tmp_path)
    (tmp_path / "report.json").write_text('{"version": 99}')
    with pytest.raises(UsageError, match="cannot be read"):
        load_report(tmp_path)
