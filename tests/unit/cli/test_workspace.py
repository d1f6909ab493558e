"""What a workspace of one command waits for."""

import pytest

from azureml_elastic.cli.workspace import finish


class Workspace:
    """A workspace whose jobs end when they are waited for, and bring others about.

    Args:
        jobs: final state of each job, and the jobs that there are after its end.
    """

    def __init__(self, *active, failed=(), **jobs):
        self.active = active
        self.failed = dict.fromkeys(failed, "Failed")
        self._jobs = jobs

    def wait(self, name):
        status, self.active = self._jobs[name]
        if status != "Completed":
            self.failed[name] = status
        return status


def test_nothing_was_submitted(capsys):
    assert finish(0, Workspace(), kept=False) == 0
    assert finish(7, Workspace(), kept=False) == 7
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("state", "code"), [("Completed", 0), ("Failed", 1), ("Canceled", 1)])
def test_the_exit_code_is_that_of_the_jobs(state, code, capsys):
    workspace = Workspace("first", first=("Completed", ("replacement",)), replacement=(state, ()))
    assert finish(0, workspace, kept=False) == code
    lines = capsys.readouterr().err.splitlines()
    assert "waiting for first. Ctrl-C" in lines[0]
    assert lines[1].endswith("first: Completed")
    assert f"replacement: {state}" in lines[2]
    assert ("--folder" in lines[2]) == (code == 1)


def test_a_job_that_had_failed_before_the_command_ended_is_shown_and_counts(capsys):
    assert finish(0, Workspace(failed=["early"]), kept=True) == 1
    assert finish(0, Workspace("late", late=("Completed", ()), failed=["early"]), kept=True) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "waiting" not in line] == [
        "azureml-elastic: early: Failed",
        "azureml-elastic: late: Completed",
        "azureml-elastic: early: Failed",
    ]


def test_jobs_of_a_failed_command_are_not_waited_for(capsys):
    assert finish(7, Workspace("a", "b"), kept=True) == 7
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"azureml-elastic: {name} is cancelled, as the command has failed (7)." for name in "ab"]
