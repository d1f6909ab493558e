"""References to what is in a workspace or elsewhere: an elastic job sends what ``command()`` sends for each form."""

import json
import re

import pytest
from azure.ai.ml import Input, MLClient, Output, command, dsl, load_job

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob
from azureml_elastic.submit.yaml.compiled_file import compile_file
from azureml_elastic.submit.yaml.job_file import load_elastic_job
from tests.unit.submit.conftest import GROUP, ROOT, SUBSCRIPTION, WORKSPACE, Credential

REGISTRY = "azureml://registries/azureml"
LONG = f"azureml://subscriptions/{SUBSCRIPTION}/resourcegroups/{GROUP}/workspaces/{WORKSPACE}"
ADDRESSES = (
    "azureml://datastores/workspaceblobstore/paths/x/",
    f"{LONG}/datastores/workspaceblobstore/paths/x/",
    "azureml://jobs/one/outputs/out/paths/x",
    "azureml://jobs/one/outputs/artifacts/paths/x/",
    "https://account.blob.core.windows.net/c/x",
    "http://example.com/x",
    "wasbs://c@account.blob.core.windows.net/x",
    "wasb://c@account.blob.core.windows.net/x",
    "abfss://c@account.dfs.core.windows.net/x",
    "adl://account.azuredatalakestore.net/x",
)
KINDS = {
    "uri_folder": "data",
    "uri_file": "data",
    "mltable": "data",
    "custom_model": "models",
    "mlflow_model": "models",
}
CODES = (
    *("src", "./src", "src/train.py", "https://account.blob.core.windows.net/c/x"),
    *(f"{ROOT}/codes/thing/versions/1", f"azureml:{ROOT}/codes/thing/versions/1"),
)
ENVIRONMENTS = (
    *("thing:1", "azureml:thing:1", "thing@latest", "azureml:thing@latest"),
    *(f"{ROOT}/environments/thing/versions/1", f"azureml:{ROOT}/environments/thing/versions/1"),
    *(f"{REGISTRY}/environments/thing/versions/1", f"{REGISTRY}/environments/thing/labels/latest"),
    *("AzureML-acpt-pytorch:3", "azureml:AzureML-acpt-pytorch:3"),
)
COMPUTES = ("gpu", "azureml:gpu", f"{ROOT}/computes/gpu", f"azureml:{ROOT}/computes/gpu", "serverless", None)


def as_plain(reference):
    """Return a reference as ``command()`` takes it: ``azureml:`` is known before a name with a version alone."""
    return reference and re.sub(r"^azureml:(?=/subscriptions/|thing@|gpu$)", "", reference)


@pytest.fixture(autouse=True)
def assets(workspace):
    address = "azureml://datastores/workspaceblobstore/paths/x/"
    properties = {
        "codes": {"codeUri": "https://account.blob.core.windows.net/c/x"},
        "data": {"dataType": "uri_folder", "dataUri": address},
        "environments": {"image": "x"},
        "models": {"modelUri": address, "flavors": {}},
    }
    for kind, of_version in properties.items():
        for name, version in (("thing", "1"), ("AzureML-acpt-pytorch", "3")):
            path, made = f"/{kind}/{name}", {"createdBy": "me", "createdAt": "2024-01-01T00:00:00Z"}
            of_all = {"latestVersion": version, "dataType": "uri_folder"}
            for key, held in ((path, of_all), (f"{path}/versions/{version}", of_version)):
                workspace.entities[key] = {
                    "id": f"{ROOT}{key}",
                    "name": key.rpartition("/")[2],
                    "properties": held,
                    "systemData": made,
                }


@pytest.fixture
def submit(client, workspace):
    """Submit a job by a new client: azure-ai-ml nests each submission of a client in the one before."""

    def submitted(job):
        MLClient(Credential(), SUBSCRIPTION, GROUP, WORKSPACE, enable_telemetry=False).jobs.create_or_update(job)
        return workspace.jobs[-1]["properties"]

    return submitted


def jobs_of(fields):
    """Return a command, and the elastic jobs of the same fields: of its own, from the command, and with fan_out."""

    def given(form=str):
        return {"command": "python train.py", "code": "src", "environment": "thing:1", "compute": "gpu", **fields(form)}

    gang = ElasticResources(max_instance_count=2, placement="gang")
    one = ElasticResources(max_instance_count=1, placement="fan_out")
    return (
        command(**given(as_plain)),
        ElasticCommandJob(**given(), resources=gang),
        ElasticCommandJob.from_command(command(**given()), resources=gang),
        ElasticCommandJob(**given(), resources=one),
    )


def described(body, workspace):
    """Return where a job's code is, whatever its asset is called, the environment and the compute."""
    (node,) = body.get("jobs", {"": {}}).values()
    held = {**body, **node}
    if "componentId" in held:
        held |= workspace.entities[held["componentId"].removeprefix(ROOT)]["properties"]["componentSpec"]
    code, environment = (held.get(f"{name}Id") or held[name] for name in ("code", "environment"))
    address = workspace.entities[code.removeprefix("azureml:").removeprefix(ROOT)]["properties"]["codeUri"]
    compute = (held.get("computeId") or "serverless").rpartition("/")[2]
    return re.sub(r"[0-9a-f-]{36}", "<uuid>", address), environment.removeprefix("azureml:"), compute


def test_inputs_and_outputs(submit):
    references = [("uri_folder", path) for path in (*ADDRESSES, "src", "./src")] + [("uri_file", "src/train.py")]
    for kind, assets in KINDS.items():
        asset = f"{assets}/thing/versions/1"
        names = ("thing:1", "azureml:thing:1", "thing@latest", "azureml:thing@latest")
        more = (f"{ROOT}/{asset}", f"azureml:{ROOT}/{asset}", f"{LONG}/{asset}", f"{REGISTRY}/{asset}")
        references += [(kind, path) for path in (*names, *more, f"{REGISTRY}/{assets}/thing/labels/latest")]

    def fields(form):
        return {
            "inputs": {f"i{n}": Input(type=kind, path=form(path)) for n, (kind, path) in enumerate(references)},
            "outputs": {f"o{n}": Output(type="uri_folder", path=path) for n, path in enumerate(ADDRESSES)},
        }

    plain, *elastic = map(submit, jobs_of(fields))
    assert len(plain["inputs"]) == len(references)
    for body in elastic:
        for field in ("inputs", "outputs"):
            held = {name: each for name, each in body[field].items() if not name.startswith("azureml_elastic_")}
            assert held == plain[field]


@pytest.mark.parametrize("number", range(len(ENVIRONMENTS)))
def test_code_environment_and_compute(submit, workspace, number):
    def fields(form):
        given = {"code": CODES, "environment": ENVIRONMENTS, "compute": COMPUTES}
        return {name: form(each) if (each := forms[number % len(forms)]) else None for name, forms in given.items()}

    plain, *elastic = jobs_of(fields)
    if "http" in elastic[-1].code:  # the code of what is in a pipeline cannot be
        with pytest.raises(SubmitError, match=r"code='https://.*gang"):
            submit(elastic.pop())
    expected = described(submit(plain), workspace)
    assert [described(submit(job), workspace) for job in elastic] == [expected] * len(elastic)


@pytest.mark.parametrize("placement", ["gang", "fan_out"])
@pytest.mark.parametrize("code", ["src", f"{ROOT}/codes/thing/versions/1"])
def test_a_component_of_the_workspace_is_called(client, submit, workspace, placement, code):
    """What a component that was registered refers to has become ids."""
    text = "python train.py ${{inputs.data}} ${{inputs.lr}}"
    inputs = {"data": Input(type="uri_folder"), "lr": Input(type="number", default=0.1)}
    made = command(name="shown", command=text, inputs=inputs, environment="thing:1", code=code).component
    made.version = "1"
    client.components.create_or_update(made)
    got = client.components.get("shown", version="1")
    data = Input(type="uri_folder", path=client.data.get("thing", label="latest").id)

    @dsl.pipeline(compute="gpu")
    def mine():
        got(data=data, lr=0.3)

    plain, nodes = submit(mine()), ElasticResources(max_instance_count=1, placement=placement)
    job = ElasticCommandJob.from_command(got(data=data, lr=0.3), resources=nodes, compute="gpu")
    assert client.jobs.validate(job).passed
    elastic, (step,) = submit(job), plain["jobs"].values()
    plain |= {"computeId": f"{ROOT}/computes/gpu"}
    assert described(elastic, workspace) == described(plain, workspace)
    assert elastic["inputs"]["data"]["uri"] == step["inputs"]["data"]["uri"]
    assert elastic["inputs"]["lr"]["value"] == step["inputs"]["lr"]["value"] == "0.3"


def test_a_file_names_what_is_in_the_workspace(submit, workspace, folder):
    """azure-ai-ml removes the scheme when it reads a file, which a compiled one has again."""
    names = ("azureml:thing:1", "azureml:thing@latest", f"azureml:{ROOT}/data/thing/versions/1", *ADDRESSES)
    document = {
        "type": "command",
        "command": "python train.py",
        "code": "src",
        "environment": f"azureml:{ROOT}/environments/thing/versions/1",
        "compute": "azureml:gpu",
        "inputs": {f"i{number}": {"type": "uri_folder", "path": path} for number, path in enumerate(names)},
    }
    (folder / "job.yml").write_text(json.dumps(document))
    (folder / "elastic.yml").write_text(json.dumps({**document, "elastic": {"max_instance_count": 1}}))
    compile_file(folder / "elastic.yml", folder / "compiled.yml", ())
    one = ElasticResources(max_instance_count=1)
    jobs = (ElasticCommandJob.from_command(load_job("job.yml"), resources=one), load_elastic_job("elastic.yml"))
    plain, *elastic = map(submit, (load_job("job.yml"), *jobs, load_job("compiled.yml")))
    for body in elastic:
        assert body["inputs"].items() >= plain["inputs"].items()
        assert described(body, workspace) == described(plain, workspace)


@pytest.mark.parametrize("name", ["thing", "azureml:thing", "thing:", "thing@"])
def test_an_environment_without_a_version_is_refused_before_it_is_submitted(client, name):
    _, job, *_ = jobs_of(lambda _: {})
    job = job.with_options(environment=name)
    result = client.jobs.validate(job)
    assert list(result.error_messages.values()) == [
        f"environment={name!r} has no version. Give 'thing@latest' for the newest one, or one as in 'thing:1'."
    ]
    with pytest.raises(SubmitError, match="has no version"):
        client.jobs.create_or_update(job)
