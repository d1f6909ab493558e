"""``azureml-elastic doctor`` against a workspace on this machine, from outside and from within a job."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.config import ElasticResources, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.testing import LocalWorkspace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what azure-ai-ml does with marshmallow while it is imported
    pytest.importorskip("azure.ai.ml")

RUN = CliRunner()
STEPS = ("open or make it", "insert a row", "read it", "replace this version", "an old version is refused", "delete it")

pytestmark = [
    pytest.mark.filterwarnings("ignore::marshmallow.warnings.RemovedInMarshmallow4Warning"),
    pytest.mark.filterwarnings(r"ignore:datetime\.datetime\.utc:DeprecationWarning:azure\.ai\.ml\."),
    pytest.mark.filterwarnings("ignore:The use of a 'BlobProperties' instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:content_as_bytes is deprecated:DeprecationWarning"),
]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """An open workspace that ``config.json`` names, with the login of its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv(variables.PLAN, raising=False)
    with LocalWorkspace() as opened:
        Path("config.json").write_text(json.dumps(dict(opened.config)))
        yield opened


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_workspace_that_is_well(workspace):
    result = RUN.invoke(app, ["doctor", "--port-range", "29400-29440", "--advertise", "lo"])
    assert result.exit_code == 0, result.output
    output = words(result.output)
    for what in ("resource manager", "identity", "workspace", "storage account", "table service", "torch", "address"):
        assert f"{what} ok " in output
    for step in STEPS:
        assert f"table: {step} ok " in output
    assert "127.0.0.1 of lo" in output
    assert "(29400-29440)" in output
    assert "submit the job with its command replaced by `python -m azureml_elastic.node.diagnostics.doctor`" in output
    assert "eyJ" not in result.output, "no token is shown"


def test_what_is_wrong_is_said_with_what_to_do(workspace):
    result = RUN.invoke(app, ["--workspace-name", "elsewhere", "doctor", "--peer", "127.0.0.1:1"])
    assert result.exit_code == 1
    output = words(result.output)
    assert "workspace fail elsewhere of resource group local" in output
    assert "What to do workspace: Check the names" in output
    assert "peer 127.0.0.1:1: The machine is reachable, but nothing listens" in output


def test_without_a_workspace_the_rest_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for words_ in (["doctor"], ["doctor", "--node"]):
        result = RUN.invoke(app, words_)
        assert result.exit_code == 1
        output = words(result.output)
        assert "workspace fail" in output
        assert "ports ok" in output
    result = RUN.invoke(app, ["doctor", "--endpoint", str(tmp_path / "t.sqlite")])
    assert result.exit_code == 0, result.output
    result = RUN.invoke(app, ["doctor", "--advertise", "10.0.0.0/99"])
    assert result.exit_code == 2
    assert "is not a range of addresses" in result.stderr


def test_a_job_examines_its_node_with_what_it_has_brought_along(workspace):
    from azureml_elastic import ElasticCommandJob

    Path("src").mkdir()
    Path("src", "train.py").write_text("raise SystemExit('never run')\n")
    job = ElasticCommandJob(
        code="src",
        command="python -m azureml_elastic.node.diagnostics.doctor --peer 127.0.0.1:1",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(max_instance_count=1),
        rendezvous=TableRendezvous(port_range=(29400, 29440), table="examined"),
    )
    submitted = workspace.ml_client.jobs.create_or_update(job)
    assert workspace.wait(submitted.name, 120) == "Failed", "a peer that refuses is a fault"
    log = workspace.log(submitted.name)
    for step in STEPS:
        assert f"table: {step}" in log
    assert "ms, examined" in log
    assert "the node's managed identity" in log
    assert "(29400-29440)" in log
    assert [line for line in log.splitlines() if " fail " in line] == [
        next(line for line in log.splitlines() if line.startswith("peer 127.0.0.1:1"))
    ]
