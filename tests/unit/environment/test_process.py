"""Tests of the environment of this process."""

from __future__ import annotations

import os

import pytest

from azureml_elastic.environment import names
from azureml_elastic.environment.engine import EngineEnvironment
from azureml_elastic.environment.process import Environment, change, changed, set_defaults, take
from azureml_elastic.environment.worker import Assigned, WorkerEnvironment
from azureml_elastic.errors import PlanError, UsageError

A = "AZUREML_ELASTIC_TEST_A"
B = "AZUREML_ELASTIC_TEST_B"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(A, "1")
    monkeypatch.delenv(B, raising=False)
    monkeypatch.setenv(B, "removed")  # so that the test's own changes are undone
    del os.environ[B]


def test_an_environment_is_a_copy() -> None:
    environment = Environment.read()
    os.environ[A] = "2"
    assert environment.get(A) == "1"
    assert Environment.read().get(A) == "2"


def test_a_child_gets_more_variables_than_this_process() -> None:
    environment = Environment.read({"X": "1", "Y": "2"})
    assert environment.for_child({"Y": "3", "Z": "4"}) == {"X": "1", "Y": "3", "Z": "4"}
    assert environment.with_variables({"Y": "3"}) == Environment.read({"X": "1", "Y": "3"})
    assert environment.for_child() == {"X": "1", "Y": "2"}


def test_variables_are_changed_for_a_context() -> None:
    with changed({A: None, B: "x"}):
        assert (os.environ.get(A), os.environ.get(B)) == (None, "x")
    assert (os.environ.get(A), os.environ.get(B)) == ("1", None)


def test_a_users_own_setting_takes_precedence() -> None:
    set_defaults({A: "2", B: "2"})
    assert (os.environ[A], os.environ[B]) == ("1", "2")


def test_a_variable_is_taken_once() -> None:
    assert [take(A), take(A)] == ["1", None]
    change({A: "3"})
    assert os.environ[A] == "3"


def test_a_worker_without_an_agent_is_alone() -> None:
    worker = WorkerEnvironment.read({})
    worker.check()
    assert (worker.rank, worker.local_rank, worker.world_size, worker.local_world_size, worker.round) == (0, 0, 1, 1, 0)
    assert (worker.channel, worker.plan, worker.master, worker.assigned) == (None, None, None, None)
    assert (worker.has_rank, worker.finds_others, worker.in_process_on_gpu) == (False, False, False)
    assert worker.history == (0, 0.0)


def test_a_worker_has_what_the_agent_sets() -> None:
    variables = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
        names.WORKER: "3 4 10.0.0.1 29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        names.ROUND: "2",
        names.HISTORY: "5 61",
        names.CHANNEL: "/tmp/x/agent",
    }
    worker = WorkerEnvironment.read(variables)
    worker.check()
    assert worker.assigned == Assigned(3, 4, "10.0.0.1", 29400)
    assert worker.master == ("10.0.0.1", 29400)
    assert worker.history == (5, 61.0)
    assert worker.finds_others
    assert WorkerEnvironment.read({**variables, "TORCHELASTIC_USE_AGENT_STORE": "False"}).assigned is None


def test_variables_of_a_worker_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='x' is not a whole number"):
        WorkerEnvironment.read({"WORLD_SIZE": "x"}).check()
    with pytest.raises(UsageError, match="WORLD_SIZE=2, but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        WorkerEnvironment.read({"WORLD_SIZE": "2"}).check()
    with pytest.raises(PlanError, match="is set without AZUREML_ELASTIC_ROUND"):
        WorkerEnvironment.read({names.CHANNEL: "/s"}).check()


def test_children_of_an_engine_are_no_workers() -> None:
    engine = EngineEnvironment.read({"RANK": "1", names.CHANNEL: "/x/agent", "TORCHELASTIC_RUN_ID": "r", "X": "1"})
    assert engine.for_child({"Y": "2"}) == {"X": "1", "Y": "2"}
    assert engine.folder == "/x"


@pytest.mark.parametrize("name", ["CONNECTION_STRING", "ACCOUNT_KEY", "SAS_TOKEN"])
def test_a_credential_of_a_storage_account_is_found(name: str) -> None:
    assert Environment.read({f"AZURE_STORAGE_{name}": "x"}).has_storage_credential
    assert not Environment.read({f"AZURE_STORAGE_{name}": ""}).has_storage_credential
