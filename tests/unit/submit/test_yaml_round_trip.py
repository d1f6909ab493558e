"""Compiled YAML is equivalent to the job: loading and submitting it sends the same bodies."""

import json
import re

import pytest
import yaml
from azure.ai.ml import Input, Output, load_job
from azure.ai.ml.entities import (
    AmlTokenConfiguration,
    BuildContext,
    Environment,
    JobService,
    JupyterLabJobService,
    ManagedIdentityConfiguration,
    SshJobService,
    TensorBoardJobService,
    UserIdentityConfiguration,
    VsCodeJobService,
)

from azureml_elastic.config import ElasticResources, NodePool
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import ElasticCommandJob
from azureml_elastic.submit.runtime.staging import copy_runtime
from azureml_elastic.submit.yaml.entity_document import PathFormat
from azureml_elastic.submit.yaml.standard_yaml import standard_yaml

PLACEMENTS = ["fan_out", "service", "gang"]
KINDS = ["fan_out", "gang"]
"""A pipeline of jobs and one job of many nodes; ``service`` differs from the latter in what ``test_machines`` sees."""
URI = "azureml://datastores/workspaceblobstore/paths/x"
ASSETS = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
TEXTS = [
    *("1", "1.0", "1e3", "1e-5", "0x10", "0o7", "0b1", "1_000", "1:30", "+1", "-1", ".5", ".inf", ".nan", "2024-01-01"),
    *("true", "True", "yes", "no", "on", "off", "y", "null", "~", "None", "=", "<<", "-", "?", ":", "...", "---", "#"),
    *(
        "a: b",
        "a #b",
        "- a",
        "[a]",
        "{a}",
        "'a'",
        '"a"',
        "it's",
        "a\\nb",
        "%a",
        "@a",
        "`a`",
        "!a",
        "&a",
        "*a",
        "|",
        ">",
    ),
    *(
        " a",
        "a ",
        "\ta",
        "a\nb",
        "a\n",
        "\na",
        "a\n\n  b \n",
        "a\\\n  b",
        "ä☃😀",
        "\x85",
        "\u2028",
        "$HOME ${X}",
        "./src",
    ),
    *("azureml:x:1", "https://x/y?sig=a%2Fb", "a,b", "x" * 300),
]
NUMBERS = [0, -3, 10**20, 0.1, 1.0, 1e-5, 1e30, 1e16, True, False]


def make(placement="gang", **fields):
    resources = {name: fields.pop(name) for name in ElasticResources.model_fields if name in fields}
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": "python train.py",
            "environment": "azureml:env:1",
            "compute": "gpu",
            "delivery": "environment",
            "display_name": "shown",
            "experiment_name": "tried",
            "resources": ElasticResources(**{"max_instance_count": 2, "placement": placement, **resources}),
            **fields,
        }
    )


@pytest.fixture
def arrived(client, workspace, sent, components):
    """Submit a job to an empty workspace and return all that has arrived: jobs, components, environments, uploads."""

    def submit(job):
        for state in (workspace.jobs, workspace.entities, workspace.blobs, workspace.metadata):
            state.clear()
        client.jobs.create_or_update(job)
        environments = {key: one for key, one in workspace.entities.items() if key.startswith("/environments/")}
        text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uuid>", json.dumps(environments))
        uploads = {path for path in workspace.blobs if "/LocalUpload/" in path}
        return {
            "jobs": comparable(sent()),
            "components": comparable(components()),
            "environments": json.loads(text),
            "uploads": uploads,
            "code": {path.split("/", 2)[2]: data for path, data in workspace.blobs.items() if path not in uploads},
        }

    return submit


def comparable(value):
    """Return a body without ``_source``, which says how the SDK has come by it, and without a node's name beside it.

    A node that is loaded from YAML bears in its body the name under which it stands there anyway.
    """
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: comparable(one) for key, one in value.items() if key != "_source"}
    for name, node in kept.items():
        if isinstance(node, dict) and "componentId" in node and node.get("name") == name:
            del node["name"]
    return kept


@pytest.fixture
def same(arrived, tmp_path, monkeypatch):
    """Check that a job, and what is loaded from its YAML in another folder, arrive as the same; return the YAML."""

    def check(job):
        folder = tmp_path / "elsewhere" / "compiled"
        folder.mkdir(parents=True)
        runtime = copy_runtime(folder)[0] if job.delivery == "ship" else None
        text = standard_yaml(job, PathFormat(folder), runtime)
        (folder / "job.yml").write_text(text)
        direct = arrived(job)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            loaded = arrived(load_job(folder / "job.yml"))
        assert loaded == direct
        return yaml.safe_load(text)

    return check


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("delivery", ["ship", "environment"])
def test_a_plain_job_and_the_library_with_it(same, placement, delivery):
    document = same(make(placement, delivery=delivery))
    assert document["type"] == ("pipeline" if placement == "fan_out" else "command")
    inputs = document.get("inputs", {})
    assert (inputs.get("azureml_elastic_runtime", {}).get("path") == "./azureml_elastic_runtime.pyz") == (
        delivery == "ship"
    )


@pytest.mark.parametrize("placement", KINDS)
def test_literals_of_every_type(same, placement):
    inputs = {f"i{number}": value for number, value in enumerate([*TEXTS, *NUMBERS])}
    declared = {
        "choice": Input(type="string", default="a", enum=["a", "b"]),
        "whole": Input(type="integer", default=3, min=1, max=5),
        "number": Input(type="number", default=0.5),
        "truth": {"type": "boolean", "default": True},
    }
    document = same(make(placement, command="python train.py ${{inputs.i0}}", inputs={**inputs, **declared}))
    read = document["inputs"]
    assert {name: read[name] for name in inputs} == inputs
    assert [type(read[name]) for name in inputs] == [type(value) for value in inputs.values()]
    assert {name: read[name] for name in declared} == {"choice": "a", "whole": 3, "number": 0.5, "truth": True}


@pytest.mark.parametrize("placement", KINDS)
def test_inputs_of_every_type_mode_and_place(same, placement, folder):
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("1")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "b.txt").write_text("2")
    document = same(
        make(
            placement,
            inputs={
                "folder": Input(type="uri_folder", path="./data"),
                "file": Input(type="uri_file", path="data/a.txt", mode="download"),
                "outside": Input(type="uri_folder", path=str(outside), mode="ro_mount"),
                "dictionary": {"type": "uri_folder", "path": "data", "mode": "direct"},
                "data": Input(type="uri_file", path="azureml:table:3"),
                "table": Input(type="mltable", path="azureml:table:3", mode="eval_mount"),
                "downloaded": Input(type="mltable", path=URI, mode="eval_download"),
                "store": Input(type="uri_folder", path=URI, mode="ro_mount"),
                "web": Input(type="uri_file", path="https://example.org/a.csv"),
                "blob": Input(type="uri_file", path="wasbs://c@a.blob.core.windows.net/x"),
                "lake": Input(type="uri_folder", path="abfss://c@a.dfs.core.windows.net/x"),
                "by_id": Input(type="uri_folder", path=f"{ASSETS}/data/t/versions/1"),
                "mlflow": Input(type="mlflow_model", path="azureml:model:3", mode="download"),
                "custom": Input(type="custom_model", path="azureml:model:3", mode="ro_mount"),
                "triton": Input(type="triton_model", path=URI, mode="direct"),
            },
        )
    )
    paths = {name: one["path"] for name, one in document["inputs"].items()}
    assert paths["folder"] == paths["dictionary"] == "../../a project/data"
    assert paths["file"] == "../../a project/data/a.txt"
    assert paths["outside"] == "../../outside"


@pytest.mark.parametrize("placement", KINDS)
def test_outputs_of_every_type_and_mode(same, placement):
    outputs = {
        "folder": Output(type="uri_folder"),
        "file": Output(type="uri_file", path=URI, mode="upload", name="asset"),
        "nothing": None,
        "empty": {},
        "table": Output(type="mltable", mode="direct"),
        "mlflow": Output(type="mlflow_model", path=f"{URI}/"),
        "custom": {"type": "custom_model", "mode": "rw_mount"},
    }
    if placement != "fan_out":
        outputs["version"] = Output(type="uri_folder", name="asset", version="3")
    same(make(placement, outputs=outputs, command="python train.py ${{outputs.folder}}"))


@pytest.mark.parametrize("placement", KINDS)
@pytest.mark.parametrize(
    "environment",
    [
        "azureml:env:1",
        "env:1",
        "azureml://registries/azureml/environments/acpt/versions/1",
        "azureml://registries/azureml/environments/acpt/labels/latest",
        "azureml:AzureML-acpt-pytorch-2.2-cuda12.1@latest",
        f"{ASSETS}/environments/env/versions/1",
        Environment(image="image:1", description="d", tags={"a": "1"}),
        Environment(image="image:1", os_type="linux"),
        {"image": "image:1", "conda_file": {"name": "a", "dependencies": ["python=3.10", {"pip": ["torch"]}]}},
        {"image": "image:1", "conda_file": "conda.yml"},
        {"build": BuildContext(path="docker")},
        {"build": BuildContext(path="docker", dockerfile_path="other")},
    ],
)
def test_environments_by_name_and_inline(same, placement, environment, folder):
    (folder / "conda.yml").write_text("name: b\nchannels: [conda-forge]\ndependencies: [python, {pip: [torch>=2]}]\n")
    (folder / "docker").mkdir()
    for name in ("Dockerfile", "other"):
        (folder / "docker" / name).write_text("FROM image:1\n")
    same(make(placement, environment=environment))


@pytest.mark.parametrize("placement", KINDS)
@pytest.mark.parametrize(
    "identity",
    [
        AmlTokenConfiguration(),
        UserIdentityConfiguration(),
        ManagedIdentityConfiguration(),
        ManagedIdentityConfiguration(client_id="c", object_id="o"),
        {"type": "user_identity"},
    ],
)
def test_identities(same, placement, identity):
    same(make(placement, identity=identity))


@pytest.mark.parametrize("placement", KINDS)
def test_services(same, placement):
    same(
        make(
            placement,
            services={
                "board": TensorBoardJobService(log_dir="outputs/tb"),
                "boards": TensorBoardJobService(log_dir="x", nodes="all"),
                "shell": SshJobService(ssh_public_keys="ssh-rsa AAAA"),
                "editor": VsCodeJobService(nodes="all"),
                "lab": JupyterLabJobService(port=8888, properties={"a": "b"}),
                "other": JobService(type="tensor_board", properties={"logDir": "y"}),
                "dictionary": {"type": "ssh", "ssh_public_keys": "k"},
            },
        )
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_limits_queue_tags_and_names(same, placement):
    texts = {f"t{number}": "\n".join(TEXTS[number::40]) for number in range(40)}  # Azure ML takes 50 tags
    same(
        make(
            placement,
            name="run-1",
            display_name="shown: ä #1",
            description="a\n  b: c\n\nd ",
            tags=texts,
            properties=texts,
            environment_variables=texts | {"EMPTY": ""},
            timeout=3600,
            job_tier="Spot",
            priority="high",
            **({} if placement == "fan_out" else {"parent_job_name": "above"}),
        )
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"docker_args": "--ipc host -e 'A=1 2'", "shm_size": "64g", "locations": ("westeurope", "eastus")},
        {"docker_args": ("--ipc", "host"), "shm_size": "8g"},
        {"properties": {"AISuperComputer": {"x": 1, "y": [1, "2"], "z": {"a": True}}, "other": "v"}},
        {"compute": None, "instance_type": "Standard_NC6", "job_tier": "Spot"},
        {"compute": None, "instance_type": "Standard_NC6"},
        {"compute": "serverless", "instance_type": "Standard_NC6"},
        {"max_instance_count": 1},
    ],
)
def test_machines(same, placement, fields):
    if placement == "service" and isinstance(fields.get("docker_args"), tuple):
        pytest.skip("refused by name: azure-ai-ml would drop the maximum")
    same(make(placement, **fields))


@pytest.mark.parametrize("placement", KINDS)
@pytest.mark.parametrize(
    "command",
    [
        "set -e\npip install x  \n\tpython train.py \\\n  --a 1 \\\n  --b '2: #3'\necho done\n\n",
        'python train.py --x "a: b" # c',
        "  python train.py ${{outputs.o}} | tee 'x y'",
        "python train.py --ä '☃' $A ${B}",
    ],
)
def test_commands_of_every_shape(same, placement, command):
    same(make(placement, command=command, outputs={"o": Output()}))


def test_node_pools(same):
    pools = [
        NodePool("gpu", max_instance_count=2),
        NodePool("other", min_instance_count=1, max_instance_count=1),
        NodePool("serverless", max_instance_count=1, instance_type="Standard_NC6", job_tier="Spot"),
    ]
    document = same(make("fan_out", compute=pools, max_instance_count=4, priority="high", command="python -m x"))
    assert len(document["jobs"]) == 4


@pytest.mark.parametrize("placement", KINDS)
def test_code_that_is_a_file_or_absent(same, placement):
    same(make(placement, code="src/train.py"))


def test_no_code_at_all(same):
    same(make(code=None, command="python -m package"))


def test_names_that_azure_ai_ml_chooses_are_left_to_it():
    text = standard_yaml(make("fan_out", display_name=None, experiment_name=None))
    assert not {"name", "display_name", "experiment_name"} & yaml.safe_load(text).keys()


def test_a_shown_job_has_whole_paths_and_needs_no_folder(arrived, folder, tmp_path, monkeypatch):
    job = make("fan_out", delivery="ship", inputs={"d": Input(type="uri_folder", path="src")})
    text = standard_yaml(job)
    document = yaml.safe_load(text)
    assert document["jobs"]["node_0"]["component"]["code"] == str(folder / "src")
    assert document["inputs"]["d"]["path"] == str(folder / "src")
    direct = arrived(job)
    (tmp_path / "job.yml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert arrived(load_job("job.yml")) == direct


def test_equal_parts_of_a_pipeline_are_written_once(folder):
    text = standard_yaml(make("fan_out", max_instance_count=64), PathFormat(folder))
    assert len(yaml.safe_load(text)["jobs"]) == 64
    assert text.count("AZUREML_ELASTIC_PLAN") == 1
    assert len(text) < 20_000


def test_paths_that_are_to_stay_absolute(folder):
    (folder / "data").mkdir()
    inputs = {name: Input(type="uri_folder", path=name) for name in ("data", "src")}
    document = yaml.safe_load(
        standard_yaml(make(inputs=inputs), PathFormat(folder / "compiled", frozenset({str(folder / "data")})))
    )
    assert document["inputs"]["data"]["path"] == str(folder / "data")
    assert document["inputs"]["src"]["path"] == "../src"


def test_paths_hold_where_a_folder_is_a_link(arrived, folder, tmp_path, monkeypatch):
    real = tmp_path / "far" / "away" / "compiled"
    real.mkdir(parents=True)
    (folder / "compiled").symlink_to(real)
    (folder / "data").symlink_to(folder / "src")
    job = make(inputs={"d": Input(type="uri_folder", path="data")})
    text = standard_yaml(job, PathFormat(folder / "compiled"))
    assert yaml.safe_load(text)["inputs"]["d"]["path"] == "../../../a project/data"
    (folder / "compiled" / "job.yml").write_text(text)
    direct = arrived(job)
    assert len(direct["uploads"]) == 1
    assert arrived(load_job(folder / "compiled" / "job.yml")) == direct


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"inputs": {"i": Input(type="uri_folder", path=URI, description="d")}}, ["input 'i' has description"]),
        ({"inputs": {"i": Input(type="uri_folder", path=URI, mode="rw_mount")}}, ["inputs.i.mode", "'rw_mount'"]),
        ({"outputs": {"o": Output(type="uri_folder", description="d")}}, ["output 'o' has description"]),
        ({"outputs": {"o": Output(type="uri_folder", early_available=True)}}, ["output 'o' has early_available"]),
        ({"identity": ManagedIdentityConfiguration(resource_id="r")}, ["identity has resource_id"]),
        ({"identity": ManagedIdentityConfiguration(principal_id="p")}, ["identity has principal_id"]),
        ({"services": {"s": JobService()}}, ["service 's' has type=''"]),
        ({"services": {"s": JobService(type="ssh", endpoint="e")}}, ["services.s.endpoint"]),
        ({"environment": Environment(image="i", name="mine", version="3")}, ["'mine'", "azureml:mine:3"]),
        ({"environment": Environment(image="i", os_type="Linux")}, ["environment.os_type"]),
        ({"environment": Environment(image="i", properties={"a": "1"})}, ["environment has properties"]),
        ({"environment": Environment(image="i", inference_config={"a": 1})}, ["environment has inference_config"]),
    ],
)
def test_what_yaml_has_no_field_for_is_refused_by_name(placement, fields, parts):
    with pytest.raises(SubmitError) as caught:
        standard_yaml(make(placement, **fields))
    for part in parts:
        assert part in str(caught.value)


def test_an_environment_whose_name_changes_at_each_reading_is_refused_for_many_nodes():
    environment = Environment(build=BuildContext(path="https://github.com/x/y#main:d"))
    with pytest.raises(SubmitError, match=re.escape("https://github.com/x/y#main:d")):
        standard_yaml(make("fan_out", environment=environment))


def test_variables_are_not_shown_where_the_yaml_is_refused():
    secret = "hunter2-hunter2"
    with pytest.raises(SubmitError) as caught:
        standard_yaml(
            make(
                environment_variables={"KEY": secret},
                inputs={"i": Input(type="uri_folder", path=URI, mode="rw_mount"), "j": secret},
            )
        )
    assert secret not in str(caught.value)
