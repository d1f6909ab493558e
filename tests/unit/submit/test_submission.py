"""Submitting changes nothing but the workspace, and can be repeated."""

import copy
import json
from datetime import timedelta
from unittest.mock import create_autospec

import pytest
from azure.ai.ml import Input, MLClient, Output
from azure.ai.ml.entities import (
    Command,
    Environment,
    JupyterLabJobService,
    ManagedIdentityConfiguration,
    PipelineJob,
)
from azure.ai.ml.operations import JobOperations

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import CommandError
from azureml_elastic.submit import ElasticCommandJob

PLACEMENTS = ["fan_out", "service", "gang"]


def make(placement="fan_out", **fields):
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": "python train.py ${{inputs.data}} ${{inputs.table}} ${{inputs.epochs}} ${{inputs.lr}}",
            "environment": Environment(image="image:1", conda_file={"name": "a", "dependencies": ["python"]}),
            "compute": "gpu",
            "inputs": {
                "data": Input(type="uri_folder", path="data"),
                "table": {"type": "uri_file", "path": "azureml://datastores/workspaceblobstore/paths/t.csv"},
                "epochs": 3,
                "lr": Input(type="number", default=0.5),
            },
            "outputs": {"model": Output(type="uri_folder", mode="upload"), "log": {"type": "uri_file"}},
            "identity": ManagedIdentityConfiguration(client_id="client"),
            "services": {"lab": JupyterLabJobService()},
            "timeout": timedelta(minutes=5),
            "resources": ElasticResources(min_instance_count=2, max_instance_count=3, placement=placement),
            **fields,
        }
    )


def held(job):
    """Everything that the job holds, objects of azure-ai-ml by what they are made of."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if type(value).__module__.startswith("azure."):
            return type(value).__name__, copy.deepcopy({key: plain(one) for key, one in vars(value).items()})
        return value if isinstance(value, (str, int, float, tuple, type(None), timedelta)) else repr(type(value))

    return plain(job.model_dump())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_submitted_job_is_as_it_was(client, placement):
    job = make(placement)
    before, objects = held(job), {name: id(value) for name, value in job.inputs.items()}
    client.jobs.create_or_update(job)
    assert held(job) == before
    assert {name: id(value) for name, value in job.inputs.items()} == objects


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_submitting_twice_gives_two_runs_with_equal_bodies(client, sent, workspace, placement):
    job = make(placement)
    first, second = client.jobs.create_or_update(job), client.jobs.create_or_update(job)
    assert first.name != second.name
    one, other = sent()
    for body in (one, other):
        assert "AZUREML_ELASTIC_RUN_ID" not in json.dumps(body)
        assert '\\"name\\":null' in json.dumps(body)
        assert first.name not in json.dumps(body["properties"].get("jobs", {}))
    one["properties"].pop("displayName", None)
    other["properties"].pop("displayName", None)
    assert one == other


def test_the_library_is_uploaded_once(client, workspace):
    client.jobs.create_or_update(make())
    uploads = [request for request in workspace.requests if request.startswith("PUT") and "_runtime" in request]
    written = {request.partition("?")[0] for request in uploads}
    assert len(written) == 1, written
    assert written.pop().endswith("/azureml_elastic_runtime.pyz")
    workspace.requests.clear()
    client.jobs.create_or_update(make("gang"))
    assert not [request for request in workspace.requests if request.startswith("PUT") and "_runtime" in request]


def test_children_are_one_component(client, workspace):
    client.jobs.create_or_update(make(resources=ElasticResources(max_instance_count=20)))
    assert len([key for key in workspace.entities if key.startswith("/components/")]) == 1
    (body,) = workspace.jobs
    assert list(body["properties"]["jobs"]) == [f"node_{index}" for index in range(20)]


@pytest.mark.parametrize(("placement", "kind"), [("fan_out", PipelineJob), ("service", Command), ("gang", Command)])
def test_what_was_compiled_can_be_submitted_by_public_names_alone(client, sent, placement, kind):
    job = make(placement, name="the-run", display_name="d")
    entity, again = job.compile(), job.compile()
    assert isinstance(entity, kind)
    assert entity is not again
    client.jobs.create_or_update(entity)
    client.jobs.create_or_update(again)
    client.jobs.create_or_update(job)
    by_hand, again_by_hand, by_itself = sent()
    assert by_hand == again_by_hand == by_itself


def test_a_named_job_keeps_its_name(client):
    assert client.jobs.create_or_update(make(name="the-run")).name == "the-run"


def test_a_job_that_cannot_run_leaves_nothing_behind(client, workspace):
    with pytest.raises(CommandError, match=r"'nowhere\.py'"):
        client.jobs.create_or_update(make(command="python nowhere.py"))
    assert workspace.requests == []


def test_a_client_made_by_autospec_takes_the_job():
    client = create_autospec(MLClient, instance=True)
    client.jobs = create_autospec(JobOperations, instance=True)
    job = make()
    client.create_or_update(job)
    client.jobs.create_or_update(job)
    client.create_or_update.assert_called_once_with(job)
    client.jobs.create_or_update.assert_called_once_with(job)
