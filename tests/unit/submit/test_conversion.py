"""An existing command job of azure-ai-ml as an elastic one, in one line."""

import pytest
from azure.ai.ml import Input, MpiDistribution, Output, PyTorchDistribution, RayDistribution, command
from azure.ai.ml.entities import (
    CommandJob,
    Environment,
    JobResourceConfiguration,
    JupyterLabJobService,
    PipelineJob,
    TensorBoardJobService,
    UserIdentityConfiguration,
)
from pydantic import ValidationError

from azureml_elastic.config import ElasticDistribution, ElasticResources
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit import ElasticCommandJob
from azureml_elastic.submit.conversion import refuse_unknown
from azureml_elastic.submit.sdk_hooks import fields_of_command

TWO = ElasticResources(max_instance_count=2)


def sdk_job(**fields):
    return command(**{"command": "python train.py", "code": "src", "environment": "e:1", "compute": "gpu", **fields})


def everything(**fields):
    return sdk_job(
        **{
            "name": "run-1",
            "description": "d",
            "tags": {"t": "1"},
            "properties": {"p": "1"},
            "display_name": "shown",
            "experiment_name": "tried",
            "environment": Environment(image="image:1"),
            "environment_variables": {"A": "1"},
            "distribution": PyTorchDistribution(process_count_per_instance=4),
            "inputs": {"x": Input(type="uri_folder", path="src"), "lr": 0.1, "n": 3, "on": True, "s": "a b"},
            "outputs": {"o": Output(type="uri_file", name="asset"), "p": None},
            "instance_count": 3,
            "instance_type": "Standard_NC6",
            "locations": ["westeurope"],
            "docker_args": "--ipc host",
            "shm_size": "8g",
            "timeout": 60,
            "identity": UserIdentityConfiguration(),
            "services": {"lab": JupyterLabJobService(), "board": TensorBoardJobService(log_dir="x")},
            "job_tier": "spot",
            "priority": "High",
            "parent_job_name": "above",
            **fields,
        }
    )


def plain(value):
    """Return an object of azure-ai-ml as what it is made of; the oldest release makes a serializer for each."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name != "_serialize"}
    return plain(dict(vars(value))) if type(value).__module__.startswith("azure.") else value


def as_command_job(job):
    return CommandJob(
        **{name: getattr(job, name) for name in ("name", "command", "code", "environment", "compute", "limits")},
        inputs={"lr": 0.1, "x": Input(type="uri_folder", path="src")},
        resources=JobResourceConfiguration(instance_count=3, properties={"a": {"b": 1}}),
    )


def test_the_given_job_is_not_changed_and_nothing_is_shared(client):
    given = everything()
    before = plain(given._to_job())
    job = ElasticCommandJob.from_command(given, resources=ElasticResources(max_instance_count=2, placement="gang"))
    client.jobs.create_or_update(job)
    assert plain(given._to_job()) == before
    assert given.inputs["x"].path == "src"
    for mine, theirs in ((job.environment, given.environment), (job.services["lab"], given.services["lab"])):
        assert mine is not theirs


def test_a_command_job_is_taken_over(folder):
    job = ElasticCommandJob.from_command(as_command_job(everything()))
    assert job.resources == ElasticResources(max_instance_count=3, properties={"a": {"b": 1}})
    assert (job.inputs["lr"], job.inputs["x"].path) == (0.1, str(folder / "src"))


@pytest.mark.parametrize(
    ("command", "count", "wanted"),
    [
        ("python train.py", None, "auto"),
        ("python train.py", 8, 8),
        ("torchrun --nproc_per_node 2 train.py", None, 2),
        ("torchrun --nproc_per_node 2 train.py", 1, 2),
        ("torchrun --nproc_per_node 1 train.py", 2, 2),
        ("deepspeed train.py", 1, "auto"),
        ("torchrun train.py", 1, 1),
        ("accelerate launch train.py", None, "auto"),
        ("torchrun train.py", None, 1),
        ("torchrun --nnodes 2 train.py", 4, 4),
        ("torchrun --nproc_per_node gpu train.py", None, "auto"),
    ],
)
def test_the_distribution_and_the_launcher_say_how_many_workers_a_node_has(command, count, wanted):
    distribution = PyTorchDistribution(process_count_per_instance=count) if count else None
    job = ElasticCommandJob.from_command(sdk_job(command=command, distribution=distribution), resources=TWO)
    assert job.distribution.process_count_per_instance == wanted


def test_a_distribution_given_is_completed_by_the_launcher():
    old = sdk_job(command="torchrun --nproc_per_node ${{inputs.n}} --max-restarts 7 train.py", inputs={"n": 4})
    wanted = ElasticDistribution(process_count_per_instance=4, max_restarts=7)
    for given in (
        {"process_count_per_instance": 4},
        ElasticDistribution(max_restarts=7),
        ElasticDistribution(process_count_per_instance=4),
    ):
        assert ElasticCommandJob.from_command(old, resources=TWO, distribution=given).distribution == wanted
    old_without_count = sdk_job(command="torchrun train.py")
    for given, count in (({"max_restarts": 7}, 1), ({"process_count_per_instance": 4}, 4)):
        job = ElasticCommandJob.from_command(old_without_count, resources=TWO, distribution=given)
        assert job.distribution.process_count_per_instance == count
    with pytest.raises(SubmitError) as caught:
        ElasticCommandJob.from_command(old, resources=TWO, distribution={"process_count_per_instance": 2})
    assert "distribution= starts 2 workers on each node, and the launcher in the command 4" in str(caught.value)
    assert "process_count_per_instance=4)" in str(caught.value)


def test_fields_and_distribution_given_go_before_those_of_the_job():
    job = ElasticCommandJob.from_command(
        everything(command="torchrun --log-dir x train.py", distribution=MpiDistribution()),
        resources=ElasticResources(max_instance_count=2, shm_size="64g"),
        distribution=ElasticDistribution(max_restarts=9),
        command="python -m pkg",
        compute="other",
        name=None,
        audit=True,
    )
    assert (job.command, job.compute, job.name, job.audit) == ("python -m pkg", "other", None, True)
    assert (job.resources.shm_size, job.resources.instance_type) == ("64g", "Standard_NC6")
    assert job.distribution == ElasticDistribution(max_restarts=9)


def test_without_resources_the_nodes_of_the_job_are_the_most():
    assert ElasticCommandJob.from_command(sdk_job(instance_count=4)).resources == ElasticResources(max_instance_count=4)


def test_without_resources_native_elasticity_is_taken_over():
    given = sdk_job()
    given.resources = JobResourceConfiguration(instance_count=2, max_instance_count=6)
    wanted = ElasticResources(min_instance_count=2, max_instance_count=6)
    assert ElasticCommandJob.from_command(given).resources == wanted


def test_ray_is_carried():
    given = sdk_job(distribution=RayDistribution(port=6379), instance_count=4)
    assert ElasticCommandJob.from_command(given).distribution == ElasticDistribution(framework="ray")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (sdk_job, ["instance_count=1", "resources=ElasticResources(max_instance_count=...)"]),
        (lambda: sdk_job(distribution=MpiDistribution(), instance_count=2), ["'mpi'", 'framework="horovod"']),
        (
            lambda: sdk_job(distribution=RayDistribution(head_node_additional_args="--num-cpus 4"), instance_count=2),
            ["head_node_additional_args='--num-cpus 4'", 'ElasticDistribution(framework="ray")'],
        ),
        (
            lambda: sdk_job(
                command="torchrun --nproc_per_node 4 train.py",
                instance_count=2,
                distribution=PyTorchDistribution(process_count_per_instance=2),
            ),
            ["2 processes", "launcher", "4", "process_count_per_instance=..."],
        ),
        (lambda: sdk_job(environment=None, instance_count=2), ["no environment"]),
        (lambda: "job.yml", ["got a str", "load_job"]),
        (lambda: PipelineJob(jobs={}), ["got a PipelineJob"]),
        (lambda: CommandJob(id="/subscriptions/s/jobs/run-1", name="run-1", command="c"), ["run-1", "was submitted"]),
        (lambda: command(component="azureml:c:1"), ["component", "azureml:c:1"]),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(make, parts):
    with pytest.raises(SubmitError) as caught:
        ElasticCommandJob.from_command(make())
    for part in parts:
        assert part in str(caught.value)


def test_a_launcher_that_cannot_be_translated_is_refused_with_the_command_to_write():
    with pytest.raises(CommandError, match=r"command='python train\.py --lr 1'"):
        ElasticCommandJob.from_command(sdk_job(command="accelerate launch --use_fsdp train.py --lr 1"), resources=TWO)


def test_a_change_that_is_no_field_is_refused_by_name():
    with pytest.raises(ValidationError, match="shm_size is no field of an elastic job"):
        ElasticCommandJob.from_command(sdk_job(), resources=TWO, shm_size="8g")


@pytest.mark.parametrize("attribute", ["brand_new", "_brand_new"])
def test_a_field_of_a_newer_sdk_is_refused_by_name_where_it_is_used(attribute):
    with pytest.raises(SubmitError, match="brand_new=3 cannot be carried"):
        refuse_unknown({attribute: 3, "name": "n"}, {"name", "brand_new"})
    refuse_unknown({attribute: None, "name": "n"}, {"name", "brand_new"})


def test_every_field_of_this_sdk_is_known():
    refuse_unknown(dict.fromkeys(fields_of_command(), 1), fields_of_command())
