"""Parameters that a script logs to MLflow again after a restart."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from azureml_elastic.train.mlflow_parameters import attach_to_client


class TrackingServiceClient:
    """MLflow's class, as far as it is attached to."""

    def __init__(self, held):
        self.held = held
        self.reads = 0
        self.logged = []

    def get_run(self, run_id):
        self.reads += 1
        if self.held is None:
            raise ConnectionError(run_id)
        return SimpleNamespace(data=SimpleNamespace(params=self.held))

    def log_param(self, run_id, key, value, synchronous=True):
        self.logged.append((key, value, synchronous))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=True):
        self.logged.append(([(each.key, each.value) for each in params], list(tags), synchronous))


class Param:
    """MLflow's entity."""

    def __init__(self, key, value):
        self.key, self.value = key, value


@pytest.fixture
def client_of(monkeypatch):
    """Return a function that makes a client for a script in a round, whose run has these parameters."""

    def make(number, held):
        module = ModuleType("client")
        module.TrackingServiceClient = type("TrackingServiceClient", (TrackingServiceClient,), {})
        for name in ("log_param", "log_batch"):
            setattr(module.TrackingServiceClient, name, vars(TrackingServiceClient)[name])
        attach_to_client(module)
        monkeypatch.setenv("AZUREML_ELASTIC_ROUND", str(number))
        return module.TrackingServiceClient(held)

    return make


@pytest.mark.parametrize(("number", "held"), [(1, {"lr": "0.5"}), (2, {}), (2, None)])
def test_values_stay_in_the_first_round_and_where_the_run_has_none(client_of, number, held, caplog):
    client = client_of(number, held)
    client.log_param("run", "lr", 0.1, synchronous=False)
    client.log_batch("run", params=[Param("lr", "0.2")], tags=["t"])
    assert client.logged == [("lr", 0.1, False), ([("lr", "0.2")], ["t"], True)]
    assert not caplog.records


def test_the_first_values_are_logged_again_and_the_others_said_once(client_of, caplog):
    client = client_of(3, {"lr": "0.1", "world": "4", "text": "x" * 250})
    client.log_param("run", "lr", 0.1)
    client.log_param("run", key="world", value=3)
    client.log_batch("run", [], [Param("world", 3), Param("text", "x" * 300), Param("new", 1)], synchronous=False)
    client.log_batch("run", metrics=["m"])
    assert client.logged == [
        ("lr", 0.1, True),
        ("world", "4", True),
        ([("world", "4"), ("text", "x" * 300), ("new", 1)], [], False),
        ([], [], True),
    ]
    assert client.reads == 1
    (said,) = caplog.messages
    assert said.endswith("parameters that differ now: world '4' (now '3').")


def test_another_mistake_than_a_restart_is_still_mlflows_to_refuse(client_of):
    client = client_of(2, {"lr": "0.1"})
    client.log_param("run", "new", 1)
    client.log_param("run", "new", 2)
    assert client.logged == [("new", 1, True), ("new", 2, True)]
