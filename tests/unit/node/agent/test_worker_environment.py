"""What workers inherit from the agent's environment."""

from __future__ import annotations

import pytest

from azureml_elastic.config import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.forks.import_variables import is_read_late
from azureml_elastic.node.agent.worker_group import withheld_variables, worker_environments
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.opening import connection_string_variable

DEFAULT = "AZURE_STORAGE_CONNECTION_STRING"


@pytest.mark.parametrize(
    ("variable", "checkpoints", "withheld"),
    [
        (None, "abfs://c@a.dfs.core.windows.net/run", set()),
        (None, "/mnt/run", set()),
        (DEFAULT, None, {DEFAULT}),
        (DEFAULT, "/mnt/run", {DEFAULT}),
        (DEFAULT, "s3://bucket/run", {DEFAULT}),
        (DEFAULT, "abfs://c@a.dfs.core.windows.net/run", set()),
        (DEFAULT, "az://c/run", set()),
        ("TABLE", "abfss://c@a.dfs.core.windows.net/run", {"TABLE"}),
    ],
)
def test_the_variable_that_opened_the_table_is_withheld_unless_it_opens_the_checkpoints(
    variable, checkpoints, withheld
):
    assert withheld_variables(variable, checkpoints) == withheld


def test_only_a_connection_string_is_a_secret_of_the_table(tmp_path, azurite):
    rendezvous = TableRendezvous(endpoint=str(tmp_path / "t.sqlite"))
    table = open_table(rendezvous, "run", NodeEnvironment.read({DEFAULT: "unused"}))
    assert connection_string_variable(table, rendezvous) is None
    table.close()
    rendezvous = TableRendezvous(endpoint=azurite.endpoint, connection_string_variable="TABLE")
    table = open_table(rendezvous, "run", NodeEnvironment.read({"TABLE": azurite.connection_string}))
    assert connection_string_variable(table, rendezvous) == "TABLE"
    table.close()


def test_a_workers_own_variables_may_change_after_the_imports():
    """Otherwise no worker is forked of a program whose imports read the whole environment."""
    members = (Member("a", "x", host="10.0.0.4", store_port=29400), Member("b", "y", host="10.0.0.5", slots=2))
    environments = worker_environments(Assignment(Round(state="sealed", members=members), 1, None), "run", 3)
    assert [name for name in environments[0] if not is_read_late(name)] == []
    assert environments[1]["AZUREML_ELASTIC_WORKER"] == "2 3 10.0.0.4 29400"
