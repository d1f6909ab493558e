"""What holds for each body: it arrives, its YAML arrives as the same, and so does the command job of its fields.

The workspace that they arrive at refuses what the models of the service do not have.
"""

import inspect
import json
import re

import pytest
import yaml
from azure.ai.ml import Output, command, load_job
from azure.ai.ml.entities import Environment, TensorBoardJobService

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob
from azureml_elastic.submit.runtime.staging import copy_runtime
from azureml_elastic.submit.yaml.entity_document import PathFormat
from azureml_elastic.submit.yaml.standard_yaml import standard_yaml
from tests.unit.submit.bodies import BODIES, FIELDS, PLACEMENTS, SERVICES, SERVICES_SENT, URI

OF_RESOURCES = ("docker_args", "instance_type", "locations", "shm_size")
REFUSED = {
    # field of command(): what is given, and what the refusal says
    "instance_count": (2, "resources=ElasticResources(min_instance_count=..., max_instance_count=...)"),
    "is_deterministic": (True, "nothing is ever answered from an earlier run"),
    "distribution": ({"type": "mpi"}, "distribution"),
    **{name: (FIELDS[name].given[name], f"give resources=ElasticResources({name}=...)") for name in OF_RESOURCES},
}
NAME = "azureml:env:1"
PLAIN = {"code": None, "command": "python -m x", "environment": NAME, "compute": "gpu", "experiment_name": "t"}
ALL = pytest.mark.parametrize(
    ("placement", "name"), [(placement, name) for name, body in BODIES.items() for placement in body.placements]
)


@pytest.fixture(autouse=True)
def files(folder):
    for name in ("docker", "../outside"):
        (folder / name).mkdir()
    (folder / "../outside/b.txt").write_text("1")
    for name in ("Dockerfile", "other"):
        (folder / "docker" / name).write_text("FROM image:1\n")
    (folder / "conda.yml").write_text("name: b\nchannels: [conda-forge]\ndependencies: [python, {pip: [torch>=2]}]\n")


def make(placement, **fields):
    given = {**PLAIN, "display_name": "shown", "delivery": "environment", **fields}
    moved = {key: given.pop(key) for key in OF_RESOURCES if key in given}
    resources = {"max_instance_count": 2, "placement": placement, **moved, **given.pop("resources", {})}
    return ElasticCommandJob(**given, resources=ElasticResources(**resources))


def camel(value):
    """Return the document with the names of a job's own body: within a pipeline they are in snake case."""
    if isinstance(value, list):
        return [camel(one) for one in value]
    if not isinstance(value, dict):
        return value
    names = {
        name: first + "".join(word.title() for word in rest) for name in value for first, *rest in [name.split("_")]
    }
    kept = ("node_", "uri_", "mlflow_", "custom_", "triton_", "mltable_")  # names of our own
    keep = {name for name in value if not name.islower() or name.startswith(kept)}
    return {name if name in keep else names[name]: camel(one) for name, one in value.items()}


def at(document, path):
    for name in path.split("."):
        document = document[name]
    return document


@pytest.fixture
def send(client, workspace, sent, components):
    """Submit a job and return what arrived: of the job, of its first node, and of what all nodes have in common."""

    def submit(placement, **fields):
        client.jobs.create_or_update(make(placement, **fields))
        body = camel(sent()[0]["properties"])
        request = next(one for one in reversed(workspace.requests) if one.startswith("PUT") and "/jobs/" in one)
        common = body | {"code": body.get("codeId"), "environment": body.get("environmentId")}
        found = {"job": request.rsplit("/", 1)[1], "a": body, "n": body, "c": common}
        if "jobs" in body:
            nodes, (component,) = list(body["jobs"].values()), components()
            found |= {"n": nodes[0], "nodes": nodes, "c": component, "component": component}
        return found

    return submit


@ALL
def test_it_arrives(send, placement, name):
    found = send(placement, **BODIES[name].given)
    for path, wanted in BODIES[name].arrives.items():
        if path.startswith("component.") and "component" not in found:
            continue
        got = at(found, path)
        assert wanted in got if path.startswith("c.") else got == wanted


@ALL
def test_its_yaml_arrives_as_the_same(arrived, tmp_path, monkeypatch, placement, name):
    """Written and loaded in another folder."""
    job = make(placement, **BODIES[name].given)
    folder = tmp_path / "elsewhere" / "compiled"
    folder.mkdir(parents=True)
    runtime = copy_runtime(folder)[0] if job.delivery == "ship" else None
    text = standard_yaml(job, PathFormat(folder), runtime)
    (folder / "job.yml").write_text(text)
    direct = arrived(job)
    monkeypatch.chdir(tmp_path)
    assert arrived(load_job(folder / "job.yml")) == direct
    document = yaml.safe_load(text)
    assert document["type"] == ("pipeline" if placement == "fan_out" else "command")
    inputs = document.get("inputs", {})
    paths = {key: one["path"] for key, one in inputs.items() if isinstance(one, dict) and "path" in one}
    assert ("./azureml_elastic_runtime.pyz" in paths.values()) == (job.delivery == "ship")
    if name == "paths":
        assert [paths[key] for key in ("local", "dictionary", "file")] == [
            f"../../a project/data{end}" for end in ("", "", "/a.txt")
        ]
        assert paths["outside"] == "../../outside"
    if name == "literals":
        given = {key: value for key, value in job.inputs.items() if key.startswith("i")}
        assert {key: inputs[key] for key in given} == given
        assert [type(inputs[key]) for key in given] == [type(value) for value in given.values()]


@pytest.mark.parametrize(
    ("placement", "name"),
    [(placement, name) for name, body in BODIES.items() if body.plain for placement in body.placements],
)
def test_the_command_job_of_the_same_fields_arrives_as_the_same(arrived, placement, name):
    given = {**PLAIN, "display_name": "shown", **BODIES[name].given}
    resources = {"max_instance_count": 2, "placement": placement}
    converted = ElasticCommandJob.from_command(command(**given), resources=resources, delivery="environment")
    both = [arrived(job) for job in (converted, make(placement, **BODIES[name].given))]
    for each in both:  # the digest in the plan is that of paths as they were given, and those of command() are absolute
        each["jobs"] = json.loads(re.sub(r"(program\W+)[0-9a-f]{16}", r"\1", json.dumps(each["jobs"])))
    assert both[0] == both[1]


def test_every_field_of_the_sdk_has_its_place_here():
    fields = {
        name for name, field in inspect.signature(command).parameters.items() if field.kind is not field.VAR_KEYWORD
    }
    unknown = fields - FIELDS.keys() - REFUSED.keys()
    assert not unknown, (
        f"azure.ai.ml.command() has fields that this library does not know: {sorted(unknown)}. Carry each to every "
        "placement (a field of ElasticCommandJob, compilation.py, conversion.py) and list it in bodies.py, or refuse "
        "it by name and list it in REFUSED above, and add it to the list in docs/how-to/submit.md."
    )
    gone = (FIELDS.keys() | REFUSED.keys()) - fields
    assert not gone, f"azure.ai.ml.command() has lost fields: {sorted(gone)}. See what becomes of ours."
    assert FIELDS.keys() - REFUSED.keys() <= ElasticCommandJob.model_fields.keys()
    assert set(OF_RESOURCES) <= ElasticResources.model_fields.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_the_field_is_refused_by_name(field):
    value, said = REFUSED[field]
    with pytest.raises(ValueError, match="validation error") as caught:
        ElasticCommandJob(command="c", environment="e", resources={"max_instance_count": 1}, **{field: value})
    assert field in str(caught.value)
    assert said in str(caught.value)


def test_a_pipeline_has_no_job_above_it():
    with pytest.raises(SubmitError, match="parent_job_name='above' cannot be carried by the placement 'fan_out'"):
        make("fan_out", parent_job_name="above").compile()


@pytest.mark.parametrize("placement", ["service", "gang"])
def test_each_node_of_one_job_is_started_once(send, placement):
    assert send(placement)["a"]["distribution"] == {"processCountPerInstance": 1, "distributionType": "PyTorch"}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (Environment(image="image:1", name="mine", version="3"), "/environments/mine/versions/3"),
        ({"image": "image:1", "name": "mine", "version": "4"}, "/environments/mine/versions/4"),
    ],
)
def test_environments_that_are_registered(send, placement, environment, wanted):
    assert wanted in send(placement, environment=environment)["c"]["environment"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_output_is_registered_by_the_first_node(send, placement):
    found = send(placement, outputs={"o": Output(type="uri_folder", path=URI, mode="upload", name="asset")})
    nodes = found.get("nodes", [])
    assert [node["outputs"]["o"]["value"] for node in nodes[:1]] == ["${{parent.outputs.o}}"] * len(nodes[:1])
    for held in (found["a"], *nodes[1:]):
        sent = held["outputs"]["o"]
        name = sent.pop("assetName", None) or sent.pop("name", None)
        assert (name, sent) == ("asset", {"jobOutputType": "uri_folder", "uri": URI, "mode": "Upload"})


def test_each_node_of_a_fan_out_has_its_services_and_the_first_has_tensorboard(send):
    first, second = send("fan_out", services=SERVICES)["nodes"]
    assert first["services"] == SERVICES_SENT
    assert second["services"] == {name: sent for name, sent in SERVICES_SENT.items() if name != "board"}


def test_a_service_on_all_nodes_is_on_each_node_of_a_fan_out(send):
    board, lab = TensorBoardJobService(log_dir="x", nodes="all"), {"type": "jupyter_lab", "nodes": "all"}
    wanted = {"board": SERVICES_SENT["board"] | {"properties": {"logDir": "x"}}, "lab": SERVICES_SENT["other"]}
    for node in send("fan_out", services={"board": board, "lab": lab})["nodes"]:
        assert node["services"] == wanted
    assert board.nodes == "all"


def test_nodes_without_a_service_of_their_own_have_none(send):
    first, second = send("fan_out", services={"board": {"type": "tensor_board", "log_dir": "x"}})["nodes"]
    assert list(first["services"]) == ["board"]
    assert "services" not in second


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"services": {"web": {"type": "web"}}}, ["service 'web'", "type='web'", "tensor_board"]),
        ({"outputs": {"o": "azureml://x"}}, ["output 'o'", "is of the type str", "Output(type="]),
        ({"environment": 3}, ["environment is of the type int"]),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(send, placement, fields, parts):
    with pytest.raises(SubmitError) as caught:
        send(placement, **fields)
    for part in parts:
        assert part in str(caught.value)
