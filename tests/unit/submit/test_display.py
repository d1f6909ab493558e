"""What a job looks like, in a terminal and in a notebook."""

from datetime import timedelta

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources
from azureml_elastic.submit.job import ElasticCommandJob

SMALL = {"command": "python train.py", "environment": "e:1", "resources": ElasticResources(max_instance_count=1)}
SECRET = "hunter2"


class UserIdentity:
    pass


def full():
    return ElasticCommandJob(
        name="run-1",
        experiment_name="digits",
        code="src",
        command=f"pip list && python -u -m pkg.train --token {SECRET} | tee log",
        environment="azureml:env:1",
        compute="gpu",
        inputs={
            "data": {"type": "uri_folder", "path": f"https://me:{SECRET}@account.blob.core.windows.net/x?sig={SECRET}"},
            "key": SECRET,
            "lr": 0.1,
        },
        outputs={"model": {"type": "custom_model"}, "log": None},
        environment_variables={"WANDB_API_KEY": SECRET, "A": SECRET},
        resources=ElasticResources(min_instance_count=2, max_instance_count=8, instance_type="Standard_NC6"),
        distribution=ElasticDistribution(process_count_per_instance=4),
        checkpoint=CheckpointPolicy(path="azureml://datastores/mine/paths/c/"),
        services={"board": object()},
        identity=UserIdentity(),
        timeout=timedelta(hours=1),
        tags={"team": "<b>"},
    )


def test_a_small_job_has_a_few_lines():
    assert str(ElasticCommandJob(**SMALL)).splitlines() == [
        "ElasticCommandJob",
        "  program           python train.py",
        "  environment       e:1",
        "  nodes             1, placement gang",
        "  compute           serverless",
        "  workers per node  one per GPU",
        "  checkpoints       default blob store",
    ]


def test_what_was_given_is_shown():
    assert str(full()).splitlines() == [
        "ElasticCommandJob",
        "  name                   run-1",
        "  experiment             digits",
        "  program                python -m pkg.train …",
        "  code                   src",
        "  environment            azureml:env:1",
        "  nodes                  2 to 8, placement fan_out",
        "  compute                gpu, Standard_NC6",
        "  workers per node       4",
        "  inputs                 data: uri_folder https://account.blob.core.windows.net/x, key: str, lr: float",
        "  outputs                model: custom_model, log: uri_folder",
        "  environment variables  A, WANDB_API_KEY",
        "  services               board",
        "  identity               UserIdentity",
        "  timeout                1:00:00",
        "  checkpoints            azureml://datastores/mine/paths/c/",
        "  tags                   team=<b>",
    ]


def test_a_notebook_shows_the_same_as_an_escaped_table():
    html = full()._repr_html_()
    assert html.startswith("<table><caption>ElasticCommandJob</caption><tr><th")
    assert html.count("<tr>") == len(str(full()).splitlines()) - 1
    assert "team=&lt;b&gt;" in html


def test_no_secret_is_shown():
    job = full()
    assert SECRET not in str(job)
    assert SECRET not in job._repr_html_()
    assert SECRET not in repr(job)
    assert repr(job).startswith("ElasticCommandJob(")


def test_a_job_that_cannot_run_can_be_looked_at():
    assert "no program that can be started" in str(ElasticCommandJob(**SMALL | {"command": "bash run.sh"}))
