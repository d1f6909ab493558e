"""Elastic jobs that are called: copies with other inputs, and steps of the user's pipelines."""

import json

import pytest
from azure.ai.ml import Input, Output, command, dsl
from azure.ai.ml.entities import Command, Pipeline, PipelineJob
from azure.ai.ml.sweep import Choice, Uniform

from azureml_elastic.config import ElasticResources, NodePool, Plan
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit import ElasticCommandJob

PLACEMENTS = ["fan_out", "service", "gang"]
STEP = "AZUREML_ELASTIC_STEP"
URI = "azureml://datastores/workspaceblobstore/paths/"


def make(placement="fan_out", **fields):
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": "python train.py ${{inputs.data}} ${{inputs.lr}} $[[--tag ${{inputs.tag}}]] ${{outputs.model}}",
            "environment": "azureml:theirs:1",
            "inputs": {
                "data": Input(type="uri_folder", mode="download"),
                "lr": 0.1,
                "tag": Input(type="string", optional=True),
            },
            "outputs": {"model": Output(type="uri_folder", mode="upload")},
            "resources": ElasticResources(min_instance_count=2, max_instance_count=3, placement=placement),
            **fields,
        }
    )


def prepare():
    out = {"out": Output(type="uri_folder")}
    text = "python train.py ${{outputs.out}}"
    return command(command=text, code="src", environment="azureml:theirs:1", outputs=out)()


def nodes_of(step):
    """Return the jobs that are the nodes of a step."""
    return list(step.component.jobs.values()) if isinstance(step, Pipeline) else [step]


def steps_of(node):
    return {child.environment_variables.get(STEP) for child in nodes_of(node)}


def test_called_outside_a_pipeline_it_is_a_job_with_other_inputs(folder):
    job = make()
    other = job(lr=0.5, data=Input(type="uri_folder", path=f"{URI}d/"), tag="a")
    assert isinstance(other, ElasticCommandJob)
    assert (other.inputs["lr"], other.inputs["tag"], job.inputs["lr"]) == (0.5, "a", 0.1)
    assert list(other.inputs) == list(job.inputs)
    assert other.compile().inputs["lr"]._data == 0.5
    assert "tag" not in other(tag=None).inputs
    assert job() == job


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_reads_the_outputs_of_others_and_is_read_by_others(client, sent, components, placement):
    train = make(placement)

    @dsl.pipeline(compute="gpu")
    def mine(lr: float = 0.3):
        prepared = prepare()
        first = train(data=prepared.outputs.out, lr=lr)
        second = train(data=first.outputs.model, tag="again")
        return {"model": second.outputs.model}

    client.jobs.create_or_update(mine())
    (body,) = sent()
    steps = body["properties"]["jobs"]
    assert list(steps) == ["prepared", "first", "second"]
    first, second = steps["first"], steps["second"]
    assert first["inputs"]["data"]["value"] == "${{parent.jobs.prepared.outputs.out}}"
    assert first["inputs"]["lr"]["value"] == "${{parent.inputs.lr}}"
    assert "tag" not in first["inputs"]
    assert second["inputs"]["data"]["value"] == "${{parent.jobs.first.outputs.model}}"
    assert (second["inputs"]["lr"]["value"], second["inputs"]["tag"]["value"]) == ("0.1", "again")
    assert second["outputs"]["model"]["value"] == "${{parent.outputs.model}}"
    assert first["outputs"]["model"]["mode"] == "Upload"
    assert first["inputs"]["azureml_elastic_runtime"]["uri"].endswith(".pyz")
    assert {step["type"] for step in (first, second)} == {"pipeline" if placement == "fan_out" else "command"}
    commands = [each for each in components() if "azureml_elastic_runtime" in each.get("command", "")]
    assert len(commands) == 2
    assert all(each["inputs"]["data"]["mode"] == "download" for each in commands)


def test_the_nodes_of_a_fan_out_step_are_a_pipeline_within_the_pipeline(client, sent, components):
    pools = [NodePool("spot", max_instance_count=2), NodePool("dedicated", min_instance_count=1, max_instance_count=1)]
    train = make(resources=None, compute=pools).with_options(display_name="The training", tags={"a": "1"})

    @dsl.pipeline(compute="gpu")
    def mine():
        train(data=Input(type="uri_folder", path=f"{URI}d/"))

    client.jobs.create_or_update(mine())
    (body,) = sent()
    (step,) = body["properties"]["jobs"].values()
    assert (step["type"], step["display_name"], step["tags"]) == ("pipeline", "The training", {"a": "1"})
    (nodes,) = [each["jobs"] for each in components() if each["type"] == "pipeline"]
    assert list(nodes) == ["spot_0", "spot_1", "dedicated_0"]
    assert [node["computeId"].rpartition("/")[2] for node in nodes.values()] == ["spot", "spot", "dedicated"]
    for node in nodes.values():
        assert node["inputs"]["data"]["value"] == "${{parent.inputs.data}}"
        assert node["resources"]["instance_count"] == 1
    assert nodes["spot_0"]["outputs"]["model"]["value"] == "${{parent.outputs.model}}"
    assert nodes["spot_1"]["outputs"]["model"] == {"job_output_type": "uri_folder", "mode": "Upload"}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_has_what_the_job_has(folder, placement):
    job = make(
        placement,
        compute="cluster",
        display_name="The training",
        tags={"a": "1"},
        properties={"b": "2"},
        environment_variables={"C": "3"},
        outputs={"model": {"type": "uri_folder", "path": f"{URI}m/"}},
        timeout=300,
    ).with_options(resources={"shm_size": "8g"})

    @dsl.pipeline
    def mine():
        job(data=Input(type="uri_folder", path=f"{URI}d/")).name = "training"

    (step,) = mine().jobs.values()
    assert (step.name, step.display_name) == ("training", "The training")
    assert (dict(step.tags), dict(step.properties)) == ({"a": "1"}, {"b": "2"})
    assert step.outputs["model"].path == f"{URI}m/"
    for node in nodes_of(step):
        assert (node.compute, node.environment_variables["C"], node.resources.shm_size) == ("cluster", "3", "8g")
        assert node.limits.timeout == 300
        assert node.component.is_deterministic is False


def test_each_fan_out_step_has_a_name_of_its_own_that_all_its_nodes_share(folder):
    """The run id ends with it, and begins with the id of the submitted pipeline."""
    train = make(inputs={}, outputs={}, command="python train.py")

    @dsl.pipeline
    def inner():
        train()
        train()

    @dsl.pipeline(compute="gpu")
    def outer():
        train()
        inner()
        inner()
        train()

    def names():
        first, left, right, last = outer().jobs.values()
        inside = [node for pipeline in (left, right) for node in pipeline.component.jobs.values()]
        return [steps_of(node) for node in (first, *inside, last)]

    found = names()
    assert all(len(each) == 1 for each in found)
    assert len(set.union(*found)) == 6
    assert found == names()
    plan = Plan.from_json(nodes_of(next(iter(outer().jobs.values())))[0].environment_variables["AZUREML_ELASTIC_PLAN"])
    assert plan.replacement is None
    ids = {
        plan.run_id_of({STEP: name}, job="node", root=root)
        for root in ("this-week", "last-week")
        for name in set.union(*found)
    }
    assert len(ids) == 12


def test_a_name_that_the_job_gives_its_step_stays(folder):
    train = make(inputs={}, outputs={}, command="python train.py", environment_variables={STEP: "mine"})

    @dsl.pipeline(compute="gpu")
    def pipeline():
        train()

    (step,) = pipeline().jobs.values()
    assert steps_of(step) == {"mine"}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_inputs_may_be_given_when_the_step_is_there(folder, placement):
    train = make(placement)

    @dsl.pipeline(compute="gpu")
    def mine():
        prepared, training = prepare(), train()
        training.inputs.data = prepared.outputs.out

    text = str(mine())
    assert "path: ${{parent.jobs.prepared.outputs.out}}" in text


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bound_inputs_are_taken_by_the_constructor_and_outside_of_pipeline_functions(folder, placement):
    prepared = prepare()
    prepared.name = "prepared"
    job = make(placement).with_options(inputs={"data": prepared.outputs.out})
    pipeline = PipelineJob(jobs={"prepared": prepared, "training": job.compile()}, compute="gpu")
    assert "path: ${{parent.jobs.prepared.outputs.out}}" in str(pipeline)
    again = make(placement)(data="${{parent.jobs.prepared.outputs.out}}").compile()
    assert isinstance(again, Pipeline if placement == "fan_out" else Command)
    assert again.component.inputs["data"].type == "uri_folder"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_bound_job_is_not_submitted_by_itself(client, placement):
    job = make(placement)(data=prepare().outputs.out)
    with pytest.raises(SubmitError, match=r"'data' is <uri_folder of the pipeline>.*submit the pipeline"):
        client.jobs.create_or_update(job)


@pytest.mark.parametrize(
    ("inputs", "error", "part"),
    [
        ({"rate": 1}, SubmitError, "called with 'rate'.*its inputs are data, lr, tag"),
        ({"lr": None}, CommandError, r"\$\{\{inputs.lr\}\}"),
    ],
)
def test_a_call_with_wrong_inputs_says_what_there_is(folder, inputs, error, part):
    @dsl.pipeline(compute="gpu")
    def mine():
        make("gang")(**inputs)

    with pytest.raises(error, match=part):
        mine()


def test_a_called_job_with_a_search_expression_is_swept(client, sent):
    job = make("gang")(lr=Uniform(0.01, 0.1), data=Input(type="uri_folder", path=f"{URI}d/"))
    assert "lr: number" in str(job)
    options = {"primary_metric": "loss", "goal": "Minimize", "sampling_algorithm": "random", "max_total_trials": 4}
    client.jobs.create_or_update(job.sweep(**options))
    (body,) = sent()
    assert json.dumps(body["properties"]["searchSpace"]["lr"]) == '["uniform", [0.01, 0.1]]'
    assert "${{search_space.lr}}" in body["properties"]["trial"]["command"]
    with pytest.raises(SubmitError, match=r"search expression.*job\.sweep\("):
        job.compile()
    with pytest.raises(SubmitError, match="searches nothing"):
        make("gang").sweep(**options)


def test_a_sweep_in_a_pipeline_has_the_outputs_of_other_steps(folder):
    options = {"primary_metric": "loss", "goal": "Minimize", "sampling_algorithm": "random"}

    @dsl.pipeline(compute="gpu")
    def mine():
        prepared = prepare()
        search = make("gang")(data=prepared.outputs.out, lr=Choice([0.1, 0.2])).sweep(**options)
        search.set_limits(max_total_trials=2)
        return {"model": search.outputs.model}

    steps = mine().jobs
    assert list(steps) == ["prepared", "search"]
    assert "${{parent.jobs.prepared.outputs.out}}" in str(mine())
    assert steps["search"].resources.instance_count == 3


def test_only_the_nodes_of_a_fan_out_step_write_its_outputs_together(folder):
    def nodes(job):
        @dsl.pipeline(compute="gpu")
        def mine():
            job(data=Input(type="uri_folder", path=f"{URI}d/"))

        (step,) = mine().jobs.values()
        return nodes_of(step)

    together = nodes(make())
    assert all("--output model=${{outputs.model}} -- python" in node.component.command for node in together)
    assert ["AZUREML_ELASTIC_FIRST_NODE" in node.environment_variables for node in together] == [True, False, False]
    one = ElasticResources(max_instance_count=1, placement="fan_out")
    path = {"model": Output(type="uri_folder", path=f"{URI}m/")}
    for alone in (make("gang"), make("service"), make(resources=one), make(outputs=path)):
        assert not any("--output" in node.component.command for node in nodes(alone))
    with pytest.raises(SubmitError, match=r"'model' is a folder of each.*'abfss://c@a/x'.*'gang'"):
        nodes(make(checkpoint={"path": "abfss://c@a/x"}))
