"""The exact documents that reach Azure ML, for each placement."""

from datetime import timedelta

import pytest
from azure.ai.ml import Input, Output
from azure.ai.ml.entities import Environment, JupyterLabJobService, UserIdentityConfiguration

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources
from tests.unit.submit.jobs import UNCACHED, small_job

START = "python ${{inputs.azureml_elastic_runtime}} --checkpoint-dir ${{outputs.azureml_elastic_checkpoints}} -- "
PROGRAM = "python train.py --lr ${{inputs.lr}} --data ${{inputs.data}}"
COMPILED = f"pip list && {START}{PROGRAM} | tee log"
RUNTIME = {
    "uri": "azureml://datastores/workspaceblobstore/paths/LocalUpload/<sha256>/azureml_elastic_runtime.pyz",
    "mode": "Download",
    "jobInputType": "uri_file",
}
CHECKPOINTS = "azureml://datastores/workspaceblobstore/paths/azureml-elastic/"
DATA = "azureml://datastores/workspaceblobstore/paths/data/"


def make(**fields):
    return small_job(
        **{
            "command": f"pip list && {PROGRAM} | tee log",
            "inputs": {"lr": 0.1, "data": Input(type="uri_folder", path=DATA, mode="ro_mount")},
            "outputs": {"model": Output(type="uri_folder")},
            "environment_variables": {"A": "1", "DATASET_MOUNT_CACHE_SIZE": "1 GB"},
            "distribution": ElasticDistribution(process_count_per_instance=4),
            "display_name": "digits",
            "experiment_name": "elastic",
            "description": "a test",
            "tags": {"team": "a"},
            "properties": {"p": "1"},
            **fields,
        }
    )


COMMON = {
    "displayName": "digits",
    "experimentName": "elastic",
    "description": "a test",
    "tags": {"team": "a"},
    "properties": {"p": "1"},
    "isArchived": False,
    "computeId": "<workspace>/computes/gpu",
    "inputs": {
        "lr": {"value": "0.1", "jobInputType": "literal"},
        "data": {"uri": DATA, "mode": "ReadOnlyMount", "jobInputType": "uri_folder"},
        "azureml_elastic_runtime": RUNTIME,
    },
}
"""Fields of the job of each placement."""


def variables(job):
    return {**UNCACHED, "A": "1", "DATASET_MOUNT_CACHE_SIZE": "1 GB", "AZUREML_ELASTIC_PLAN": job.plan.to_json()}


@pytest.fixture(params=["client", "jobs"])
def submit(request, client):
    """Both doors of the client."""
    return client.create_or_update if request.param == "client" else client.jobs.create_or_update


def test_fan_out_is_a_pipeline_of_single_nodes(submit, sent, components):
    job = make(
        identity=UserIdentityConfiguration(),
        timeout=timedelta(hours=1),
        resources=ElasticResources(
            max_instance_count=2, shm_size="8g", docker_args=("--ipc", "host"), properties={"AISuperComputer": {"x": 1}}
        ),
    )
    submit(job)
    node = {
        "type": "command",
        "_source": "BUILDER",
        "componentId": "<workspace>/components/azureml_anonymous/versions/<uuid>",
        "resources": {
            "instance_count": 1,
            "shm_size": "8g",
            "docker_args_list": ["--ipc", "host"],
            "properties": {"AISuperComputer": {"x": 1}},
        },
        "limits": {"timeout": "PT1H", "job_limits_type": "Command"},
        "identity": {"identity_type": "UserIdentity"},
        "environment_variables": variables(job),
        "inputs": {
            name: {"value": f"${{{{parent.inputs.{name}}}}}", "job_input_type": "literal"}
            for name in ("lr", "data", "azureml_elastic_runtime")
        },
        "outputs": {
            "model": {"job_output_type": "uri_folder"},
            "azureml_elastic_checkpoints": {
                "uri": CHECKPOINTS,
                "mode": "ReadWriteMount",
                "job_output_type": "uri_folder",
            },
        },
    }
    assert sent() == [
        {
            "properties": {
                **COMMON,
                "jobType": "Pipeline",
                "settings": {"continue_on_step_failure": True, "force_rerun": True, "_source": "CLASS"},
                "outputs": {"model": {"jobOutputType": "uri_folder"}},
                "jobs": {
                    "node_0": {
                        **node,
                        "display_name": "node_0",
                        "environment_variables": {**variables(job), "AZUREML_ELASTIC_FIRST_NODE": "1"},
                        "outputs": {
                            **node["outputs"],
                            "model": {"value": "${{parent.outputs.model}}", "type": "literal"},
                        },
                    },
                    "node_1": {**node, "display_name": "node_1"},
                },
            }
        }
    ]
    assert components() == [
        {
            "name": "azureml_anonymous",
            "version": "1",
            "type": "command",
            "_source": "BUILDER",
            "is_deterministic": False,
            "command": COMPILED.replace(" -- ", " --output model=${{outputs.model}} -- "),
            "code": "azureml:<workspace>/codes/<uuid>/versions/1",
            "environment": "azureml:<workspace>/environments/env/versions/1",
            "inputs": {
                "lr": {"type": "number"},
                "data": {"type": "uri_folder", "mode": "ro_mount"},
                "azureml_elastic_runtime": {"type": "uri_file", "mode": "download"},
            },
            "outputs": {
                "model": {"type": "uri_folder"},
                "azureml_elastic_checkpoints": {"type": "uri_folder", "mode": "rw_mount"},
            },
        }
    ]


def single(job, resources, **more):
    """The body of a job without a pipeline around it."""
    return {
        "properties": {
            **COMMON,
            "jobType": "Command",
            "environmentId": "<workspace>/environments/env/versions/1",
            "codeId": "<workspace>/codes/<uuid>/versions/1",
            "command": COMPILED,
            "environmentVariables": variables(job),
            "distribution": {"processCountPerInstance": 1, "distributionType": "PyTorch"},
            "resources": {"properties": {}, **resources},
            "outputs": {
                "model": {"jobOutputType": "uri_folder"},
                "azureml_elastic_checkpoints": {
                    "uri": CHECKPOINTS,
                    "mode": "ReadWriteMount",
                    "jobOutputType": "uri_folder",
                },
            },
            **more,
        }
    }


def test_service_asks_for_the_minimum_and_names_the_maximum(submit, sent):
    job = make(
        resources=ElasticResources(
            min_instance_count=2, max_instance_count=5, placement="service", docker_args="--ipc host"
        )
    )
    submit(job)
    assert sent() == [single(job, {"instanceCount": 2, "maxInstanceCount": 5, "dockerArgs": "--ipc host"})]


def test_gang_asks_for_the_maximum(submit, sent):
    job = make(
        resources=ElasticResources(max_instance_count=3, placement="gang"),
        services={"notebook": JupyterLabJobService(nodes="all")},
        identity=UserIdentityConfiguration(),
    )
    submit(job)
    assert sent() == [
        single(
            job,
            {"instanceCount": 3},
            identity={"identityType": "UserIdentity"},
            services={"notebook": {"jobServiceType": "JupyterLab", "nodes": {"nodesValueType": "All"}}},
        )
    ]


def test_one_node_is_one_job_without_a_distribution(submit, sent):
    job = make(resources=ElasticResources(max_instance_count=1))
    submit(job)
    body = single(job, {"instanceCount": 1})
    del body["properties"]["distribution"]
    assert sent() == [body]


def test_the_compute_given_at_submission_moves_every_node(client, sent):
    client.jobs.create_or_update(make(), compute="other", experiment_name="elsewhere", tags={"b": "2"})
    (body,) = sent()
    assert body["properties"]["computeId"] == "<workspace>/computes/other"
    assert "computes/gpu" not in str(body)
    assert body["properties"]["experimentName"] == "elsewhere"
    assert body["properties"]["tags"] == {"b": "2"}


def test_an_environment_that_has_the_library_gets_nothing_shipped(client, sent, components, workspace):
    client.jobs.create_or_update(
        make(delivery="environment", command="/opt/py/bin/python -u -m pkg", environment=Environment(image="image:1"))
    )
    (body,), (component,) = sent(), components()
    assert component["command"] == (
        "/opt/py/bin/python -m azureml_elastic.node "
        "--checkpoint-dir ${{outputs.azureml_elastic_checkpoints}} --output model=${{outputs.model}} "
        "-- /opt/py/bin/python -u -m pkg"
    )
    assert list(body["properties"]["inputs"]) == ["lr", "data"]
    assert not any("LocalUpload" in path for path in workspace.blobs)


@pytest.mark.parametrize("path", ["azureml://datastores/other/paths/mine/", "azureml:/subscriptions/s/x"])
def test_checkpoints_in_a_datastore_are_an_output(path):
    entity = make(checkpoint=CheckpointPolicy(path=path), resources=ElasticResources(max_instance_count=1)).compile()
    assert entity.outputs["azureml_elastic_checkpoints"].path == path
    assert "--checkpoint-dir ${{outputs.azureml_elastic_checkpoints}} --" in entity.command


@pytest.mark.parametrize(
    ("path", "word"), [("/mnt/a b", "'/mnt/a b'"), ("${{outputs.model}}/c", "${{outputs.model}}/c")]
)
def test_checkpoints_in_a_folder_of_the_nodes_are_passed_as_they_are(path, word):
    entity = make(checkpoint=CheckpointPolicy(path=path), resources=ElasticResources(max_instance_count=1)).compile()
    assert list(entity.outputs) == ["model"]
    assert f"--checkpoint-dir {word} -- python train.py" in entity.command


def test_the_variables_of_the_workers_become_placeholders_with_a_name_that_the_agent_receives():
    command = "pip list && python train.py --rank $RANK '$RANK' ${{inputs.a}} | tee log"
    single = ElasticResources(max_instance_count=1)
    entity = make(command=command, inputs={"a": "%{worker:X}"}, resources=single).compile()
    assert entity.command.endswith(
        " --placeholders worker2 -- python train.py --rank %{worker2:RANK} '$RANK' ${{inputs.a}} | tee log"
    )
