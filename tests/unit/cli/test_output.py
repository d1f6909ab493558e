"""``--json``: for scripts, on stdout or in a file."""

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.ledger.summary import Paths
from tests.support.histories import loss_and_newcomer, write_events

RUN = CliRunner()


def _has_sdk():
    try:
        metadata.version("azure-ai-ml")
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the folder ``run-7`` of a run that has ended without a report."""
    monkeypatch.chdir(tmp_path)
    for name in ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME"):
        monkeypatch.delenv(name, raising=False)
    write_events(Paths.of(tmp_path / "run-7").events, loss_and_newcomer())
    return tmp_path


needs_sdk = pytest.mark.skipif(not _has_sdk(), reason="needs azure-ai-ml")
COMMANDS = [
    (["report", "run-7"], 0, "rounds"),
    (["status", "run-7"], 0, "checkpoint_step"),
    (["simulate", "--hazard", "loss_every=1h", "--work", "5nh", "--nodes", "1:2"], 0, "candidates"),
    (["doctor"], 1, "findings"),
    pytest.param(["validate", "job.yml"], 2, "errors", marks=needs_sdk),
]


@pytest.mark.filterwarnings("ignore")  # the import of azure-ai-ml uses deprecated features of marshmallow
@pytest.mark.parametrize(("words", "code", "key"), COMMANDS)
def test_json_is_all_that_stdout_has_unless_a_file_is_given(folder, words, code, key):
    shown = RUN.invoke(app, [*words, "--json"])
    assert shown.exit_code == code, shown.output
    document = json.loads(shown.stdout)
    assert key in document
    for first in (["--json", "-"], ["--json"]):
        same = json.loads(RUN.invoke(app, [words[0], *first, *words[1:]]).stdout)
        assert same.keys() == document.keys()
    both = RUN.invoke(app, [*words, "--json", "written.json"])
    assert both.exit_code == code
    assert json.loads((folder / "written.json").read_text()).keys() == document.keys()
    assert "Wrote written.json" in both.stdout + both.stderr
    refused = RUN.invoke(app, [*words, "--json", "nowhere/written.json"])
    assert refused.exit_code == 2
    assert "nowhere/written.json cannot be written" in refused.stderr


def test_a_run_has_one_name(folder):
    names = {
        json.loads(RUN.invoke(app, [command, "run-7", "--json"]).stdout)["name"] for command in ("report", "status")
    }
    assert names == {"run-7"}
    assert RUN.invoke(app, ["report", "run-7", "--html", "page.html"]).exit_code == 0
    assert "<h1>run-7</h1>" in (folder / "page.html").read_text()


def test_the_state_of_a_run_as_json(folder):
    document = json.loads(RUN.invoke(app, ["status", "run-7", "--json"]).stdout)
    assert (document["status"], document["round"], document["world_size"]) == ("succeeded", 3, 3)
    assert {node["node"]: node["step"] for node in document["nodes"]}["node-0"] == 12
    refused = RUN.invoke(app, ["status", "run-7", "--watch", "--json"])
    assert refused.exit_code == 2
    assert "--json shows the state once" in refused.stderr


def test_a_file_after_json_is_not_taken_from_other_options(folder):
    written = RUN.invoke(app, ["report", "run-7", "--json", "--html", "page.html"])
    assert written.exit_code == 0
    assert json.loads(written.stdout)["name"] == "run-7"
    assert (folder / "page.html").is_file()


@needs_sdk
@pytest.mark.filterwarnings("ignore")
def test_what_validate_says(folder):
    (folder / "train.py").write_text("print('trains')\n")
    job = "command: python train.py\ncode: .\nenvironment: azureml:e:1\ncompute: azureml:c\nelastic:\n  {}: 2\n"
    (folder / "job.yml").write_text(job.format("max_instance_count"))
    assert "job.yml can be submitted." in RUN.invoke(app, ["validate", "job.yml"]).stdout
    right = json.loads(RUN.invoke(app, ["validate", "job.yml", "--json"]).stdout)
    assert right == {"result": "Succeeded", "errors": []}
    (folder / "job.yml").write_text(job.format("max_instance_cuont"))
    wrong = RUN.invoke(app, ["validate", "job.yml", "--json"])
    assert wrong.exit_code
    (error,) = json.loads(wrong.stdout)["errors"]
    assert "max_instance_cuont" in error["message"]
    assert error["message"] in wrong.stderr
