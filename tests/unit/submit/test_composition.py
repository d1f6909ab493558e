"""Elastic jobs in what azure-ai-ml composes of jobs: pipelines, sweeps and schedules."""

import pytest
from azure.ai.ml import (
    Input,
    MpiDistribution,
    PyTorchDistribution,
    RayDistribution,
    TensorFlowDistribution,
    dsl,
    load_component,
)
from azure.ai.ml.entities import CommandComponent, CronTrigger, JobSchedule, PipelineJob
from azure.ai.ml.sweep import Choice
from pydantic import ValidationError

from azureml_elastic.config import ElasticDistribution, ElasticResources
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob
from tests.unit.submit.test_submission import make

SEARCH = {"primary_metric": "loss", "goal": "Minimize", "sampling_algorithm": "random", "max_total_trials": 4}


@pytest.fixture(autouse=True)
def data(folder):
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("data")


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"type": "pytorch", "process_count_per_instance": 4}, {"process_count_per_instance": 4}),
        ({"type": "PyTorch"}, {"process_count_per_instance": 1}),
        ({"type": "pytorch", "process_count_per_instance": 2, "max_restarts": 7}, None),
        (PyTorchDistribution(process_count_per_instance=3), {"process_count_per_instance": 3}),
        (PyTorchDistribution(), {"process_count_per_instance": 1}),
        (RayDistribution(port=6379), {"framework": "ray"}),
        ({"type": "ray", "port": 6379}, {"framework": "ray"}),
        ({"type": "elastic", "max_restarts": 7}, {"max_restarts": 7}),
        ({"max_restarts": 7}, {"max_restarts": 7}),
    ],
)
def test_distributions_of_azure_ai_ml_are_translated(given, fields):
    wanted = ElasticDistribution(**(fields or {"process_count_per_instance": 2, "max_restarts": 7}))
    assert make(distribution=given).distribution == wanted
    assert make().with_options(distribution=given).distribution == wanted


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (MpiDistribution(process_count_per_instance=4), 'MpiDistribution cannot be carried.*framework="horovod"'),
        ({"type": "mpi"}, "'mpi'} cannot be carried.*framework=\"horovod\""),
        (TensorFlowDistribution(worker_count=2), "TensorFlowDistribution cannot be carried"),
        ({"type": "ray", "address": "a"}, "address='a'.*cannot be carried"),
        ("pytorch", "of the type str; an elastic job takes an ElasticDistribution"),
    ],
)
def test_other_distributions_are_refused_with_what_to_write(given, part):
    with pytest.raises(ValidationError, match=part):
        make(distribution=given)


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
def test_a_pipeline_job_says_what_to_give_it(placement):
    job = make(placement, code=None, delivery="environment")
    with pytest.raises(SubmitError, match=r"with_options\(resources=\{'placement': 'gang'\}\)\.compile\(\)"):
        PipelineJob(jobs={"t": job})
    step = job.with_options(resources={"placement": "gang"}).compile()
    assert PipelineJob(jobs={"t": step}, compute="gpu").jobs["t"].resources.instance_count == 3


@pytest.mark.parametrize(("placement", "most"), [("gang", None), ("service", 3)])
def test_the_trials_of_a_sweep_are_elastic_jobs_with_their_resources(client, sent, placement, most):
    job = make(placement, services=None).with_options(resources={"shm_size": "8g"})
    client.jobs.create_or_update(job.sweep(search_space={"lr": Choice([0.1, 0.2])}, **SEARCH))
    (body,) = [each["properties"] for each in sent()]
    trial = body["trial"]
    assert (body["jobType"], trial["resources"]["shmSize"]) == ("Sweep", "8g")
    assert trial["resources"]["instanceCount"] == (3 if most is None else 2)
    assert trial["resources"].get("maxInstanceCount") == most
    assert trial["command"].endswith("${{inputs.epochs}} ${{search_space.lr}}")
    assert "AZUREML_ELASTIC_PLAN" in trial["environmentVariables"]
    assert body["inputs"].keys() == {"data", "table", "epochs", "azureml_elastic_runtime"}
    assert body["limits"]["trialTimeout"] == "PT5M"
    assert job.inputs["lr"].default == 0.5


def test_a_sweep_is_a_step_of_the_pipeline_that_makes_it(folder):
    job = make("gang", services=None)

    @dsl.pipeline(compute="gpu")
    def search():
        trials = job.sweep(search_space={"lr": Choice([0.1, 0.2])}, **SEARCH)
        trials.name = "trials"

    steps = search().jobs
    assert list(steps) == ["trials"]
    assert steps["trials"].resources.instance_count == 3


@pytest.mark.parametrize(
    ("fields", "space", "part"),
    [
        ({"placement": "fan_out", "services": None}, {}, "placement 'fan_out'.*'gang'"),
        ({"placement": "gang", "services": None}, {"rate": Choice([1])}, "'rate', which is no input"),
        ({"placement": "gang"}, {"lr": Choice([1])}, "Leave services out"),
    ],
)
def test_what_cannot_be_swept_says_what_to_write(folder, fields, space, part):
    with pytest.raises(SubmitError, match=part):
        make(**fields).sweep(search_space=space, **SEARCH)


def test_a_search_expression_outside_a_sweep_says_where_it_belongs(folder):
    with pytest.raises(SubmitError, match=r"'lr' is a search expression.*job\.sweep\("):
        make("gang", inputs={"lr": Choice([1, 2])}, command="python train.py ${{inputs.lr}}").compile()


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
def test_no_run_is_written_into_what_a_schedule_submits_again(folder, placement):
    job = make(placement)
    submitted = job if placement == "fan_out" else PipelineJob(jobs={"train": job.compile()}, compute="gpu")
    schedule = JobSchedule(name="weekly", trigger=CronTrigger(expression="0 2 * * 1"), create_job=submitted)
    text = str(schedule._to_rest_object().as_dict())
    assert "AZUREML_ELASTIC_PLAN" in text
    assert "AZUREML_ELASTIC_RUN_ID" not in text
    assert isinstance(job, ElasticCommandJob)
    assert '"run_id":null' in text.replace("\\", "")


COMPONENT = """
type: command
name: trainer
version: 1
code: ./program
command: python main.py --lr ${{inputs.lr}} $[[--tag ${{inputs.tag}} --depth ${{inputs.depth}}]] --to ${{outputs.model}}
environment: azureml:theirs@latest
environment_variables: {A: "1"}
inputs:
  lr: {type: number, default: 0.1}
  tag: {type: string, optional: true}
  depth: {type: integer, default: 2}
outputs:
  model: {type: uri_folder}
"""


@pytest.fixture
def component(tmp_path):
    """A component in a folder that is not the current one."""
    folder = tmp_path / "elsewhere"
    (folder / "program").mkdir(parents=True)
    (folder / "program" / "main.py").write_text("print('training')\n")
    (folder / "trainer.yml").write_text(COMPONENT)
    return load_component(folder / "trainer.yml")


def converted(node, placement="gang", **fields):
    return ElasticCommandJob.from_command(
        node, compute="gpu", resources=ElasticResources(max_instance_count=2, placement=placement), **fields
    )


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
@pytest.mark.parametrize(("given", "part"), [({}, ""), ({"tag": "a", "lr": 3.5}, "--tag ${{inputs.tag}} --depth ")])
def test_a_loaded_component_is_carried_with_all_that_it_has(component, tmp_path, placement, given, part):
    job = converted(component(**given), placement)
    assert job.inputs == {"lr": 0.1, "depth": 2, **given}
    assert (job.code, job.environment) == (str(tmp_path / "elsewhere" / "program"), "theirs@latest")
    assert dict(job.environment_variables).items() >= {"A": "1"}.items()
    entity = job.compile()
    node = entity.jobs["node_0"] if placement == "fan_out" else entity
    text = node.component.command
    assert ("$[[" in text, part in text, "--tag" in text) == (False, True, bool(given))
    assert text.endswith("--to ${{outputs.model}}")
    assert {"model", "azureml_elastic_checkpoints"} <= node.component.outputs.keys()
    assert ("tag" in entity.inputs) == bool(given)


def test_what_is_given_beside_a_component_goes_before_what_it_has(component):
    job = converted(component(), environment="mine@latest", environment_variables={"A": "2"})
    assert (job.environment, job.environment_variables) == ("mine@latest", {"A": "2"})


def test_a_registered_component_is_carried_with_its_assets():
    root = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
    registered = CommandComponent(
        name="trainer",
        version="3",
        command="python main.py ${{inputs.lr}}",
        code=f"azureml:{root}/codes/c/versions/1",
        environment=f"azureml:{root}/environments/e/versions/1",
        inputs={"lr": Input(type="number", default=0.1)},
    )
    job = converted(registered())
    assert job.code.removeprefix("azureml:") == f"{root}/codes/c/versions/1"
    assert job.environment.removeprefix("azureml:") == f"{root}/environments/e/versions/1"
    assert job.inputs == {"lr": 0.1}
    assert job.compile().component.code == job.code


@pytest.mark.parametrize(
    ("inputs", "ending"),
    [
        ({"tag": "a"}, "train.py --tag ${{inputs.tag}}"),
        ({"tag": ""}, "train.py --tag ${{inputs.tag}}"),
        ({"tag": Input(type="string", optional=True, default="a")}, "train.py --tag ${{inputs.tag}}"),
        ({"tag": Input(type="string", optional=True)}, "train.py"),
        ({"tag": {"type": "uri_file", "optional": True}}, "train.py"),
        ({}, "train.py"),
    ],
)
def test_optional_parts_of_a_command(inputs, ending):
    job = make("gang", command="python train.py $[[--tag ${{inputs.tag}}]]", inputs=inputs)
    entity = job.compile()
    assert entity.component.command.rstrip().endswith(ending)
    assert ("tag" in entity.inputs) == ending.endswith("}}")
    assert job.command.endswith("]]")
