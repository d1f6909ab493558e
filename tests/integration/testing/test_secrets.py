"""No secret is revealed in bodies, logs, events, rows, reprs or errors."""

import functools
import json
from pathlib import Path

import pytest
import requests
from azure.ai.ml import Input
from typer.testing import CliRunner

from azureml_elastic import (
    ElasticCommandJob,
    ElasticDistribution,
    ElasticResources,
    NodePool,
    ReplacementPolicy,
    TableRendezvous,
)
from azureml_elastic.cli import app
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.table import open_table
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from azureml_elastic.testing.api.gateway import StaticCredential
from tests.support.node_server import FORKED
from tests.support.tiny_training import tiny_training
from tests.support.waiting import until

SUBMITTERS = {
    "AZURE_CLIENT_SECRET": "planted-client-secret",
    "AZUREML_RUN_TOKEN": "planted-run-token",
    "OTHER_CONNECTION": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=planted-account-key==;",
}
USERS = "planted-by-the-user"
SIGNATURE = "planted-signature"
REPLACED = "Replacement of nodes: submitted"
KEYS = ("planted-client-secret", "planted-run-token", "planted-account-key", USERS, SIGNATURE)
FAILS = "time.sleep(.1)\nif os.path.exists(FILE): raise RuntimeError('the training failed')"


def found_in(text):
    return [key for key in KEYS if key in text]


def make(**fields):
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": f"python train.py --key {USERS}",
            "environment": "anything@latest",
            "compute": [NodePool("spot", max_instance_count=2)],
            "environment_variables": {"THEIR_KEY": USERS},
            "replacement": ReplacementPolicy(interval=1, retry_after=1),
            "distribution": ElasticDistribution(max_restarts=0),
            **fields,
        }
    )


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    for name, value in SUBMITTERS.items():
        monkeypatch.setenv(name, value)


def bodies(workspace):
    """Return all documents that the workspace holds."""
    token = StaticCredential().get_token("https://management.azure.com/.default").token
    config = workspace.config
    root = (
        f"https://management.azure.com/subscriptions/{config['subscription_id']}/resourceGroups/"
        f"{config['resource_group']}/providers/Microsoft.MachineLearningServices/workspaces/{config['workspace_name']}"
    )
    jobs = requests.get(f"{root}/jobs?api-version=1", headers={"Authorization": f"Bearer {token}"}, timeout=30).json()
    found = [job["properties"] for job in jobs["value"]]
    for step in [step for body in found for step in (body.get("jobs") or {}).values()]:
        component = requests.get(
            f"https://management.azure.com{step['componentId']}?api-version=1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
        ).json()
        found.append(component["properties"])
    return found


def without_the_users_own(body):
    """Return a body without what its author has written into it: variables and the command."""
    if isinstance(body, dict):
        own = ("environment_variables", "environmentVariables", "command")
        return {key: without_the_users_own(value) for key, value in body.items() if key not in own}
    return [without_the_users_own(value) for value in body] if isinstance(body, list) else body


def test_a_run_that_loses_a_node_and_fails_reveals_no_secret(project, script, tmp_path, capfd):
    fails = tmp_path / "fails"
    script(tiny_training(FAILS.replace("FILE", repr(str(fails))), samples=8000))
    folder = tmp_path / "workspace"
    evictions = [Eviction(node=1, at_step=10)]
    options = {"pools": {"spot": Pool(nodes=2)}, "evictions": evictions, "folder": folder, "start": FORKED}
    with LocalWorkspace(**options) as workspace:
        Path("config.json").write_text(json.dumps(dict(workspace.config)))
        job = make()
        submitted = workspace.ml_client.jobs.create_or_update(job)
        nodes = functools.partial(workspace.ml_client.jobs.list, parent_job_name=submitted.name)
        until(lambda: any(REPLACED in workspace.log(node.name) for node in nodes()), timeout=240, interval=0.4)
        fails.touch()
        assert workspace.wait(submitted.name, 120) == "Failed"
        (first, _) = nodes()
        log = workspace.log(first.name)
        assert "the training failed" in log
        assert REPLACED in log
        documents = bodies(workspace)
        assert len([body for body in documents if body.get("jobType") == "Pipeline"]) == 2
        secrets = [workspace._storage.key, workspace._storage.blob_signature]
        rendezvous = TableRendezvous(endpoint=workspace.table_endpoint)
        table = open_table(rendezvous, submitted.name, NodeEnvironment.read())
        rows = json.dumps([[row.key, dict(row.value)] for row in table.query("")])
        table.close()
        shown = [CliRunner().invoke(app, [word, submitted.name]).output for word in ("status", "logs", "replace-nodes")]
        assert "the training failed" in shown[2]
    assert found_in(json.dumps([without_the_users_own(body) for body in documents])) == []
    assert found_in(json.dumps(documents)) == [USERS]  # where its author has put it, and nowhere else
    files = [path for place in ("logs", "nodes") for path in (folder / place).rglob("*") if path.is_file()]
    files = [path for path in files if "azureml_elastic_runtime" not in str(path)]  # our own source
    assert len(files) > 10
    for path in files:
        text = path.read_bytes().decode(errors="replace")
        assert found_in(text) == [], path
        assert [secret for secret in secrets if secret in text] == [], path
    for text in (rows, *shown, "".join(capfd.readouterr())):
        assert found_in(text) == []
        assert [secret for secret in secrets if secret in text] == []


def shapes(job):
    yield from (repr(job), str(job), job._repr_html_(), job.plan.to_json(), repr(job.plan))


def test_a_job_shows_no_secret_of_its_author():
    blob = f"https://account.blob.core.windows.net/c/data?sv=1&sig={SIGNATURE}"
    job = make(
        inputs={"data": Input(type="uri_folder", path=blob), "fields": {"type": "uri_folder", "path": blob}},
        outputs={"model": {"type": "uri_folder", "path": blob}},
        checkpoint={"path": None},
    )
    for text in shapes(job):
        assert found_in(text) == [], text


WRONG = {
    "variables": {"environment_variables": {"THEIR_KEY": {"value": USERS}}},
    "an unknown field": {"enviroment_variables": {"THEIR_KEY": USERS}},
    "a field of another place": {"docker_args": f"-e THEIR_KEY={USERS}"},
    "a number": {"resources": {"max_instance_count": "many"}},
    "no program": {"command": f"echo --key {USERS}"},
    "no script": {"command": f"python nothing.py --key {USERS}"},
    "a launcher": {"command": f"torchrun train.py --key {USERS}"},
    "two programs": {"command": f"python train.py --key {USERS} && python train.py --key {USERS}"},
    "a reserved name": {"inputs": {"azureml_elastic_x": USERS}},
    "an input of no kind": {"inputs": {"x": [USERS]}},
    "an output of no kind": {"outputs": {"x": [USERS]}},
    "an environment of no kind": {"environment": [USERS]},
    "docker arguments": {
        "resources": ElasticResources(max_instance_count=2, docker_args=("-e", f"K={USERS}"), locations=("a",)),
        "compute": "spot",
    },
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG.keys())
def test_what_is_refused_is_refused_without_its_secrets(fields, script):
    script("")
    with pytest.raises((ElasticError, ValueError)) as refusal:
        make(**fields).compile()
    assert found_in(str(refusal.value)) == []
