"""Parsing of the job documents that reach Azure ML."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.api.body import CommandBody, InputBody, OutputBody, PipelineBody, read_job

DATA = "azureml://datastores/workspaceblobstore/paths/data/"
COMMAND = {
    "jobType": "Command",
    "command": "python train.py",
    "codeId": "/c/codes/a/versions/1",
    "computeId": "/c/computes/spot",
    "inputs": {
        "lr": {"value": "0.1", "jobInputType": "literal"},
        "data": {"uri": DATA, "mode": "ReadOnlyMount", "jobInputType": "uri_folder"},
        "runtime": {"uri": DATA, "mode": "Download", "jobInputType": "uri_folder"},
    },
    "outputs": {"model": {"jobOutputType": "uri_folder"}, "log": {"mode": "Upload", "jobOutputType": "uri_file"}},
    "environmentVariables": {"A": "1"},
    "distribution": {"processCountPerInstance": 2, "distributionType": "PyTorch"},
    "resources": {"instanceCount": 2, "maxInstanceCount": 5},
    "limits": {"timeout": "PT1H30M", "jobLimitsType": "Command"},
}
SPEC = {
    "type": "command",
    "command": "python train.py",
    "code": "azureml:/c/codes/a/versions/1",
    "inputs": {
        "data": {"type": "uri_folder", "mode": "download"},
        "lr": {"type": "number"},
        "seed": {"type": "integer", "default": 3},
        "left": {"type": "string", "optional": True},
    },
    "outputs": {"model": {"type": "uri_folder", "mode": "upload"}, "shared": {"type": "uri_folder"}},
}
NODE = {
    "type": "command",
    "componentId": "/c/components/x/versions/1",
    "resources": {"instance_count": 1},
    "environment_variables": {"A": "1"},
    "inputs": {
        name: {"value": f"${{{{parent.inputs.{name}}}}}", "job_input_type": "literal"} for name in ("data", "lr")
    },
    "outputs": {"shared": {"uri": DATA, "mode": "ReadWriteMount", "job_output_type": "uri_folder"}},
}
PIPELINE = {
    "jobType": "Pipeline",
    "computeId": "/c/computes/spot",
    "settings": {"continue_on_step_failure": True},
    "inputs": {
        "lr": {"value": "0.1", "jobInputType": "literal"},
        "data": {"uri": DATA, "mode": "ReadOnlyMount", "jobInputType": "uri_folder"},
    },
    "jobs": {"node_0": NODE, "node_1": {**NODE, "computeId": "/c/computes/other"}},
}


def test_a_command_job():
    assert read_job(COMMAND, dict) == CommandBody(
        command="python train.py",
        code="/c/codes/a/versions/1",
        inputs={
            "lr": InputBody(literal="0.1"),
            "data": InputBody(uri=DATA, mode="mount"),
            "runtime": InputBody(uri=DATA, mode="download"),
        },
        outputs={"model": OutputBody(), "log": OutputBody(mode="upload", type="uri_file")},
        environment_variables={"A": "1"},
        compute="spot",
        nodes=2,
        most_nodes=5,
        processes=2,
        distributed=True,
        timeout_s=5400,
    )


def test_a_pipeline_gives_its_steps_their_inputs_and_its_compute():
    body = read_job(PIPELINE, {"/c/components/x/versions/1": SPEC}.__getitem__)
    first = CommandBody(
        command="python train.py",
        code="azureml:/c/codes/a/versions/1",
        inputs={
            "data": InputBody(uri=DATA, mode="download"),
            "lr": InputBody(literal="0.1"),
            "seed": InputBody(literal="3"),
        },
        outputs={"model": OutputBody(mode="upload"), "shared": OutputBody(uri=DATA)},
        environment_variables={"A": "1"},
        compute="spot",
    )
    assert isinstance(body, PipelineBody)
    assert body.continue_on_step_failure
    assert body.steps["node_0"] == first
    assert body.steps["node_1"].compute == "other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"jobType": "Sweep"}, "type 'Sweep'"),
        ({"distribution": {"distributionType": "Mpi"}}, "'Mpi'"),
        ({"limits": {"timeout": "an hour"}}, "'an hour'"),
    ],
)
def test_unsupported_jobs_are_refused(change, words):
    with pytest.raises(UsageError, match=words):
        read_job({**COMMAND, **change}, dict)


@pytest.mark.parametrize("steps", [{}, {"a": {"type": "parallel"}}])
def test_a_pipeline_of_other_steps_is_refused(steps):
    with pytest.raises(UsageError):
        read_job({**PIPELINE, "jobs": steps}, dict)
