"""Elastic jobs as steps of the user's own pipelines."""

import json
from pathlib import Path

import pytest
from azure.ai.ml import Input, Output, dsl
from azure.ai.ml.entities import CronTrigger, JobSchedule, PipelineJob
from azure.ai.ml.sweep import Choice
from typer.testing import CliRunner

from azureml_elastic import ElasticCommandJob, ElasticResources
from azureml_elastic.cli.app import app
from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.node_server import FORKED

TELL = """
import os, sys
print("this is", sys.argv[1], "of", os.environ["TORCHELASTIC_RUN_ID"])
"""

HAND_ON = """
import os, pathlib, sys
from azureml_elastic import train
source, target = (pathlib.Path(path) for path in sys.argv[1:])
run = train.start()
(target / f"rank_{run.rank}").touch()
if run.rank == 0:
    held = (source / "model").read_text()
    (target / "model").write_text(held + os.environ["TORCHELASTIC_RUN_ID"] + chr(10))
"""


@pytest.fixture(scope="module")
def workspace():
    with LocalWorkspace(pools={"cluster": Pool(nodes=4)}, start=FORKED) as workspace:
        yield workspace


@pytest.fixture(autouse=True)
def program(script):
    script(TELL)


def compiled(title, placement, **variables):
    return ElasticCommandJob(
        code="src",
        command=f"python train.py {title}",
        environment="anything@latest",
        compute="cluster",
        environment_variables=variables,
        resources=ElasticResources(max_instance_count=1, placement=placement),
    ).compile()


def values(inputs):
    """Return inputs of a compiled pipeline as they are passed to one of its nodes."""
    return {name: getattr(value, "_data", value) for name, value in inputs.items()}


def outcome(workspace, *steps):
    """Submit a pipeline with these steps, and return the state and the script's lines of each."""

    @dsl.pipeline(compute="cluster")
    def steps_of_mine():
        for at, step in enumerate(steps):
            node = step.jobs["node_0"](**values(step.inputs)) if isinstance(step, PipelineJob) else step()
            node.name = f"step_{at}"

    pipeline = steps_of_mine()
    pipeline.settings.continue_on_step_failure = True
    client = workspace.ml_client
    name = client.jobs.create_or_update(pipeline).name
    workspace.wait(name)
    children = sorted(client.jobs.list(parent_job_name=name), key=lambda child: child.display_name)
    lines = [
        [line.partition("this is ")[2] for line in workspace.log(child.name).splitlines() if "this is " in line]
        for child in children
    ]
    return name, children, lines


def test_each_elastic_step_is_a_run_of_its_own(workspace):
    _, children, lines = outcome(workspace, compiled("training", "gang"), compiled("evaluation", "gang"))
    assert [child.status for child in children] == ["Completed", "Completed"]
    assert lines == [[f"training of {children[0].name}"], [f"evaluation of {children[1].name}"]]


def test_steps_of_single_nodes_differ_by_their_names_and_never_succeed_without_having_run(workspace):
    train, evaluate = compiled("training", "fan_out"), compiled("evaluation", "fan_out")
    _, children, lines = outcome(workspace, train, evaluate)
    assert sorted(child.status for child in children) == ["Completed", "Failed"]
    assert sorted(map(len, lines)) == [0, 1]
    (failed,) = [child for child in children if child.status == "Failed"]
    assert "AZUREML_ELASTIC_STEP" in workspace.log(failed.name)
    named = compiled("evaluation", "fan_out", AZUREML_ELASTIC_STEP="evaluate")
    name, children, lines = outcome(workspace, train, named)
    assert [child.status for child in children] == ["Completed", "Completed"]
    assert lines == [[f"training of {name}"], [f"evaluation of {name}-evaluate"]]


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
def test_what_any_node_has_written_is_the_output_of_its_step_or_job_each_a_run_of_its_own(
    workspace, script, tmp_path, placement
):
    """The output of a fan_out step is that of its first node's job, and rank 0 is on any node."""
    script(HAND_ON)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "model").write_text("")
    train = ElasticCommandJob(
        code="src",
        command="python train.py ${{inputs.source}} ${{outputs.model}}",
        environment="anything@latest",
        compute="cluster",
        inputs={"source": Input(type="uri_folder")},
        outputs={"model": Output(type="uri_folder")},
        distribution={"process_count_per_instance": 1},
        resources=ElasticResources(min_instance_count=2, max_instance_count=2, placement=placement),
    )

    @dsl.pipeline(compute="cluster")
    def mine(source):
        one = train(source=source)
        two = train(source=one.outputs.model)
        return {"model": two.outputs.model}

    client = workspace.ml_client
    name = client.jobs.create_or_update(mine(Input(type="uri_folder", path=str(tmp_path / "first")))).name
    assert workspace.wait(name) == "Completed"
    client.jobs.download(name, download_path=tmp_path, output_name="model")
    folder = Path(tmp_path, "named-outputs", "model")
    assert {path.name for path in folder.iterdir()} == {"model", "rank_0", "rank_1"}
    runs = (folder / "model").read_text().split()
    steps = sorted(client.jobs.list(parent_job_name=name), key=lambda child: child.display_name)
    assert runs == ([f"{name}-step-{at}" for at in (0, 1)] if placement == "fan_out" else [each.name for each in steps])
    for step in steps:
        client.jobs.download(step.name, download_path=tmp_path / step.name, output_name="model")
    first = tmp_path / steps[0].name / "named-outputs" / "model" / "model"
    assert first.read_text().split() == runs[:1]
    alone = client.jobs.create_or_update(train(source=Input(type="uri_folder", path=str(tmp_path / "first"))))
    assert workspace.wait(alone.name) == "Completed"
    client.jobs.download(alone.name, download_path=tmp_path / "alone", output_name="model")
    own = tmp_path / "alone" / "named-outputs" / "model"
    assert {path.name for path in own.iterdir()} == {"model", "rank_0", "rank_1"}
    assert (own / "model").read_text().split() == [alone.name]


SHOW = """
import os, sys
from azureml_elastic import train
run = train.start()
if run.rank == 0:
    print("this is", *sys.argv[1:], os.environ["OWN"], os.environ.get("SET"), "on", run.world_size)
"""


def test_a_pipeline_whose_steps_and_sweep_have_been_edited_runs_as_it_was_edited(workspace, script):
    script(SHOW)
    job = ElasticCommandJob(
        code="src",
        command="python train.py ${{inputs.lr}}",
        environment="anything@latest",
        inputs={"lr": 0.1},
        environment_variables={"OWN": "own"},
        distribution={"process_count_per_instance": 1},
        resources=ElasticResources(max_instance_count=2, placement="gang"),
    )

    @dsl.pipeline(compute="cluster")
    def mine():
        one = job()
        one.resources.instance_count = 1
        one.environment_variables = {"OWN": "other", "SET": "set"}
        many = job(lr=Choice([0.2])).sweep(primary_metric="loss", goal="minimize", sampling_algorithm="grid")
        many.set_limits(max_total_trials=1)
        many.trial.environment_variables["SET"] = "it's set"

    name = workspace.ml_client.jobs.create_or_update(mine()).name
    assert workspace.wait(name, 120) == "Completed"
    assert sorted(runs(workspace, name)) == ["0.1 other set on 1", "0.2 own it's set on 2"]


def runs(workspace, name):
    """Return the script's lines of a job, and of the jobs below it."""
    below = list(workspace.ml_client.jobs.list(parent_job_name=name))
    if below:
        return [line for each in below for line in runs(workspace, each.name)]
    return [line.partition("this is ")[2] for line in workspace.log(name).splitlines() if "this is " in line]


def test_each_trigger_of_an_elastic_jobs_schedule_trains_as_a_run_of_its_own(workspace):
    job = ElasticCommandJob(
        code="src",
        command="python train.py training",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(max_instance_count=1, placement="fan_out"),
    )
    client = workspace.ml_client
    schedule = JobSchedule(name="weekly", trigger=CronTrigger(expression="0 6 * * 1"), create_job=job)
    client.schedules.begin_create_or_update(schedule).result()
    jobs = [client.schedules.trigger("weekly").job_name for _ in range(2)]
    assert [workspace.wait(job, 120) for job in jobs] == ["Completed", "Completed"]
    lines = [runs(workspace, job) for job in jobs]
    assert [len(of_one) for of_one in lines] == [1, 1]
    assert all(line.startswith("training of ") for (line,) in lines)
    assert lines[0] != lines[1]


def submitted(workspace, text):
    """Submit a file by the command, and return the name of its job, which has completed."""
    Path("job.yml").write_text(text)
    Path("config.json").write_text(json.dumps(dict(workspace.config)))
    shown = CliRunner().invoke(app, ["submit", "job.yml"])
    assert shown.exit_code == 0, shown.output
    name = shown.stdout.strip()
    assert workspace.wait(name, 120) == "Completed"
    return name


SWEEP = """
type: sweep
trial:
  code: src
  command: python train.py ${{search_space.lr}}
  environment: azureml:anything@latest
  elastic: {max_instance_count: 1, placement: gang}
compute: azureml:cluster
sampling_algorithm: grid
search_space: {lr: {type: choice, values: [0.1, 0.2]}}
objective: {goal: minimize, primary_metric: loss}
limits: {max_total_trials: 2, max_concurrent_trials: 2}
"""


def test_the_command_submits_a_sweep_whose_trials_are_runs(workspace):
    name = submitted(workspace, SWEEP)
    assert runs(workspace, name) == [f"{lr} of {name}_{at}" for at, lr in enumerate((0.1, 0.2))]


PIPELINE = """
type: pipeline
settings: {default_compute: azureml:cluster}
inputs: {text: given}
outputs: {made: {type: uri_folder}}
jobs:
  prepare:
    command: echo ${{inputs.text}} > ${{outputs.made}}/text
    environment: azureml:anything@latest
    inputs: {text: "${{parent.inputs.text}}"}
    outputs: {made: {type: uri_folder}}
  apart:
    component: apart.yml
    inputs: {source: "${{parent.jobs.prepare.outputs.made}}"}
    elastic: {min_instance_count: 2, max_instance_count: 2, distribution: {process_count_per_instance: 1}}
  together:
    command: python train.py ${{inputs.source}} ${{outputs.made}}
    code: src
    environment: azureml:anything@latest
    inputs: {source: "${{parent.jobs.apart.outputs.made}}"}
    outputs: {made: "${{parent.outputs.made}}"}
    elastic: {max_instance_count: 1, placement: gang}
"""
COMPONENT = """
type: command
name: apart
inputs: {source: {type: uri_folder}}
outputs: {made: {type: uri_folder}}
command: python train.py ${{inputs.source}} ${{outputs.made}}
code: src
environment: azureml:anything@latest
"""
TAKE = """
import os, pathlib, sys
from azureml_elastic import train
run = train.start()
source, target = (pathlib.Path(path) for path in sys.argv[1:])
if run.rank == 0:
    line = f"{run.world_size} of {os.environ['TORCHELASTIC_RUN_ID']}"
    (target / "text").write_text((source / "text").read_text() + line + chr(10))
"""


def test_the_command_submits_a_file_whose_elastic_steps_hand_on_what_they_write(workspace, script, tmp_path):
    script(TAKE)
    Path("apart.yml").write_text(COMPONENT)
    name = submitted(workspace, PIPELINE)
    client = workspace.ml_client
    client.jobs.download(name, download_path=tmp_path, output_name="made")
    (last,) = [each.name for each in client.jobs.list(parent_job_name=name) if each.display_name == "together"]
    lines = (tmp_path / "named-outputs" / "made" / "text").read_text().splitlines()
    assert lines == ["given", f"2 of {name}-step-apart", f"1 of {last}"]
