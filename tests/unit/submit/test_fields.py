"""What becomes of every field of ``azure.ai.ml.command()``, in the body that reaches Azure ML from each placement."""

import inspect
from datetime import timedelta

import pytest
from azure.ai.ml import Input, Output, command
from azure.ai.ml.entities import (
    AmlTokenConfiguration,
    Environment,
    JobService,
    JupyterLabJobService,
    ManagedIdentityConfiguration,
    SshJobService,
    TensorBoardJobService,
    UserIdentityConfiguration,
    VsCodeJobService,
)
from pydantic import ValidationError

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob

PLACEMENTS = ["fan_out", "service", "gang"]
URI = "azureml://datastores/workspaceblobstore/paths/x"
PYTORCH = {"processCountPerInstance": 1, "distributionType": "PyTorch"}
RESOURCES = ("docker_args", "instance_type", "locations", "shm_size")

ARRIVES = {
    # field: what is given, and where it is in the body: of the job (a), of the node (n), of the component (c)
    "name": ("run-1", {"job": "run-1"}),
    "description": ("d", {"a.description": "d"}),
    "tags": ({"t": "1"}, {"a.tags": {"t": "1"}}),
    "properties": ({"p": "1"}, {"a.properties": {"p": "1"}}),
    "display_name": ("shown", {"a.displayName": "shown"}),
    "experiment_name": ("e", {"a.experimentName": "e"}),
    "compute": ("other", {"a.computeId": "<workspace>/computes/other"}),
    "timeout": (60, {"n.limits.timeout": "PT1M"}),
    "identity": (UserIdentityConfiguration(), {"n.identity.identityType": "UserIdentity"}),
    "job_tier": ("Spot", {"n.queueSettings.jobTier": "Spot"}),
    "priority": ("high", {"n.queueSettings.priority": 3}),
    "services": ({"lab": JupyterLabJobService()}, {"n.services.lab.jobServiceType": "JupyterLab"}),
    "environment_variables": ({"A": "1"}, {"n.environmentVariables.A": "1"}),
    "command": ("python -m pkg", {"c.command": "-- python -m pkg"}),
    "code": ("src", {"c.code": "<workspace>/codes/<uuid>/versions/1"}),
    "environment": ("azureml:env:2", {"c.environment": "<workspace>/environments/env/versions/2"}),
    "inputs": ({"x": Input(type="uri_file", path=URI, mode="download")}, {"a.inputs.x.uri": URI}),
    "outputs": ({"o": Output(type="uri_file", path=URI, mode="upload")}, {"a.outputs.o.uri": URI}),
    "docker_args": ("--ipc host", {"n.resources.dockerArgs": "--ipc host"}),
    "instance_type": ("Standard_NC6", {"n.resources.instanceType": "Standard_NC6"}),
    "locations": (("westeurope",), {"n.resources.locations": ["westeurope"]}),
    "shm_size": ("8g", {"n.resources.shmSize": "8g"}),
    "parent_job_name": ("above", {"a.parentJobName": "above"}),
}
REFUSED = {
    # field: what is given, and what the refusal says
    "instance_count": (2, "resources=ElasticResources(min_instance_count=..., max_instance_count=...)"),
    "is_deterministic": (True, "nothing is ever answered from an earlier run"),
    "distribution": ({"type": "mpi"}, "distribution"),
    **{name: (ARRIVES[name][0], f"give resources=ElasticResources({name}=...)") for name in RESOURCES},
}
REFUSED_BY = {"parent_job_name": "fan_out"}
"""Fields that one placement cannot carry."""


@pytest.fixture
def send(client, workspace, sent, components):
    """Submit a job and return what arrived: of the job, of its first node, and of what all nodes have in common."""

    def submit(placement, **fields):
        moved = {name: fields.pop(name) for name in RESOURCES if name in fields}
        job = ElasticCommandJob(
            **{
                "code": None,
                "command": "python train.py",
                "environment": "azureml:env:1",
                "compute": "gpu",
                "delivery": "environment",
                "resources": ElasticResources(max_instance_count=2, placement=placement, **moved),
                **fields,
            }
        )
        client.jobs.create_or_update(job)
        (body,) = (camel(one["properties"]) for one in sent())
        request = next(one for one in reversed(workspace.requests) if one.startswith("PUT") and "/jobs/" in one)
        found = {"job": request.rsplit("/", 1)[1], "a": body, "n": body, "c": body | {"code": body.get("codeId")}}
        found["c"]["environment"] = body.get("environmentId")
        if placement == "fan_out":
            (component,) = components()
            found |= {"n": body["jobs"]["node_0"], "c": component, "nodes": list(body["jobs"].values())}
        return found

    return submit


def camel(value):
    """Return the document with the names of a job's own body: within a pipeline they are in snake case."""
    if isinstance(value, list):
        return [camel(one) for one in value]
    if not isinstance(value, dict):
        return value
    names = {
        name: first + "".join(word.title() for word in rest) for name in value for first, *rest in [name.split("_")]
    }
    keep = {name for name in value if not name.islower() or name.startswith("node_")}
    return {name if name in keep else names[name]: camel(one) for name, one in value.items()}


def at(document, path):
    for name in path.split("."):
        document = document[name]
    return document


def test_every_field_of_the_sdk_has_its_place_here():
    fields = {
        name for name, field in inspect.signature(command).parameters.items() if field.kind is not field.VAR_KEYWORD
    }
    unknown = fields - ARRIVES.keys() - REFUSED.keys()
    assert not unknown, (
        f"azure.ai.ml.command() has fields that this library does not know: {sorted(unknown)}. Carry each to every "
        "placement (a field of ElasticCommandJob, compilation.py, conversion.py) or refuse it by name, list it in "
        "ARRIVES or REFUSED above, and add it to the list in docs/how-to/submit.md."
    )
    gone = (ARRIVES.keys() | REFUSED.keys()) - fields
    assert not gone, f"azure.ai.ml.command() has lost fields: {sorted(gone)}. See what becomes of ours."


def test_every_field_of_the_sdk_is_a_field_of_ours_or_refused_by_name():
    assert ARRIVES.keys() - REFUSED.keys() <= ElasticCommandJob.model_fields.keys()
    assert set(RESOURCES) <= ElasticResources.model_fields.keys()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("field", list(ARRIVES))
def test_the_field_arrives(send, placement, field):
    value, places = ARRIVES[field]
    if REFUSED_BY.get(field) == placement:
        with pytest.raises(SubmitError, match=f"{field}={value!r} cannot be carried by the placement '{placement}'"):
            send(placement, **{field: value})
        return
    found = send(placement, **{field: value})
    for path, wanted in places.items():
        got = at(found, path)
        if path.startswith("c."):
            assert got.removeprefix("azureml:").endswith(wanted)
        else:
            assert got == wanted


@pytest.mark.parametrize("field", REFUSED)
def test_the_field_is_refused_by_name(field):
    value, said = REFUSED[field]
    with pytest.raises(ValidationError) as caught:
        ElasticCommandJob(command="c", environment="e", resources={"max_instance_count": 1}, **{field: value})
    assert field in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("placement", ["service", "gang"])
def test_each_node_of_one_job_is_started_once(send, placement):
    assert send(placement)["a"]["distribution"] == PYTORCH


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("identity", "wanted"),
    [
        (AmlTokenConfiguration(), {"identityType": "AMLToken"}),
        (ManagedIdentityConfiguration(client_id="c"), {"identityType": "Managed", "clientId": "c"}),
        (ManagedIdentityConfiguration(resource_id="r"), {"identityType": "Managed", "resourceId": "r"}),
        ({"type": "user_identity"}, {"identityType": "UserIdentity"}),
    ],
)
def test_identities_of_every_kind(send, placement, identity, wanted):
    assert send(placement, identity=identity)["n"]["identity"] == wanted


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ("azureml://registries/azureml/environments/acpt/versions/1", "azureml/environments/acpt/versions/1"),
        ("azureml:AzureML-acpt-pytorch-2.2-cuda12.1@latest", ":AzureML-acpt-pytorch-2.2-cuda12.1@latest"),
        (Environment(image="image:1", name="mine", version="3"), "/environments/mine/versions/3"),
        (Environment(image="image:1"), "/environments/CliV2AnonymousEnvironment/versions/"),
        ({"image": "image:1", "name": "mine", "version": "4"}, "/environments/mine/versions/4"),
    ],
)
def test_environments_by_name_curated_as_objects_and_inline(send, placement, environment, wanted):
    assert wanted in send(placement, environment=environment)["c"]["environment"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("kind", "mode", "wanted"),
    [
        ("uri_folder", "ro_mount", "ReadOnlyMount"),
        ("uri_folder", "rw_mount", "ReadWriteMount"),
        ("uri_file", "direct", "Direct"),
        ("mltable", "eval_mount", "EvalMount"),
        ("mltable", "eval_download", "EvalDownload"),
        ("mlflow_model", "download", "Download"),
        ("custom_model", None, None),
        ("triton_model", "ro_mount", "ReadOnlyMount"),
    ],
)
def test_inputs_of_every_type_and_mode(send, placement, kind, mode, wanted):
    found = send(placement, inputs={"x": Input(type=kind, path=URI, mode=mode)})
    assert found["a"]["inputs"]["x"] == {"jobInputType": kind, "uri": URI} | ({"mode": wanted} if mode else {})
    if placement == "fan_out":
        assert found["c"]["inputs"]["x"] == {"type": kind} | ({"mode": mode} if mode else {})


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("kind", "mode", "wanted"),
    [
        ("uri_folder", "rw_mount", "ReadWriteMount"),
        ("uri_file", "upload", "Upload"),
        ("mltable", "direct", "Direct"),
        ("mlflow_model", "upload", "Upload"),
        ("custom_model", None, None),
        ("triton_model", "rw_mount", "ReadWriteMount"),
    ],
)
def test_outputs_of_every_type_and_mode(send, placement, kind, mode, wanted):
    output = Output(type=kind, path=URI, mode=mode, name="asset")
    found = send(placement, outputs={"o": output})
    nodes = found.get("nodes", [])
    assert [node["outputs"]["o"]["value"] for node in nodes[:1]] == ["${{parent.outputs.o}}"] * len(nodes[:1])
    for held in (found["a"], *nodes[1:]):
        sent = held["outputs"]["o"]
        name = sent.pop("assetName", None) or sent.pop("name", None)
        assert name == "asset"
        assert sent == {"jobOutputType": kind, "uri": URI} | ({"mode": wanted} if mode else {})


@pytest.mark.parametrize("placement", ["service", "gang"])
def test_an_output_of_one_job_registers_its_version(send, placement):
    found = send(placement, outputs={"o": {"type": "uri_folder", "name": "asset", "version": "3"}})
    assert found["n"]["outputs"]["o"]["assetVersion"] == "3"


SERVICES = {
    "board": TensorBoardJobService(log_dir="outputs/tb"),
    "shell": SshJobService(ssh_public_keys="ssh-rsa AAAA"),
    "editor": VsCodeJobService(),
    "lab": JupyterLabJobService(port=8888),
    "other": JobService(type="jupyter_lab"),
}
SERVICES_SENT = {
    "board": {"jobServiceType": "TensorBoard", "properties": {"logDir": "outputs/tb"}},
    "shell": {"jobServiceType": "SSH", "properties": {"sshPublicKeys": "ssh-rsa AAAA"}},
    "editor": {"jobServiceType": "VSCode"},
    "lab": {"jobServiceType": "JupyterLab", "port": 8888},
    "other": {"jobServiceType": "JupyterLab"},
}


@pytest.mark.parametrize("placement", ["service", "gang"])
def test_the_services_of_one_job_are_as_given(send, placement):
    assert send(placement, services=SERVICES)["n"]["services"] == SERVICES_SENT


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


def test_fractions_of_a_second_are_rounded_up(send):
    assert send("gang", timeout=timedelta(seconds=0.5))["n"]["limits"]["timeout"] == "PT1S"


@pytest.mark.parametrize(("placement", "name"), [("fan_out", "dockerArgsList"), ("gang", "dockerArgsList")])
def test_docker_arguments_as_a_list(send, placement, name):
    assert send(placement, docker_args=("--ipc", "host"))["n"]["resources"][name] == ["--ipc", "host"]
