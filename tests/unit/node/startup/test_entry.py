"""What a node says to bad input, before it touches anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.node.__main__ import main


@pytest.fixture
def plan(tmp_path, monkeypatch):
    plan = Plan(
        resources=ElasticResources(max_instance_count=1),
        rendezvous=TableRendezvous(endpoint=str(tmp_path / "t.sqlite")),
        name="run",
    )
    monkeypatch.setenv(variables.PLAN, plan.to_json())
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path / "run"))
    return plan


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["missing.py"], "does not exist"),
        (["bash", "run.sh"], "no Python program"),
        (["torchrun", "train.py"], "torchrun"),
    ],
)
def test_programs_that_cannot_run(plan, capsys, tmp_path, program, said):
    assert main(["--", *program]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t.sqlite").exists()


def test_without_a_plan(monkeypatch, capsys):
    monkeypatch.delenv(variables.PLAN, raising=False)
    assert main(["--", "train.py"]) == 2
    assert variables.PLAN in capsys.readouterr().err


def test_a_plan_of_a_later_release(plan, monkeypatch, capsys):
    monkeypatch.setenv(variables.PLAN, plan.to_json().replace('"version":1', '"version":2'))
    assert main(["--", "train.py"]) == 2
    assert "version 2" in capsys.readouterr().err


def test_a_node_that_needs_nothing_of_azure_does_not_wait_for_its_import():
    modules = "[name for name in sys.modules if name.startswith('azure.')]"
    code = f"import sys, azureml_elastic.node.startup.entry; print({modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
