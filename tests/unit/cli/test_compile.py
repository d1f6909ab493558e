"""``azureml-elastic compile`` and ``schema`` as a user meets them: files, messages, exit codes."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from tests.support.node_server import run_script

JOB = """
type: command
code: src
command: torchrun --nproc_per_node 2 train.py --data ${{inputs.data}}
environment: azureml:env:1
compute: azureml:gpu
inputs:
  data: {type: uri_folder, path: ../data}
  fixed: {type: uri_folder, path: FIXED}
environment_variables: {KEY: hunter2-hunter2}
queue_settings: {priority: high}
elastic:
  max_instance_count: 4
"""
try:
    metadata.version("azure-ai-ml")
except metadata.PackageNotFoundError:
    pytest.skip("needs azure-ai-ml", allow_module_level=True)


@pytest.fixture
def project(tmp_path):
    """A job file in a folder of its own, with paths to somewhere else."""
    (tmp_path / "jobs" / "src").mkdir(parents=True)
    (tmp_path / "jobs" / "src" / "train.py").write_text("print('never run')\n")
    for name in ("data", "fixed"):
        (tmp_path / name).mkdir()
    (tmp_path / "jobs" / "job.yml").write_text(JOB.replace("FIXED", str(tmp_path / "fixed")))
    return tmp_path


@pytest.fixture
def run(project):
    """Run the command in a process of its own, as azure-ai-ml changes what is global."""

    def call(*arguments):
        return run_script(
            [sys.executable, script, "compile", *arguments],
            imports="submission",
            cwd=project,
            env={**os.environ, "XDG_CACHE_HOME": str(project / "cache")},
            timeout=120,
        )

    script = project / "cli.py"
    script.write_text("from azureml_elastic.cli import main\nmain()\n")
    return call


def values(text, key):
    """Return what stands behind a key, wherever it does."""
    return re.findall(rf"^ *{key}: (.*)$", text, re.MULTILINE)


def test_a_file_beside_which_the_library_lies(run, project):
    done = run("jobs/job.yml", "-o", "compiled/out.yml", "--set", "elastic.max_instance_count=2", "--set", "tags.a=b")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "Wrote compiled/out.yml. Submit it with: az ml job create -f compiled/out.yml",
        "Wrote compiled/azureml_elastic_runtime.pyz, which goes to the nodes: keep both together.",
    ]
    text = (project / "compiled" / "out.yml").read_text()
    assert text.startswith("# Compiled by azureml-elastic from job.yml: change that file, and compile it again.\n")
    assert values(text, "code") == ["../jobs/src"]
    assert values(text, "path")[:3] == ["../data", str(project / "fixed"), "./azureml_elastic_runtime.pyz"]
    assert len(re.findall(r"^  node_\d:", text, re.MULTILINE)) == 2
    assert (project / "compiled" / "azureml_elastic_runtime.pyz").exists()
    assert "elastic:" not in text
    again = run("jobs/job.yml", "-o", "compiled/out.yml", "--set", "elastic.max_instance_count=2", "--set", "tags.a=b")
    assert again.returncode == 0
    assert "Kept, unchanged, compiled/azureml_elastic_runtime.pyz" in again.stderr
    assert (project / "compiled" / "out.yml").read_text() == text
    assert sorted(path.name for path in (project / "compiled").iterdir()) == ["azureml_elastic_runtime.pyz", "out.yml"]


def test_without_a_file_the_text_is_printed_with_whole_paths(run, project):
    done = run("jobs/job.yml")
    assert (done.returncode, done.stderr) == (0, "")
    assert values(done.stdout, "code") == [str(project / "jobs" / "src")]
    assert values(done.stdout, "path")[0] == str(project / "data")
    assert len(re.findall(r"^  node_\d:", done.stdout, re.MULTILINE)) == 4


def test_an_environment_that_has_the_library_gets_none_beside_the_file(run, project):
    done = run("jobs/job.yml", "-o", "compiled/out.yml", "--set", "elastic.delivery=environment")
    assert done.returncode == 0
    assert [path.name for path in (project / "compiled").iterdir()] == ["out.yml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yml"], "nowhere.yml cannot be read (No such file or directory)"),
        (["jobs/job.yml", "-o", "jobs/job.yml"], "jobs/job.yml is the job file itself"),
        (["jobs/job.yml", "-o", "jobs/src/train.py"], "was not compiled by azureml-elastic"),
        (["jobs/job.yml", "--set", "elastic.distribution.max_restart=3"], "did you mean max_restarts?"),
        (["jobs/job.yml", "--set", "elastic"], "--set 'elastic' sets nothing"),
        (["jobs/job.yml", "--set", "command=python other.py"], "jobs/job.yml: The command starts 'other.py'"),
        (["jobs/job.yml", "--set", "identity={type: x}"], "jobs/job.yml: identity.type: 'x' is none of"),
    ],
)
def test_what_is_wrong_is_said_in_one_paragraph(run, project, arguments, said):
    before = {path: path.read_bytes() for path in (project / "jobs").rglob("*") if path.is_file()}
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("azureml-elastic: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr
    assert {path: path.read_bytes() for path in (project / "jobs").rglob("*") if path.is_file()} == before


def test_a_missing_azure_ai_ml_is_explained(project):
    hide = (
        "import sys; sys.modules['azure.ai.ml'] = None\n"
        "from azureml_elastic.cli import main; sys.argv = ['azureml-elastic', 'compile', 'jobs/job.yml']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide], check=False, capture_output=True, text=True, cwd=project, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'azureml-elastic[submit]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_schema_is_printed():
    done = CliRunner().invoke(app, ["schema"])
    assert done.exit_code == 0
    assert "max_instance_count" in json.loads(done.stdout)["properties"]["elastic"]["properties"]
