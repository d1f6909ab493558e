"""Jobs that are sent in every way: what is given, and where it arrives. ``test_bodies.py`` says what holds for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from azure.ai.ml import Input, Output
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

from azureml_elastic.config import NodePool

PLACEMENTS = ("fan_out", "service", "gang")
URI = "azureml://datastores/workspaceblobstore/paths/x"
ASSETS = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
_WORDS = """1 1.0 1e3 1e-5 0x10 0o7 0b1 1_000 1:30 +1 -1 .5 .inf .nan 2024-01-01 true True yes no on off y null ~ None
= << - ? : ... --- # it's a\\nb %a @a `a` !a &a *a | > [a] {a} 'a' "a" ä☃😀 ./src azureml:x:1
https://x/y?sig=a%2Fb a,b"""
TEXTS = [
    *_WORDS.split(),
    *("a: b", "a #b", "- a", " a", "a ", "\ta", "a\nb", "a\n", "\na", "a\n\n  b \n", "a\\\n  b", "\x85", "\u2028"),
    *("$HOME ${X}", "x" * 300),
]
NUMBERS = [0, -3, 10**20, 0.1, 1.0, 1e-5, 1e30, 1e16, True, False]
_TAGS = {f"t{number}": "\n".join(TEXTS[number::40]) for number in range(40)}  # Azure ML takes 50 tags


@dataclass(frozen=True)
class Body:
    """Fields of a job, and what arrives of them.

    Args:
        given: fields of the job, those of its resources among them.
        arrives: values by path: of the job (``a.``), of its first node (``n.``), of what all nodes have in common
            (``c.``) or of the component of a ``fan_out`` (``component.``).
        placements: placements that carry it.
        plain: whether ``command()`` takes these fields, too.
    """

    given: dict[str, Any]
    arrives: dict[str, Any] = field(default_factory=dict)
    placements: tuple[str, ...] = PLACEMENTS
    plain: bool = True


FIELDS = {
    "name": Body({"name": "run-1"}, {"job": "run-1"}),
    "description": Body({"description": "a\n  b: c\n\nd "}, {"a.description": "a\n  b: c\n\nd "}),
    "tags": Body({"tags": _TAGS}, {"a.tags": _TAGS}),
    "properties": Body({"properties": _TAGS}, {"a.properties": _TAGS}),
    "display_name": Body({"display_name": "shown: ä #1"}, {"a.displayName": "shown: ä #1"}),
    "experiment_name": Body({"experiment_name": "e"}, {"a.experimentName": "e"}),
    "compute": Body({"compute": "other"}, {"a.computeId": "<workspace>/computes/other"}),
    "timeout": Body({"timeout": 60}, {"n.limits.timeout": "PT1M"}),
    "identity": Body({"identity": UserIdentityConfiguration()}, {"n.identity": {"identityType": "UserIdentity"}}),
    "job_tier": Body({"job_tier": "Spot"}, {"n.queueSettings.jobTier": "Spot"}),
    "priority": Body({"priority": "high"}, {"n.queueSettings.priority": 3}),
    "services": Body({"services": {"lab": JupyterLabJobService()}}, {"n.services.lab.jobServiceType": "JupyterLab"}),
    "environment_variables": Body({"environment_variables": {**_TAGS, "E": ""}}, {"n.environmentVariables.E": ""}),
    "command": Body({"command": "python -m pkg"}, {"c.command": "-- python -m pkg"}),
    "code": Body({"code": "src"}, {"c.code": "<workspace>/codes/<uuid>/versions/1"}),
    "environment": Body({"environment": "azureml:env:2"}, {"c.environment": "<workspace>/environments/env/versions/2"}),
    "inputs": Body({"inputs": {"x": Input(type="uri_file", path=URI, mode="download")}}, {"a.inputs.x.uri": URI}),
    "outputs": Body({"outputs": {"o": Output(type="uri_file", path=URI, name="asset")}}, {"a.outputs.o.uri": URI}),
    "docker_args": Body({"docker_args": "--ipc host -e 'A=1 2'"}, {"n.resources.dockerArgs": "--ipc host -e 'A=1 2'"}),
    "instance_type": Body({"instance_type": "Standard_NC6"}, {"n.resources.instanceType": "Standard_NC6"}),
    "locations": Body({"locations": ("westeurope", "eastus")}, {"n.resources.locations": ["westeurope", "eastus"]}),
    "shm_size": Body({"shm_size": "8g"}, {"n.resources.shmSize": "8g"}),
    "parent_job_name": Body({"parent_job_name": "above"}, {"a.parentJobName": "above"}, ("service", "gang")),
}
"""Each field of ``command()`` that is carried."""


def _commands() -> dict[str, Body]:
    texts = (
        "set -e\npip install x  \n\tpython train.py \\\n  --a 1 \\\n  --b '2: #3'\necho done\n\n",
        'python train.py --x "a: b" # c',
        "  python train.py ${{outputs.o}} | tee 'x y'",
        "python train.py --ä '☃' $A ${B}",
    )
    return {f"command {text!r}": Body({"command": text, "outputs": {"o": Output()}, "code": "src"}) for text in texts}


def _environments() -> dict[str, Body]:
    conda = {"name": "a", "dependencies": ["python=3.10", {"pip": ["torch"]}]}
    anonymous = "/environments/CliV2AnonymousEnvironment/versions/"
    registry = "azureml/environments/acpt"
    given = {
        "azureml:env:1": "/environments/env/versions/1",
        "env:1": "/environments/env/versions/1",
        f"azureml://registries/{registry}/versions/1": f"{registry}/versions/1",
        f"azureml://registries/{registry}/labels/latest": f"{registry}/labels/latest",
        "azureml:AzureML-acpt-pytorch-2.2-cuda12.1@latest": ":AzureML-acpt-pytorch-2.2-cuda12.1@latest",
        f"{ASSETS}/environments/env/versions/1": f"{ASSETS}/environments/env/versions/1",
    }
    inline = (
        Environment(image="image:1", description="d", tags={"a": "1"}),
        Environment(image="image:1", os_type="linux"),
        {"image": "image:1", "conda_file": conda},
        {"image": "image:1", "conda_file": "conda.yml"},
        {"build": BuildContext(path="docker")},
        {"build": BuildContext(path="docker", dockerfile_path="other")},
    )
    named = {f"environment {name}": Body({"environment": name}, {"c.environment": end}) for name, end in given.items()}
    return named | {
        f"environment {number}": Body(
            {"environment": one}, {"c.environment": anonymous}, plain=isinstance(one, Environment)
        )
        for number, one in enumerate(inline)
    }


_KINDS = (  # type, mode, and the mode that is sent
    ("uri_folder", "ro_mount", "ReadOnlyMount"),
    ("uri_file", "direct", "Direct"),
    ("mltable", "eval_mount", "EvalMount"),
    ("mltable", "eval_download", "EvalDownload"),
    ("mlflow_model", "download", "Download"),
    ("custom_model", None, None),
    ("triton_model", "ro_mount", "ReadOnlyMount"),
)
_KINDS_OUT = (
    ("uri_folder", "rw_mount", "ReadWriteMount"),
    ("uri_file", "upload", "Upload"),
    ("mltable", "direct", "Direct"),
    ("mlflow_model", "upload", "Upload"),
    ("custom_model", None, None),
    ("triton_model", "rw_mount", "ReadWriteMount"),
)


def _sent(kind: str, wanted: str | None, key: str) -> dict[str, str]:
    return {key: kind, "uri": URI} | ({"mode": wanted} if wanted else {})


def _literals() -> Body:
    given = {f"i{number}": value for number, value in enumerate([*TEXTS, *NUMBERS])}
    declared = {
        "choice": Input(type="string", default="a", enum=["a", "b"]),
        "whole": Input(type="integer", default=3, min=1, max=5),
        "real": Input(type="number", default=0.5),
    }
    types = {"boolean": True, "integer": 3, "number": 0.5, "string": "a b"}
    arrives: dict[str, Any] = {f"a.inputs.{kind}.value": str(value) for kind, value in types.items()}
    arrives |= {f"component.inputs.{kind}.type": kind for kind in types}
    inputs = {**given, **declared, **types}
    return Body({"command": "python train.py ${{inputs.i0}}", "code": "src", "inputs": inputs}, arrives)


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
_PATHS = {
    "local": Input(type="uri_folder", path="./data"),
    "file": Input(type="uri_file", path="data/a.txt", mode="download"),
    "outside": Input(type="uri_folder", path="../outside", mode="ro_mount"),
    "dictionary": {"type": "uri_folder", "path": "data", "mode": "direct"},
    "data": Input(type="uri_file", path="azureml:table:3"),
    "web": Input(type="uri_file", path="https://example.org/a.csv"),
    "blob": Input(type="uri_file", path="wasbs://c@a.blob.core.windows.net/x"),
    "lake": Input(type="uri_folder", path="abfss://c@a.dfs.core.windows.net/x"),
    "by_id": Input(type="uri_folder", path=f"{ASSETS}/data/t/versions/1"),
    "mlflow": Input(type="mlflow_model", path="azureml:model:3", mode="download"),
}
_IDENTITIES = {
    "token": (AmlTokenConfiguration(), {"identityType": "AMLToken"}),
    "managed": (ManagedIdentityConfiguration(client_id="c"), {"identityType": "Managed", "clientId": "c"}),
    "by object": (ManagedIdentityConfiguration(client_id="c", object_id="o"), None),
    "any": (ManagedIdentityConfiguration(), None),
    "fields": ({"type": "user_identity"}, {"identityType": "UserIdentity"}),
}
_POOLS = [
    NodePool("gpu", max_instance_count=2),
    NodePool("other", min_instance_count=1, max_instance_count=1),
    NodePool("serverless", max_instance_count=1, instance_type="Standard_NC6", job_tier="Spot"),
]
_SPOT = {"compute": None, "instance_type": "Standard_NC6", "job_tier": "Spot", "priority": "low"}

BODIES = {
    **FIELDS,
    **_commands(),
    **_environments(),
    **{
        f"identity {name}": Body({"identity": one}, {"n.identity": sent} if sent else {}, plain=name != "fields")
        for name, (one, sent) in _IDENTITIES.items()
    },
    "library": Body({"delivery": "ship"}, plain=False),
    "code that is a file": Body({"command": "python train.py", "code": "src/train.py"}),
    "literals": _literals(),
    "paths": Body({"inputs": _PATHS}),
    "inputs": Body(
        {"inputs": {f"{kind}_{mode}": Input(type=kind, path=URI, mode=mode) for kind, mode, _ in _KINDS}},
        {f"a.inputs.{kind}_{mode}": _sent(kind, wanted, "jobInputType") for kind, mode, wanted in _KINDS}
        | {
            f"component.inputs.{kind}_{mode}": {"type": kind} | ({"mode": mode} if mode else {})
            for kind, mode, _ in _KINDS
        },
    ),
    "outputs": Body(
        {"outputs": {f"{kind}_{mode}": Output(type=kind, path=URI, mode=mode) for kind, mode, _ in _KINDS_OUT}},
        {f"a.outputs.{kind}_{mode}": _sent(kind, wanted, "jobOutputType") for kind, mode, wanted in _KINDS_OUT},
    ),
    "outputs without more": Body(
        {"outputs": {"n": None, "e": {}, "d": {"type": "uri_file", "mode": "rw_mount"}}}, plain=False
    ),
    "output with a version": Body(
        {"outputs": {"o": Output(type="uri_folder", name="asset", version="3")}},
        {"n.outputs.o.assetVersion": "3"},
        ("service", "gang"),
    ),
    "services": Body({"services": SERVICES}, {"n.services": SERVICES_SENT}),
    "services of all nodes": Body(
        {"services": {"boards": TensorBoardJobService(log_dir="x", nodes="all"), "code": VsCodeJobService(nodes="all")}}
    ),
    "services with more": Body(
        {
            "services": {
                "lab": JupyterLabJobService(port=8888, properties={"a": "b"}),
                "other": JobService(type="tensor_board", properties={"logDir": "y"}),
                "dictionary": {"type": "ssh", "ssh_public_keys": "k"},
            }
        },
        plain=False,
    ),
    "docker_args as a list": Body(
        {"docker_args": ("--ipc", "host"), "shm_size": "8g"},
        {"n.resources.dockerArgsList": ["--ipc", "host"]},
        ("fan_out", "gang"),  # azure-ai-ml would drop the maximum of a service
        plain=False,
    ),
    "properties of the resources": Body(
        {"resources": {"properties": {"AISuperComputer": {"x": 1, "y": [1, "2"], "z": {"a": True}}, "other": "v"}}},
        plain=False,
    ),
    "serverless spot": Body(_SPOT, {"n.queueSettings": {"jobTier": "Spot", "priority": 1}}, plain=False),
    "serverless pipeline": Body(_SPOT, {"a.computeId": "<workspace>/computes/serverless"}, ("fan_out",), plain=False),
    "a fraction of a second": Body({"timeout": 0.5}, {"n.limits.timeout": "PT1S"}, plain=False),
    "serverless": Body({"compute": "serverless", "instance_type": "Standard_NC6"}),
    "one node": Body({"resources": {"max_instance_count": 1}}, plain=False),
    "node pools": Body(
        {"compute": _POOLS, "resources": {"max_instance_count": 4}, "priority": "high"}, {}, ("fan_out",), plain=False
    ),
}
