"""The starter project: it is written whole or not at all, and works at once."""

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.cli.init import starter_files
from azureml_elastic.local.cluster import LocalCluster
from tests.support.node_server import FORKED, run_script
from tests.support.whole_runs import GATHERING, after_gathering

RUN = CliRunner()
FILES = {"job.yml", "src/train.py", "src/.amlignore", "README.md", "elastic-job.schema.json"}


@pytest.fixture
def project(tmp_path):
    """The starter project."""
    folder = tmp_path / "new" / "project"
    result = RUN.invoke(app, ["init", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def listing(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_written_into_a_new_folder(project):
    assert listing(project).keys() == FILES == starter_files().keys()


def test_the_current_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    result = RUN.invoke(app, ["init"])
    assert result.exit_code == 0
    assert listing(tmp_path).keys() == FILES | {"mine.txt"}
    assert "azureml-elastic local --nodes 1:2 src/train.py" in result.stdout


@pytest.mark.parametrize("taken", ["src/train.py", "elastic-job.schema.json"])
def test_nothing_is_overwritten_and_nothing_half_done(tmp_path, taken):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("mine")
    result = RUN.invoke(app, ["init", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path / taken} already exists; nothing was written" in result.stderr
    assert listing(tmp_path) == {taken: b"mine"}


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path):
    (tmp_path / "src").write_text("a file where a folder should be")
    result = RUN.invoke(app, ["init", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert listing(tmp_path) == {"src": b"a file where a folder should be"}


def test_the_script_trains_alone(project):
    done = run_script([sys.executable, "src/train.py", "--epochs", "8"], cwd=project, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rpartition("accuracy ")[2].strip().rstrip("%"))
    assert accuracy > 90
    assert (project / "outputs" / "model.pt").exists()


def test_the_script_trains_on_local_nodes_and_survives_a_loss(project, monkeypatch):
    from azureml_elastic.local.faults.schedule import parse_schedule

    monkeypatch.chdir(project)
    cluster = LocalCluster(
        (1, 2),
        start=FORKED,
        chaos=parse_schedule("kill=rank0@step:10"),
        run_dir=project / "run",
        audit=True,
        timeout=120.0,
        rendezvous=GATHERING,
    )
    report = cluster.run(["src/train.py", "--epochs", "3", "--step-delay", "0.08"])
    assert report.outcome == "succeeded", report.message
    assert after_gathering(report, 2) == (2, 1)
    assert report.audit is not None
    assert report.audit.exactly_once
    assert (project / "outputs" / "model.pt").exists()
    assert "committed" in RUN.invoke(app, ["checkpoints", "list", "run"]).stdout


def test_the_job_compiles_and_keeps_to_the_schema_beside_it(project):
    try:
        metadata.version("azure-ai-ml")
    except metadata.PackageNotFoundError:
        pytest.skip("needs azure-ai-ml")
    check = (
        "import json, sys, jsonschema, yaml\n"
        "from azureml_elastic import load_elastic_job\n"
        "job = yaml.safe_load(open('job.yml'))\n"
        "jsonschema.validate(job, json.load(open('elastic-job.schema.json')))\n"
        "entity = load_elastic_job('job.yml').compile()\n"
        "print(sorted(entity.jobs))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], check=False, cwd=project, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['node_0', 'node_1', 'node_2', 'node_3']"
