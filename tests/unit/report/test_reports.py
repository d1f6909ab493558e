"""The summary in the terminal."""

import io
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from azureml_elastic.ledger.events import NodeLeft, RoundReopened, RunEnded
from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import MissedFault, NodeSummary, Paths, Report
from azureml_elastic.ledger.timeline import RoundSpan
from azureml_elastic.node.core.failures import Failure
from azureml_elastic.node.failures.classification import describe_ending
from azureml_elastic.plurals import counted
from azureml_elastic.report.terminal import (
    TimeColumns,
    audit_text,
    lifelines,
    size_chart,
    summary,
    time_axis,
    timeline_picture,
)
from tests.support.histories import enter, loss_and_newcomer, report_of_loss


def rendered(renderable, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def test_the_summary_has_rounds_recoveries_and_outcome(tmp_path):
    text = rendered(summary(report_of_loss(tmp_path)))
    for part in (
        "world sizes: 3 → 2 → 3",
        "node-0 is lost",
        "11 to 20",
        "exactly once: 300 samples of 3 epochs",
        "20 samples of 2 steps rolled back",
        " 2 steps │",  # that the loss has cost, in the table of recoveries
        "the run succeeded at step 30",
        str(tmp_path.name),
    ):
        assert part in text


def test_faults_that_did_not_happen_are_shown(tmp_path):
    missed = (MissedFault(fault="kill=node-9@step:3", reason="there was no node-9; started were node-0 to node-2"),)
    text = rendered(summary(report_of_loss(tmp_path, missed_faults=missed)))
    assert "the fault kill=node-9@step:3 did not happen: there was no node-9; started were node-0 to node-2" in text


def test_a_failure_s_message_is_shown_as_it_is(tmp_path):
    failed = report_of_loss(tmp_path, outcome="failed", exit_code=3, message="list[index] is [red]out[/red] of range")
    assert "the run failed at step 30: list[index] is [red]out[/red] of range" in rendered(summary(failed))


MESSAGE = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    state = torch.load(path)
_pickle.UnpicklingError: while reading /data/state.pt (3 bytes, modified 2026-01-02 03:04:05 UTC; \
remove it if it is incomplete): Weights only load failed.
    (1) Re-running `torch.load`
Traceback of the file: none

Worker 0 on node-1 failed in round 3 with exit code 1: its program raised an exception."""


def test_a_table_s_cell_has_one_line_of_a_message_of_many(tmp_path):
    """The whole message stands once, below the tables."""
    ending = describe_ending(Failure(rank=0, exit_code=1, message=MESSAGE))
    events = [
        *(each for each in loss_and_newcomer() if not isinstance(each, RunEnded | NodeLeft)),
        RoundReopened(time=60.0, node="node-1", round=3, reason=f"worker 0 on node-1 failed with {ending}"),
        *enter(4, ["node-1"], at=61.0),
        RunEnded(time=62.0, node="node-1", round=4, succeeded=False, message=MESSAGE),
    ]
    failed = report_of_loss(tmp_path, events, outcome="failed", message=MESSAGE)
    reasons = [round_.reason for round_ in failed.rounds[2:]]
    for start, reason in zip(("worker 0 on node-1 failed with exit code 1", "the run failed"), reasons, strict=True):
        assert reason.startswith(f"{start}: _pickle.UnpicklingError: while reading /data/state.pt (3 bytes")
        assert len(reason.splitlines()) == 1
    tables, _, below = rendered(summary(failed), width=200).partition("the run failed at step")
    assert "Traceback" not in tables
    assert "UnpicklingError" in tables
    assert below.count("Traceback (most recent call last)") == 1


def test_a_run_without_rounds_has_a_summary_too(tmp_path):
    empty = Report(outcome="failed", exit_code=2, message="why", paths=Paths.of(tmp_path))
    assert "the run failed: why" in rendered(summary(empty))


def test_the_picture_fits_a_narrow_terminal(tmp_path):
    assert all(len(line) <= 80 for line in rendered(summary(report_of_loss(tmp_path)), width=80).splitlines())
    assert "node-0 is lost" in rendered(summary(report_of_loss(tmp_path)), width=80)


def test_failed_audits_are_reported():
    assert "NOT exactly once: 3 missed and 2 repeated" in audit_text(SampleAudit(missing=3, repeated=2, seen=9)).plain
    gap = SampleAudit(missing=3, dropped_lines=2, seen=9)
    assert "not proven: 3 missed" in audit_text(gap).plain
    assert "2 lines of the record could not be written" in audit_text(gap).plain
    assert not gap.refuted
    early = SampleAudit(dataset_size=10, epochs=2, seen=14, unfinished=6)
    assert "the last epoch ended after 4 of 10 samples" in audit_text(early).plain


def test_the_size_chart_shows_the_loss(tmp_path):
    found = report_of_loss(tmp_path)
    columns = TimeColumns(10.0, 47.0, 37)  # one column a second
    (three, upper), (two, lower) = size_chart([round_ for round_ in found.rounds if round_.ran], columns)
    assert (three, two) == (3, 2)
    assert upper == "█" * 14 + " " * 12 + "█" * 11
    assert lower.count(" ") <= 1
    assert time_axis(columns)[1] == "0" + "37.0 s".rjust(36)


def test_sizes_and_nodes_have_one_time_axis(tmp_path):
    """A column of text is a time, from the start of the first node to the end of the last."""
    began, ended = [10.0, 10.0, 10.0, 30.0, 35.0], [24.0, 50.0, 50.0, 50.0, 45.0]
    found = report_of_loss(tmp_path)
    nodes = (*found.nodes, NodeSummary(name="node-4", exit_code=0, ending="exited"))
    nodes = tuple(
        node.model_copy(update={"began": first - 6, "ended": last})
        for node, first, last in zip(nodes, began, ended, strict=True)
    )
    found = found.model_copy(update={"nodes": nodes})
    lines = timeline_picture(found, 46).renderables  # from 4.0 to 50.0
    texts = {line.plain[:12].strip(): line.plain[14:60] for line in lines if line.plain.startswith("  ")}
    assert texts["3"] == " " * 6 + "█" * 14 + " " * 12 + "█" * 11 + " " * 3
    assert texts["node-0"] == "·" * 6 + "█" * 14 + " " * 26
    assert texts["node-3"] == " " * 20 + "·" * 12 + "━" * 11 + "·" * 3
    assert [line.plain[61:] for line in lines if "node-" in line.plain] == ["killed", *["finished"] * 4]
    assert texts["node-4"] == " " * 25 + "·" * 16 + " " * 5, "it has been in no round"


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 90),
)
def test_any_history_has_a_picture_of_the_given_width(history, width):
    rounds = [
        RoundSpan(number, ("a",), size, start, start + length, "a", ran=True)
        for number, (start, length, size) in enumerate(history, 1)
    ]
    node = NodeSummary(name="a", began=history[0][0], ended=history[-1][0])
    found = Report(paths=Paths.of(Path()), outcome="failed", exit_code=1, nodes=(node,), rounds=tuple(rounds))
    columns = TimeColumns.of(found, width)
    assert {len(bar) for _, bar in size_chart(rounds, columns)} == {width}
    assert [len(life.bar) for life in lifelines(found, columns)] == [width]


def test_one_of_a_kind_is_named_so(tmp_path):
    one = report_of_loss(tmp_path, skipped_events=1, audit=SampleAudit(dataset_size=1, epochs=1, steps=1, seen=1))
    text = rendered(summary(one))
    assert "1 sample of 1 epoch, none missed" in text
    assert "1 line of the event files could not be read" in text
    assert [counted(number, "process", "processes") for number in (0, 1, 1200)] == [
        "0 processes",
        "1 process",
        "1,200 processes",
    ]
