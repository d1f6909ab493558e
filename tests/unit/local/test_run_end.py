"""The end of a local run and its outcome."""

from pathlib import Path

import pytest

from azureml_elastic.ledger.events import RunEnded, WorkerFailed
from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import MissedFault, Paths, Report
from azureml_elastic.local.run_end import NodeStatus, command_exit_code, outcome_of, phase

RUNNING = NodeStatus("node-0")
DONE = NodeStatus("node-1", "exited", 0)
KILLED = NodeStatus("node-2", "killed", -9)
PREEMPTED = NodeStatus("node-3", "preempted", 143)
FAILED = NodeStatus("node-4", "exited", 7)
CRASHED = NodeStatus("node-5", "exited", -11)
FROZEN = NodeStatus("node-6", "frozen")
LEFT = NodeStatus("node-7", "exited", 143)

WELL = RunEnded(time=0.0, node="node-0", succeeded=True)
BADLY = RunEnded(time=0.0, node="node-0", succeeded=False, message="the restarts are spent")


@pytest.mark.parametrize(
    ("nodes", "ended", "more", "expected"),
    [
        ([RUNNING], None, False, "going"),
        ([RUNNING, KILLED, FAILED], None, False, "going"),
        ([RUNNING, DONE], None, False, "ending"),
        ([RUNNING], WELL, True, "ending"),
        ([RUNNING], BADLY, True, "ending"),
        ([DONE, KILLED], None, True, "over"),
        ([KILLED], None, False, "over"),
        ([KILLED, PREEMPTED], None, True, "going"),
        ([KILLED, FAILED], None, True, "over"),
        ([KILLED, FROZEN], None, False, "over"),
        ([FROZEN], None, True, "going"),
        ([LEFT], None, True, "going"),
        ([LEFT], None, False, "over"),
    ],
)
def test_phase(nodes, ended, more, expected):
    assert phase(nodes, ended, more_to_come=more) == expected


@pytest.mark.parametrize("nodes", [[DONE], [DONE, KILLED], [PREEMPTED, DONE], [FAILED, DONE]])
def test_a_run_succeeds_when_a_node_reports_it(nodes):
    ending = outcome_of(nodes, None, None)
    assert (ending.outcome, ending.exit_code) == ("succeeded", 0)


def test_a_run_that_ended_well_just_before_its_last_node_was_killed_succeeded():
    assert outcome_of([KILLED], WELL, None).outcome == "succeeded"


def test_the_exit_code_is_the_first_failure_s():
    assert outcome_of([KILLED, FAILED, CRASHED], None, None).exit_code == 7
    assert outcome_of([CRASHED], None, None).exit_code == 128 + 11


def test_the_message_comes_from_the_run_or_the_worker_or_names_the_log():
    failure = WorkerFailed(time=0.0, node="node-4", rank=3, exit_code=1, message="ValueError: x")
    assert outcome_of([FAILED], BADLY, failure).message == "the restarts are spent"
    assert "Worker 3 on node-4 exited with 1: ValueError: x" in outcome_of([FAILED], None, failure).message
    assert "node-4 exited with 7" in outcome_of([FAILED], None, None).message


def test_a_run_without_nodes_fails_with_a_reason():
    ending = outcome_of([KILLED, PREEMPTED], None, None)
    assert (ending.outcome, ending.exit_code) == ("failed", 1)
    assert "All nodes have ended (node-2 killed, node-3 preempted)" in ending.message


@pytest.mark.parametrize(
    ("code", "missing", "missed", "expected"),
    [
        (0, None, False, 0),
        (0, 0, False, 0),
        (0, 0, True, 125),
        (0, None, True, 125),
        (0, 3, True, 1),
        (0, 3, False, 1),
        (7, 3, True, 7),
        (124, None, True, 124),
    ],
)
def test_a_run_that_succeeded_without_its_faults_has_an_exit_code_of_its_own(code, missing, missed, expected):
    audit = None if missing is None else SampleAudit(dataset_size=9, epochs=1, steps=9, seen=9, missing=missing)
    faults = (MissedFault(fault="kill=node-9@step:3", reason="there was no node-9"),) if missed else ()
    report = Report(
        paths=Paths.of(Path("run")),
        outcome="failed" if code else "succeeded",
        exit_code=code,
        audit=audit,
        missed_faults=faults,
    )
    assert command_exit_code(report) == expected
