"""Parsing of the job documents that reach Azure ML."""

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.body import CommandBody, InputBody, OutputBody, PipelineBody, Reference, read_job

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
    assert body.steps["node_0"] == first
    assert body.steps["node_1"].compute == "other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"jobType": "Spark"}, "type 'Spark'"),
        ({"distribution": {"distributionType": "Mpi"}}, "'Mpi'"),
        ({"limits": {"timeout": "an hour"}}, "'an hour'"),
    ],
)
def test_unsupported_jobs_are_refused(change, words):
    with pytest.raises(UsageError, match=words):
        read_job({**COMMAND, **change}, dict)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({}, "no steps"),
        ({"a": {"type": "parallel"}}, "step 'a' is of type 'parallel'"),
        (
            {"a": {**NODE, "outputs": {"shared": {"value": "${{parent.outputs.none}}"}}}},
            "none of its pipeline's outputs",
        ),
        ({"a": {**NODE, "resources": {"instance_count": "${{parent.inputs.data}}"}}}, "literal inputs: lr"),
    ],
)
def test_a_pipeline_of_other_steps_is_refused(steps, words):
    with pytest.raises(UsageError, match=words):
        read_job({**PIPELINE, "jobs": steps}, {"/c/components/x/versions/1": SPEC}.__getitem__)


def literal(name, kind="inputs"):
    return {"value": f"${{{{parent.{kind}.{name}}}}}", "job_input_type": "literal"}


def test_steps_of_a_pipeline_within_a_pipeline_refer_to_the_steps_around_it():
    inner = {
        "inputs": {"d": {"type": "uri_folder"}, "nodes": {"type": "integer"}},
        "outputs": {"model": {"type": "uri_file"}},
        "jobs": {
            "t": {
                **NODE,
                "resources": {"instance_count": "${{parent.inputs.nodes}}"},
                "inputs": {"data": {**literal("d"), "mode": "Direct"}},
                "outputs": {"model": literal("model", "outputs")},
            }
        },
    }
    outer = {
        **PIPELINE,
        "inputs": {"nodes": {"value": "3", "jobInputType": "literal"}},
        "outputs": {"best": {"mode": "Upload", "jobOutputType": "uri_file"}},
        "jobs": {
            "first": {**NODE, "inputs": {}},
            "both": {
                "type": "pipeline",
                "componentId": "inner",
                "inputs": {"d": literal("first.outputs.shared", "jobs"), "nodes": literal("nodes")},
                "outputs": {"model": literal("best", "outputs")},
            },
        },
    }
    components = {"/c/components/x/versions/1": SPEC, "inner": inner}
    both = read_job(outer, components.__getitem__).steps["both"]
    step = both.steps["t"]
    assert step.inputs["data"] == InputBody(mode="direct", reference=Reference(("first",), "shared"))
    assert step.outputs["model"].reference == Reference(("both",), "model")
    assert both.outputs["model"] == OutputBody(mode="upload", type="uri_file", reference=Reference((), "best"))
    assert (step.nodes, step.compute) == (3, "spot")


SWEEP = {
    "jobType": "Sweep",
    "computeId": "/c/computes/spot",
    "searchSpace": {"lr": ["choice", [[0.1, 0.2]]]},
    "samplingAlgorithm": {"samplingAlgorithmType": "Grid"},
    "objective": {"goal": "minimize", "primaryMetric": "loss"},
    "limits": {"maxConcurrentTrials": 2, "maxTotalTrials": 3, "timeout": "PT10M", "trialTimeout": "PT1M"},
    "trial": {"command": "train ${{search_space.lr}}", "codeId": "/c", "resources": {"instanceCount": 2}},
}


def test_the_trials_of_a_sweep_have_its_limits_and_the_resources_of_its_trial():
    body = read_job(SWEEP, dict)
    assert (body.most_trials, body.most_at_once, body.timeout_s, body.trial.timeout_s) == (3, 2, 600, 60)
    assert (body.metric, body.maximize, body.trial.nodes, body.trial.compute) == ("loss", False, 2, "spot")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"searchSpace": {}}, "no search space"),
        ({"searchSpace": {"rate": ["choice", [[1]]]}}, "the search space has: rate"),
        ({"searchSpace": {"lr": ["uniform", [0, 1]]}}, "'lr' is of type 'uniform'"),
        ({"samplingAlgorithm": {"samplingAlgorithmType": "Bayesian"}}, "not bayesian"),
        ({"samplingAlgorithm": {"samplingAlgorithmType": "Random", "rule": "Sobol"}}, "rule sobol"),
        ({"searchSpace": {"lr": ["choice", [[{"a": 1}]]]}}, "texts, numbers and truth values"),
        ({"searchSpace": {"lr": ["cauchy", [1, 2]]}}, "no search expression"),
        ({"earlyTermination": {"policyType": "Bandit"}}, "policy 'Bandit'"),
    ],
)
def test_a_sweep_that_is_not_run_as_on_azure_is_refused(change, words):
    with pytest.raises(UsageError, match=words):
        read_job({**SWEEP, **change}, dict)
