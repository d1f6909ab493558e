"""States of jobs from their nodes and steps."""

import itertools

import pytest

from azureml_elastic.testing.jobs.runs import TERMINAL, NodeState, pipeline_status, unlike_the_run, verdict

RUNS, DONE, CRASHED = NodeState(None, False), NodeState(0, False), NodeState(1, False)
LEFT, KILLED, GOING = NodeState(143, True), NodeState(-9, True), NodeState(None, True)
DONE_IN_TIME = NodeState(0, True)


@pytest.mark.parametrize(
    ("nodes", "alone", "replaced"),
    [
        ([RUNS], "running", "running"),
        ([RUNS, DONE], "running", "running"),
        ([DONE, DONE], "completed", "completed"),
        ([RUNS, CRASHED], "failed", "failed"),
        ([RUNS, GOING], "running", "running"),
        ([RUNS, LEFT], "preempted", "running"),
        ([KILLED], "preempted", "running"),
        ([KILLED, CRASHED], "failed", "failed"),
        ([DONE, LEFT], "preempted", "completed"),
        ([DONE, DONE_IN_TIME], "completed", "completed"),
    ],
)
def test_a_job_by_its_nodes(nodes, alone, replaced):
    for order in itertools.permutations(nodes):
        assert verdict(order, replaces=False) == alone
        assert verdict(order, replaces=True) == replaced


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["Queued", "NotStarted"], "Queued"),
        (["Queued", "Preparing"], "Running"),
        (["Completed", "Queued"], "Running"),
        (["Failed", "Running"], "Running"),
        (["Completed", "Completed"], "Completed"),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_a_pipeline_by_its_steps(steps, expected, lenient):
    assert pipeline_status(steps, cancelled=False, sufficient=steps if lenient else ()) == expected


def test_a_pipeline_that_continues_completes_if_a_sufficient_step_did():
    both = ["Failed", "Completed"]
    assert pipeline_status(both, cancelled=False, sufficient=both) == "Completed"
    assert pipeline_status(both, cancelled=False, sufficient=["Failed"]) == "Failed"
    assert pipeline_status(both, cancelled=False, sufficient=()) == "Failed"


def test_a_cancelled_pipeline_waits_for_its_steps():
    assert pipeline_status(["CancelRequested", "Canceled"], cancelled=True, sufficient=()) == "CancelRequested"
    assert pipeline_status(["Canceled", "Canceled"], cancelled=True, sufficient=()) == "Canceled"


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_pipeline_has_ended_when_all_its_steps_have(cancelled, lenient):
    states = ["NotStarted", "Queued", "Preparing", "Running", "Finalizing", "CancelRequested", *TERMINAL]
    for steps in itertools.product(states, repeat=3):
        ended = pipeline_status(steps, cancelled=cancelled, sufficient=steps if lenient else ()) in TERMINAL
        assert ended == all(step in TERMINAL for step in steps)


@pytest.mark.parametrize(
    ("commands", "succeeded", "expected"),
    [
        (["Completed", "Completed"], True, None),
        (["Failed", "Failed"], True, "Failed"),
        (["Failed", "Completed"], True, None),
        (["Failed", "Canceled"], True, "Failed"),
        (["Canceled"], True, None),
        (["Completed", "Completed"], False, "Completed"),
        (["Completed", "Failed"], False, None),
        (["Failed"], False, None),
        ([], False, None),
    ],
)
def test_commands_that_end_unlike_their_run(commands, succeeded, expected):
    assert unlike_the_run(commands, succeeded=succeeded) == expected
