"""Pipelines as YAML files, whose steps have ``elastic:`` blocks."""

import copy
import re

import pytest
import yaml
from azure.ai.ml import load_job
from typer.testing import CliRunner

from azureml_elastic.cli.app import app
from azureml_elastic.config import Plan
from azureml_elastic.environment.names import PLAN
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit import load_elastic_job, load_elastic_pipeline
from azureml_elastic.submit.yaml.compiled_file import compile_file

COMPONENT = """
$schema: https://azuremlschemas.azureedge.net/latest/commandComponent.schema.json
type: command
name: train
version: 1
inputs:
  data: {type: uri_folder}
  lr: {type: number, default: 0.1}
  note: {type: string, optional: true}
outputs:
  model: {type: uri_folder}
code: ../src
environment: azureml:env:1
command: >-
  torchrun train.py --data ${{inputs.data}} --lr ${{inputs.lr}} --out ${{outputs.model}} $[[--note ${{inputs.note}}]]
"""
PIPELINE = """
type: pipeline
display_name: all of it
experiment_name: tried
inputs:
  raw: {type: uri_folder, path: ../raw}
  lr: 0.5
outputs:
  model: {type: uri_folder, mode: upload}
settings: {default_compute: azureml:gpu}
jobs:
  prepare:
    type: command
    code: src
    command: python train.py ${{inputs.raw}} ${{outputs.data}}
    environment: azureml:env:1
    inputs: {raw: "${{parent.inputs.raw}}", text: src/train.py}
    outputs: {data: {type: uri_folder}}
  first:
    component: components/train.yml
    inputs: {data: "${{parent.jobs.prepare.outputs.data}}", lr: "${{parent.inputs.lr}}"}
    outputs: {model: "${{parent.outputs.model}}"}
    compute: azureml:other
    environment_variables: {A: b}
    elastic: {min_instance_count: 2, max_instance_count: 3}
  second:
    type: command
    command: python train.py ${{inputs.data}} ${{inputs.n}}
    code: src
    environment: azureml:env:1
    inputs:
      data: {type: uri_folder, path: "${{parent.jobs.first.outputs.model}}", mode: ro_mount}
      n: 3
    resources: {instance_count: 2}
    elastic: {placement: gang}
  report:
    component: file:components/train.yml
    inputs: {data: "${{parent.jobs.first.outputs.model}}"}
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("raw", "jobs/src", "jobs/components"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "raw" / "x").write_text("")
    (tmp_path / "jobs" / "src" / "train.py").write_text("print()\n")
    (tmp_path / "jobs" / "components" / "train.yml").write_text(COMPONENT)
    return tmp_path / "jobs"


@pytest.fixture
def written(folder):
    """Write the pipeline with changes, each a dotted path and a value, of which ``None`` removes the field."""

    def write(changes=()):
        document = yaml.safe_load(PIPELINE)
        for path, value in dict(changes).items():
            *holders, name = path.split(".")
            target = document
            for holder in holders:
                target = target[holder]
            target[name] = value
            if value is None:
                del target[name]
        (folder / "pipeline.yml").write_text(yaml.safe_dump(document, sort_keys=False))
        return folder / "pipeline.yml"

    return write


def submitted(client, sent, job):
    client.jobs.create_or_update(job)
    return sent()[-1]["properties"]


def test_elastic_steps_are_nodes_that_others_find_by_the_names_of_the_steps(client, sent, components, written):
    body = submitted(client, sent, load_elastic_pipeline(written(), ["jobs.first.elastic.checkpoint.keep=5"]))
    steps = body["jobs"]
    assert list(steps) == ["prepare", "first", "first_node_1", "first_node_2", "second", "report"]
    assert {step["type"] for step in steps.values()} == {"command"}
    assert body["settings"]["continue_on_step_failure"] is True
    for name in ("first", "first_node_1", "first_node_2"):
        node = steps[name]
        assert node["computeId"].endswith("/other")
        assert node["resources"]["instance_count"] == 1
        assert node["inputs"]["data"]["value"] == "${{parent.jobs.prepare.outputs.data}}"
        assert node["inputs"]["lr"]["value"] == "${{parent.inputs.lr}}"
        assert node["environment_variables"]["A"] == "b"
        plan = Plan.from_json(node["environment_variables"]["AZUREML_ELASTIC_PLAN"])
        assert (plan.resources.min_instance_count, plan.checkpoint.keep) == (2, 5)
        own = node["environment_variables"]
        assert plan.run_id_of(own, job=name, root="whole") == "whole-step-first"
    assert steps["first"]["outputs"]["model"]["value"] == "${{parent.outputs.model}}"
    assert "value" not in steps["first_node_1"]["outputs"]["model"]
    second = steps["second"]
    assert second["resources"]["instance_count"] == 2
    assert second["inputs"]["data"]["value"] == "${{parent.jobs.first.outputs.model}}"
    assert second["inputs"]["n"]["value"] == "3"
    assert Plan.from_json(second["environment_variables"]["AZUREML_ELASTIC_PLAN"]).resources.max_instance_count == 2
    commands = {each["command"] for each in components()}
    assert any("-- python train.py --data ${{inputs.data}} --lr ${{inputs.lr}} --out" in each for each in commands)
    assert not [each for each in commands if "$[[" in each and "azureml_elastic_runtime" in each]


@pytest.mark.parametrize("target", ["compiled.yml", "../elsewhere/deep/compiled.yml"])
def test_the_compiled_file_arrives_as_the_pipeline_itself(
    client, sent, workspace, folder, written, target, monkeypatch
):
    direct = submitted(client, sent, load_elastic_pipeline(written()))
    output = folder / target
    made = compile_file(written(), output)
    assert made.runtime == output.absolute().parent / "azureml_elastic_runtime.pyz"
    assert output.read_text().startswith("# Compiled by azureml-elastic from pipeline.yml")
    monkeypatch.chdir("/")
    read = submitted(client, sent, load_job(output))
    assert comparable(read) == comparable(direct)
    assert "elastic:" not in output.read_text()
    assert yaml.safe_load(output.read_text())["jobs"]["prepare"]["inputs"]["text"] == "src/train.py"


def comparable(body):
    """Return a body without what says how the SDK has come by it: the source, names of uploads, Git's commit."""
    document = copy.deepcopy({**body, "properties": None})
    for name, step in document["jobs"].items():
        for key in ("_source", "componentId"):
            step.pop(key, None)
        if step.get("name") == name:
            del step["name"]
    return document


BLOCK = {"max_instance_count": 4}
POOL = {"compute": "spot", "max_instance_count": 3}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"elastic": BLOCK}, r"elastic belongs in a step, as jobs\.prepare\.elastic"),
        ({"jobs.first.elastic": None, "jobs.second.elastic": None}, r"no step has an elastic: block, as jobs\.prepare"),
        ({"jobs.first.elastic": {"most": 2}}, r"jobs\.first\.elastic\.most is no field"),
        ({"jobs.second.elastic": {"shm_size": "1g"}}, r"jobs\.second\.elastic\.shm_size .*outside the block"),
        ({"jobs.second.elastic": {}, "jobs.second.resources": None}, r"yml: jobs\.second: nothing says how many"),
        ({"jobs.second.environment_variables": {"B": None}}, r"yml: jobs\.second\.environment_variables\.B is empty"),
        ({"jobs.second.environment_variables": {PLAN: "x"}}, rf"yml: jobs\.second: The .* {PLAN} is set by"),
        ({"jobs.second.elastic.min_instance_count": 3}, r"yml: jobs\.second\.elastic\.min_instance_count: 3 is above"),
        ({"jobs.second.command": "echo"}, r"yml: jobs\.second\.command: The command 'echo' starts no"),
        ({"jobs.second.environment": None}, r"Give jobs\.second\.environment: <name>@latest\.$"),
        ({"jobs.first.elastic.pools": [POOL]}, r"yml: jobs\.first\.compute and jobs\.first\.elastic\.pools both"),
        ({"jobs.first.component": "azureml:train:1"}, r"jobs\.first\.component is the registered component"),
        ({"jobs.first.type": "parallel"}, r"jobs\.first\.type is 'parallel'"),
        ({"jobs.first_node_1": {"component": "components/train.yml"}}, "jobs.first_node_1 has the name of a node"),
        ({"jobs": []}, "jobs is no block"),
        ({"jobs.second.code": "nowhere"}, r"yml: jobs\.second\.code: Can't find .*nowhere\.$"),
        ({"jobs.prepare.computer": "x"}, r"yml: jobs\.prepare\.computer is no field .*; did you mean compute\?$"),
        ({"jobs.prepare.identity": {"type": "x"}}, r"yml: jobs\.prepare\.identity\.type: 'x' is none of 'managed'.*"),
    ],
)
def test_a_file_that_cannot_be_meant_says_why_in_terms_of_the_file(written, changes, part):
    path = written(changes)
    with pytest.raises((SubmitError, CommandError), match=part) as caught:
        load_elastic_pipeline(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_each_kind_of_file_names_the_function_that_loads_it(written):
    with pytest.raises(SubmitError, match=r"load_elastic_pipeline\(\).*workspace start --pool"):
        load_elastic_job(written())
    with pytest.raises(SubmitError, match=r"load_elastic_job\(\)"):
        load_elastic_pipeline(written({"type": "command"}))


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (
            "pipeline",
            "a pipeline, each of whose elastic steps is a run of its own.* --set jobs.NAME.elastic.resume_from=r.",
        ),
        ("sweep", "a sweep, each of whose trials is a run of its own.* --set trial.elastic.resume_from=r."),
    ],
)
def test_a_run_is_continued_by_the_file_of_one_job_alone(written, kind, part):
    path = written({"type": kind})
    shown = CliRunner().invoke(app, ["submit", str(path), "--resume-from", "r"], env={"COLUMNS": "1000"})
    assert shown.exit_code == 2
    assert re.search(f"--resume-from continues the run of one job, and .* is {part}", shown.output)
    shown = CliRunner().invoke(app, ["submit", str(path), "--local"], env={"COLUMNS": "1000"})
    assert shown.exit_code == 2
    assert f"workspace start --pool CLUSTER=4 -- azureml-elastic submit {path}" in shown.output


def test_a_path_that_nobody_knows_is_not_left_behind(written, folder):
    path = written({"jobs.prepare.resources": {"docker_args": "./src/train.py"}})
    with pytest.raises(SubmitError, match=r"jobs\.prepare\.resources\.docker_args is './src/train\.py'"):
        compile_file(path, folder.parent / "compiled.yml")
