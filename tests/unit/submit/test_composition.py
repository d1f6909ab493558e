"""Elastic jobs in what azure-ai-ml composes of jobs: pipelines, sweeps and schedules."""

import json
from datetime import timedelta

import pytest
import yaml
from azure.ai.ml import (
    Input,
    MpiDistribution,
    PyTorchDistribution,
    RayDistribution,
    TensorFlowDistribution,
    command,
    dsl,
    load_component,
    load_job,
)
from azure.ai.ml.entities import CommandComponent, CronTrigger, JobSchedule, PipelineJob
from azure.ai.ml.exceptions import ValidationException
from azure.ai.ml.sweep import BanditPolicy, Choice, Uniform
from pydantic import ValidationError

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob, load_elastic_job, load_elastic_sweep
from tests.unit.submit.test_submission import make

SEARCH = {"primary_metric": "loss", "goal": "Minimize", "sampling_algorithm": "random", "max_total_trials": 4}


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
        (MpiDistribution(process_count_per_instance=4), "'mpi' cannot be carried.*framework=\"horovod\""),
        ({"type": "mpi"}, "'mpi' cannot be carried.*framework=\"horovod\""),
        (TensorFlowDistribution(worker_count=2), "'tensorflow' cannot be carried.*plain command job"),
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
    job = make("gang", services=None, identity=None)

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


SWEEP_FILE = """
type: sweep
trial:
  code: ../src
  command: torchrun --nproc_per_node 2 train.py --lr ${{search_space.lr}} --data ${{inputs.data}} ${{inputs.depth}}
  environment: azureml:theirs:1
  environment_variables: {A: "1"}
  resources: {shm_size: 8g, instance_type: big}
  elastic: {min_instance_count: 2, max_instance_count: 3, placement: gang, checkpoint: {every: 600}}
inputs:
  depth: 3
  data: {type: uri_folder, path: ../data}
compute: azureml:gpu
sampling_algorithm: {type: random, seed: 7}
search_space:
  lr: {type: uniform, min_value: 0.01, max_value: 0.1}
objective: {goal: minimize, primary_metric: loss}
early_termination: {type: bandit, slack_factor: 0.1, evaluation_interval: 2}
limits: {max_total_trials: 4, max_concurrent_trials: 2, timeout: 7200, trial_timeout: 600}
experiment_name: searched
"""


@pytest.fixture
def sweep_file(folder):
    """Write a sweep's file, changed as given, and return its path."""

    def written(**changes):
        document = yaml.safe_load(SWEEP_FILE)
        for path, value in changes.items():
            *holders, name = path.split("__")
            target = document
            for holder in holders:
                target = target[holder]
            target.update({name: value} if value is not None else {})
            if value is None:
                target.pop(name)
        (folder / "jobs").mkdir(exist_ok=True)
        (folder / "jobs" / "sweep.yml").write_text(yaml.safe_dump(document))
        return folder / "jobs" / "sweep.yml"

    return written


def same_sweep(body):
    """Return the parts of a submitted sweep that a sweep of plain command jobs has as well."""
    trial = {name: body["trial"][name] for name in ("codeId", "environmentId")}
    names = ("searchSpace", "samplingAlgorithm", "objective", "limits", "computeId")
    policy = {name: value for name, value in body["earlyTermination"].items() if value}
    inputs = {name: body["inputs"][name] for name in ("depth", "data")}
    return {"trial": trial, "inputs": inputs, "policy": policy} | {name: body.get(name) for name in names}


def test_a_sweep_of_a_file_has_elastic_trials_and_searches_as_written(client, sent, sweep_file):
    path = sweep_file()
    client.jobs.create_or_update(load_elastic_sweep(path, ["trial.elastic.checkpoint.keep=5"]))
    document = yaml.safe_load(path.read_text())
    del document["trial"]["elastic"]
    (path.parent / "plain.yml").write_text(yaml.safe_dump(document))
    client.jobs.create_or_update(load_job(path.parent / "plain.yml"))
    (body, plain) = [each["properties"] for each in sent()]
    assert same_sweep(body) == same_sweep(plain)
    assert (body["jobType"], body["experimentName"]) == ("Sweep", "searched")
    trial = body["trial"]
    assert (trial["resources"]["instanceCount"], trial["resources"]["shmSize"]) == (3, "8g")
    assert trial["resources"]["instanceType"] == "big"
    assert body["resources"] == trial["resources"]
    assert trial["environmentVariables"]["A"] == "1"
    assert "-- python train.py --lr ${{search_space.lr}} --data ${{inputs.data}}" in trial["command"]
    plan = Plan.from_json(trial["environmentVariables"]["AZUREML_ELASTIC_PLAN"])
    assert plan.distribution.process_count_per_instance == 2
    assert (plan.checkpoint.every, plan.checkpoint.keep) == (timedelta(minutes=10), 5)
    assert plan.run_id_of({}, job="trial_1", root="sweep") == "trial_1"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"trial__elastic": None}, "no elastic: block in trial:"),
        ({"elastic": {"max_instance_count": 2}}, r"elastic belongs in the trial: block.*trial\.elastic"),
        ({"trial": "azureml:registered:1"}, "trial is no block"),
        (
            {"trial__elastic__placement": "fan_out"},
            r"A trial of a sweep is one job.*trial\.elastic\.placement: gang, or",
        ),
        ({"trial__elastic__most": 2}, "elastic.most is no field"),
        ({"trial__environment_variables": {"B": None}}, r"yml: trial\.environment_variables\.B is empty"),
        ({"objective": None}, "objective"),
        ({"trial__distribution": {"type": "a-secret"}, "trial__environment_variables": {"A": "a-secret"}}, r"\*\*\*"),
    ],
)
def test_a_file_that_is_no_sweep_of_elastic_jobs_says_why(sweep_file, changes, part):
    path = sweep_file(**changes)
    with pytest.raises(SubmitError, match=part) as caught:
        load_elastic_sweep(path)
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(SubmitError, match=r"type is 'sweep'.*load_elastic_sweep\(\)"):
        load_elastic_job(path)


def test_a_sweep_of_a_command_job_is_converted_with_its_search(client, sent):
    """azure-ai-ml itself drops the resources of the command job; they are those that are given."""
    text = "python train.py --lr ${{inputs.lr}} ${{inputs.depth}}"
    inputs = {"lr": 0.1, "depth": 3}
    plain = command(code="src", command=text, inputs=inputs, environment="azureml:theirs:1", compute="gpu", timeout=600)
    theirs = plain(lr=Uniform(0.01, 0.1)).sweep(**SEARCH, max_concurrent_trials=2)
    theirs.early_termination = BanditPolicy(slack_factor=0.1, evaluation_interval=2)
    before = str(theirs)
    resources = ElasticResources(max_instance_count=2, placement="gang", shm_size="2g")
    client.jobs.create_or_update(ElasticCommandJob.from_command(theirs, resources=resources))
    (body,) = [each["properties"] for each in sent()]
    assert str(theirs) == before
    assert body["trial"]["resources"].items() >= {"instanceCount": 2, "shmSize": "2g"}.items()
    assert body["searchSpace"] == {"lr": ["uniform", [0.01, 0.1]]}
    assert (body["limits"]["maxTotalTrials"], body["limits"]["maxConcurrentTrials"]) == (4, 2)
    assert body["earlyTermination"]["slackFactor"] == 0.1
    assert body["inputs"]["depth"]["value"] == "3"
    assert body["trial"]["command"].endswith("--lr ${{search_space.lr}} ${{inputs.depth}}")
    with pytest.raises(SubmitError, match="instance_count=1"):
        ElasticCommandJob.from_command(theirs)


def test_a_search_expression_outside_a_sweep_says_where_it_belongs(folder):
    with pytest.raises(SubmitError, match=r"'lr' is a search expression.*job\.sweep\("):
        make("gang", inputs={"lr": Choice([1, 2])}, command="python train.py ${{inputs.lr}}").compile()


def scheduled(workspace, client, job):
    """Create a schedule, and return the definition of the jobs that it will submit."""
    trigger = CronTrigger(expression="0 2 * * 1")
    client.schedules.begin_create_or_update(JobSchedule(name="weekly", trigger=trigger, create_job=job)).result()
    (entity,) = [each for key, each in workspace.entities.items() if key.startswith("/schedules/")]
    return entity["properties"]["action"]["jobDefinition"]


@pytest.mark.parametrize("form", ["job", "compiled", "pipeline"])
@pytest.mark.parametrize("placement", ["fan_out", "service", "gang"])
def test_a_schedule_starts_a_new_run_each_time(workspace, client, components, placement, form):
    job = make(placement, name="mine", experiment_name="weekly", tags={"a": "1"}, properties={"b": "2"})
    given = job if form == "job" else job.compile()
    if form == "pipeline":
        given = given if placement == "fan_out" else PipelineJob(jobs={"train": given}, compute="gpu")
    body = scheduled(workspace, client, given)
    assert (body["jobType"], body["settings"]["force_rerun"] if form != "pipeline" else True) == ("Pipeline", True)
    if form != "pipeline":
        assert (body["experimentName"], body["tags"]["a"], body["properties"]["b"]) == ("weekly", "1", "2")
    steps = list(body["jobs"].values())
    assert len(steps) == (3 if placement == "fan_out" else 1)
    for step in steps:
        assert "/components/" in step["componentId"]
        counts = step["resources"]
        assert counts["instance_count"] == {"fan_out": 1, "service": 2, "gang": 3}[placement]
        # azure-ai-ml 1.35 writes this field of a step as those of a job
        most = counts.get("max_instance_count", counts.get("maxInstanceCount"))
        assert most == (3 if placement == "service" else None)
    assert "AZUREML_ELASTIC_RUN_ID" not in json.dumps(body)
    variables = [step["environment_variables"] for step in steps]
    triggers = [
        {
            Plan.from_json(held["AZUREML_ELASTIC_PLAN"]).run_id_of(held, job=f"{week}-{at}", root=week)
            for at, held in enumerate(variables)
        }
        for week in ("first-week", "second-week")
    ]
    assert [len(ids) for ids in triggers] == [1, 1]
    assert triggers[0].isdisjoint(triggers[1])


def test_a_schedule_of_a_pipeline_gives_each_trigger_runs_of_its_own(workspace, client, components):
    train = make("fan_out", services=None)

    @dsl.pipeline(compute="gpu")
    def mine():
        train()
        train()

    body = scheduled(workspace, client, mine())
    assert [step["type"] for step in body["jobs"].values()] == ["pipeline", "pipeline"]
    nodes = [node for each in components() if each["type"] == "pipeline" for node in each["jobs"].values()]
    held = [node["environment_variables"] for node in nodes]
    plans = [Plan.from_json(each["AZUREML_ELASTIC_PLAN"]) for each in held]
    ids = [
        {plan.run_id_of(each, job="node", root=week) for plan, each in zip(plans, held, strict=True)}
        for week in ("first-week", "second-week")
    ]
    assert (len(nodes), *map(len, ids), len(set.union(*ids))) == (6, 2, 2, 4)


def test_a_schedule_of_another_job_is_as_it_was(workspace, client):
    plain = command(code="src", command="python train.py", environment="azureml:theirs:1", compute="gpu")
    with pytest.raises(ValidationException, match="Unsupported job type"):
        scheduled(workspace, client, plain)


@pytest.mark.parametrize("placement", ["fan_out", "gang"])
def test_a_job_is_no_component_and_the_error_says_what_to_register(client, placement):
    with pytest.raises(SubmitError, match=r"cannot be registered as a component.*from_command\(component\("):
        client.components.create_or_update(make(placement))
    with pytest.raises(SubmitError, match="cannot be registered as a component"):
        client.components.create_or_update(component=make(placement), version="1")


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
    assert job.compile().component.code == f"{root}/codes/c/versions/1"


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
