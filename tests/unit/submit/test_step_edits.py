"""What is set on the step of an elastic job in a pipeline's function: it reaches the nodes, or is refused."""

import json
import shlex

import pytest
from azure.ai.ml import UserIdentityConfiguration, command, dsl
from azure.ai.ml.dsl._do_while import do_while
from azure.ai.ml.dsl._parallel_for import parallel_for
from azure.ai.ml.entities import Command, CommandJobLimits, JobResourceConfiguration, PipelineJob, QueueSettings
from azure.ai.ml.entities import VsCodeJobService as Code
from azure.ai.ml.exceptions import MlException
from azure.ai.ml.sweep import Choice

from azureml_elastic.config import ElasticResources, NodePool
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob

PLACEMENTS = ["fan_out", "gang"]
PLAN = "AZUREML_ELASTIC_PLAN"


def make(placement, **fields):
    given = {
        "code": "src",
        "command": "python train.py",
        "environment": "azureml:theirs:1",
        "environment_variables": {"A": "1"},
        "resources": ElasticResources(max_instance_count=2, placement=placement, shm_size="1g"),
    }
    return ElasticCommandJob(**{**given, **fields})


def built(placement, edit, **fields):
    """Return a pipeline with one elastic step, on which something is set."""
    job = make(placement, **fields)

    @dsl.pipeline(compute="gpu")
    def mine():
        step = job()
        edit(step)

    return mine()


@pytest.fixture
def nodes(client, sent, components):
    """Return a function that submits a pipeline and returns the nodes of its step as they are sent."""

    def submitted(pipeline):
        client.jobs.create_or_update(pipeline)
        (step,) = sent()[-1]["properties"]["jobs"].values()
        assert step.get("computeId") is None or step["type"] == "command"
        if step["type"] == "command":
            return [step]
        return list([each["jobs"] for each in components() if each["type"] == "pipeline"][-1].values())

    return submitted


def setting(name, value):
    return lambda step: setattr(step, name, value)


LIMITS = {"timeout": "PT1M", "job_limits_type": "Command"}
IDENTITY = {"identity_type": "UserIdentity"}


def resources(step):
    step.resources.shm_size = "8g"


def variables(step):
    step.environment_variables["B"] = 2


HONOURED = [
    (setting("compute", "other"), "computeId", "<workspace>/computes/other"),
    (setting("identity", UserIdentityConfiguration()), "identity", IDENTITY),
    (setting("identity", {"type": "user_identity"}), "identity", IDENTITY),
    (setting("limits", CommandJobLimits(timeout=60)), "limits", LIMITS),
    (lambda step: step.set_limits(timeout=60), "limits", LIMITS),
    (lambda step: step.set_queue_settings(job_tier="Spot"), "queue_settings", {"job_tier": "Spot"}),
    (setting("queue_settings", QueueSettings(priority="High")), "queue_settings", {"priority": 3}),
    (setting("services", {"code": Code()}), "services", {"code": {"job_service_type": "VSCode"}}),
    (resources, "resources", {"shm_size": "8g"}),
    (setting("resources", {"shm_size": "8g"}), "resources", {"shm_size": "8g"}),
    (setting("resources", JobResourceConfiguration(instance_type="X")), "resources", {"instance_type": "X"}),
    (lambda step: step.set_resources(shm_size="8g"), "resources", {"shm_size": "8g"}),
    (variables, "environment_variables", {"A": "1", "B": "2"}),
    (setting("environment_variables", {"A": "3"}), "environment_variables", {"A": "3"}),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_a_field_of_the_job_reaches_all_nodes_with_what_the_plan_needs(nodes, placement):
    for edit, name, expected in HONOURED:
        found = nodes(built(placement, edit))
        assert len(found) == (2 if placement == "fan_out" else 1)
        for node in found:
            assert node["resources"]["instance_count"] == (1 if placement == "fan_out" else 2)
            assert node["resources"]["shm_size"] in ("1g", "8g")
            assert PLAN in node["environment_variables"]
            if isinstance(expected, dict):
                assert node[name].items() >= expected.items(), node[name]
            else:
                assert node[name] == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_variables_that_are_replaced_are_those_of_the_job_alone(nodes, placement):
    (plain, *_), (edited, *_) = (
        nodes(built(placement, edit)) for edit in (lambda _: None, setting("environment_variables", {"B": "2"}))
    )
    assert edited["environment_variables"].keys() - {"B"} == plain["environment_variables"].keys() - {"A"}


REFUSED = [
    (lambda step: setattr(step.resources, "instance_count", 3), r"instance_count=3.*'max_instance_count': 3"),
    (setting("resources", {"instance_count": 3}), r"instance_count=3.*'max_instance_count': 3"),
    (lambda step: step.set_resources(instance_count=3), r"instance_count=3.*'max_instance_count': 3"),
    (setting("distribution", {"type": "pytorch", "process_count_per_instance": 4}), r"distribution=\.\.\."),
    (setting("environment", "other:1"), r"environment=\.\.\."),
    (setting("command", "python other.py"), r"command=\.\.\."),
    (setting("code", "other"), r"code=\.\.\."),
    (setting("parent_job_name", "x"), r"parent_job_name=\.\.\."),
    (setting("timeout", 60), r"timeout=\.\.\."),
    (setting("unheard_of", 1), "unheard_of=1; set it on the job: .* leave it out"),
    (lambda step: step.sweep(primary_metric="loss", goal="minimize"), r"set it on the job: job\(lr=Uniform"),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_else_is_refused_when_the_pipeline_is_built(folder, placement):
    for edit, part in REFUSED:
        with pytest.raises(SubmitError, match=part) as refused:
            built(placement, edit)
        assert "; set it on the job: " in str(refused.value)
    with pytest.raises(SubmitError, match=f"{PLAN} is set by this library"):
        built(placement, setting("environment_variables", {PLAN: "{}"}))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_setting_that_only_the_running_pipeline_knows_is_refused(folder, placement):
    def limit(step, value):
        step.set_limits(timeout=value)

    edits = {
        "compute": lambda step, value: setattr(step, "compute", value),
        "environment_variables": lambda step, value: step.environment_variables.update(B=value),
        "resources": lambda step, value: setattr(step.resources, "instance_type", value),
        "limits": limit,
    }
    job = make(placement, environment_variables={"SECRET": "s3cret"})
    for name, edit in edits.items():

        def build(given: str, edit=edit):
            edit(job(), given)

        mine = dsl.pipeline(compute="gpu", non_pipeline_inputs=["edit"])(build)
        with pytest.raises(SubmitError, match=f"cannot have {name}=.*set it on the job: ") as refused:
            mine(given="x")
        assert "s3cret" not in str(refused.value)


def test_what_only_a_step_of_several_nodes_could_lose_is_refused(folder):
    with pytest.raises(SubmitError, match="call the job once more"):
        built("fan_out", lambda step: step())
    with pytest.raises(SubmitError, match=r"settings=.*set it on the job"):
        built("fan_out", lambda step: setattr(step.settings, "default_compute", "other"))
    pools = [NodePool("spot", max_instance_count=2)]
    with pytest.raises(SubmitError, match=r"compute='other'.*set it on the job: job.with_options\(compute=\.\.\.\)"):
        built("fan_out", setting("compute", "other"), compute=pools, resources=None)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_is_checked_again_when_its_pipeline_is_sent(client, placement):
    pipeline = built(placement, lambda _: None)
    (step,) = pipeline.jobs.values()
    step.resources = {"instance_count": 5}
    with pytest.raises(SubmitError, match="instance_count=5"):
        client.jobs.create_or_update(pipeline)


def test_fewer_nodes_of_a_gang_are_those_of_its_plan(nodes):
    least = ElasticResources(min_instance_count=2, max_instance_count=3, placement="gang")
    (node,) = nodes(built("gang", lambda step: step.set_resources(instance_count=2), resources=least))
    counts = json.loads(node["environment_variables"][PLAN])["resources"]
    assert (node["resources"]["instance_count"], counts["max_instance_count"]) == (2, 2)
    with pytest.raises(SubmitError, match="instance_count=1; set it on the job"):
        built("gang", lambda step: step.set_resources(instance_count=1), resources=least)


def given(edit):
    """Return a pipeline that was given the node of a job, on which something is set."""
    node = make("gang").compile()
    edit(node)
    return PipelineJob(jobs={"train": node}, compute="gpu")


def test_what_is_set_on_a_node_that_a_pipeline_is_given_reaches_it_with_what_the_plan_needs(nodes):
    for edit, name, expected in HONOURED:
        (node,) = nodes(given(edit))
        assert PLAN in node["environment_variables"]
        assert (node["resources"]["instance_count"], node["resources"]["shm_size"] in ("1g", "8g")) == (2, True)
        assert node[name].items() >= expected.items() if isinstance(expected, dict) else node[name] == expected


def test_a_node_that_has_been_compiled_is_checked_wherever_it_goes(client, sent, folder):
    for edit, part in REFUSED:
        with pytest.raises(SubmitError, match=part):
            given(edit)
    node = make("gang").compile()
    node.environment_variables = {"B": "2"}
    client.jobs.create_or_update(node)
    client.jobs.create_or_update(node)  # azure-ai-ml has put ids in the place of its code and its environment
    assert [{PLAN, "B"} <= body["properties"]["environmentVariables"].keys() for body in sent()] == [True, True]
    node.resources.instance_count = 3
    with pytest.raises(SubmitError, match="instance_count=3"):
        client.jobs.create_or_update(node)

    @dsl.pipeline(compute="gpu")
    def mine():
        node = make("gang").compile()
        node.environment_variables = {"B": "2"}
        node().environment_variables["C"] = "3"

    client.jobs.create_or_update(mine())
    (step,) = sent()[-1]["properties"]["jobs"].values()
    assert {PLAN, "B", "C"} <= step["environment_variables"].keys()


HONOURED_OF_SWEEPS = [
    (setting("compute", "other"), "computeId", "<workspace>/computes/other"),
    (setting("queue_settings", QueueSettings(job_tier="Spot")), "queue_settings", {"job_tier": "spot"}),
    (resources, "resources", {"shm_size": "8g"}),
    (setting("resources", {"shm_size": "8g"}), "resources", {"shm_size": "8g"}),
    (lambda sweep: sweep.set_resources(shm_size="8g"), "resources", {"shm_size": "8g"}),
    (lambda sweep: sweep.set_limits(max_total_trials=3), "limits", {"max_total_trials": 3}),
    (lambda sweep: sweep.trial.environment_variables.update(B=2), "environment_variables", {"A": "1", "B": "2"}),
    (lambda sweep: setattr(sweep.trial, "environment_variables", {"B": "2"}), "environment_variables", {"B": "2"}),
]
REFUSED_OF_SWEEPS = [
    (lambda sweep: setattr(sweep.resources, "instance_count", 3), r"instance_count=3.*'max_instance_count': 3"),
    (setting("resources", {"instance_count": 3}), r"instance_count=3.*'max_instance_count': 3"),
    (setting("environment_variables", {"B": "2"}), r"environment_variables=\['B'\].*environment_variables=\.\.\."),
    (lambda sweep: setattr(sweep.trial, "command", "python other.py"), r"trial.command=.*with_options\(command=\.\.\."),
    (lambda sweep: setattr(sweep.trial, "resources", {"instance_count": 3}), r"trial.resources=.*resources=\.\.\."),
    (lambda sweep: setattr(sweep.trial, "distribution", None), r"trial.distribution=None.*distribution=\.\.\."),
]


def swept(edit):
    """Return a sweep, and a pipeline with it as its step, on both of which something is set."""
    job = make("gang", command="python train.py ${{inputs.lr}}", inputs={"lr": 0.1})

    def made():
        options = {"primary_metric": "loss", "goal": "minimize", "sampling_algorithm": "grid", "max_total_trials": 2}
        sweep = job(lr=Choice([0.1, 0.2])).sweep(**options)
        edit(sweep)
        return sweep

    @dsl.pipeline(compute="gpu")
    def mine():
        made()

    return made(), mine


def test_what_is_set_on_a_sweep_reaches_its_trials_with_what_the_plan_needs(client, sent, components):
    for edit, name, expected in HONOURED_OF_SWEEPS:
        sweep, pipeline = swept(edit)
        client.jobs.create_or_update(pipeline())
        (step,) = sent()[-1]["properties"]["jobs"].values()
        trial = [each for each in components() if each["type"] == "command"][-1]
        exports = shlex.split(trial["command"].partition(" && ")[0])
        held = {**step, "environment_variables": dict(each.split("=", 1) for each in exports[1:])}
        assert json.loads(held["environment_variables"][PLAN])["resources"]["max_instance_count"] == 2
        assert step["resources"]["instance_count"] == 2
        assert held[name].items() >= expected.items() if isinstance(expected, dict) else held[name] == expected
        client.jobs.create_or_update(sweep)
        assert PLAN in sent()[-1]["properties"]["trial"]["environmentVariables"]
        client.jobs.create_or_update(sweep)


def test_an_identity_is_that_of_a_sweep_by_itself_alone(client, sent):
    sweep, pipeline = swept(setting("identity", UserIdentityConfiguration()))
    client.jobs.create_or_update(sweep)
    assert sent()[-1]["properties"]["identity"]
    with pytest.raises(SubmitError, match=r"no identity of a sweep that is a step.*{'identity': None}"):
        pipeline()


def test_what_a_sweep_cannot_have_is_refused_as_a_step_and_by_itself(client):
    for edit, part in REFUSED_OF_SWEEPS:
        sweep, pipeline = swept(edit)
        for act in (pipeline, lambda sweep=sweep: client.jobs.create_or_update(sweep)):
            with pytest.raises(SubmitError, match=part) as refused:
                act()
            assert "; set it on the job: " in str(refused.value)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_setting_of_a_command_is_accepted_without_a_word(folder, placement):
    """Also of a release of azure-ai-ml that has more of them: all that can be set is carried, applied or refused."""
    names = {name for name in vars(command(command="x", environment="e:1")()) if name[0] != "_"}
    for base in Command.__mro__:
        properties = {name for name, value in vars(base).items() if isinstance(value, property) and value.fset}
        names |= {name for name in properties if name[0] != "_"}
    carried = {"comment", "description", "display_name", "experiment_name", "kwargs", "name", "properties", "tags"}
    for name in sorted(names - carried):
        with pytest.raises((SubmitError, MlException, ValueError, AttributeError, TypeError)):
            built(placement, setting(name, object()))


@pytest.mark.parametrize("loop", [do_while, parallel_for])
@pytest.mark.parametrize("deep", [False, True])
def test_a_loop_around_a_step_whose_nodes_are_steps_is_refused(folder, loop, deep):
    def around(placement):
        job = make(placement, inputs={"lr": 1})

        @dsl.pipeline
        def inner(lr: int):
            job(lr=lr)

        @dsl.pipeline(compute="gpu")
        def mine():
            body = inner(lr=1) if deep else job()
            options = (
                {"mapping": {}, "max_iteration_count": 2} if loop is do_while else {"items": [{"lr": 1}, {"lr": 2}]}
            )
            loop(body=body, **options)

        return mine()

    with pytest.raises(SubmitError, match=r"all be one run.*'gang'"):
        around("fan_out")
    around("gang")
