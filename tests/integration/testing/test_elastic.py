"""An elastic job, submitted as it would be to Azure ML: nothing in it names this machine."""

import shutil
from pathlib import Path

import pytest

from azureml_elastic import ElasticCommandJob, ElasticResources
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import audit_folder
from azureml_elastic.submit import ElasticCommandJob as Registered
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support.node_server import FORKED
from tests.support.paths import SAMPLES
from tests.support.whole_runs import together

SAMPLE = SAMPLES / "digits.py"


def make(placement, most):
    assert Registered is ElasticCommandJob
    return ElasticCommandJob(
        code="src",
        command="python digits.py --epochs 3 --step-delay 0.15",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(min_instance_count=2, max_instance_count=most, placement=placement),
        audit=True,
    )


@pytest.fixture(autouse=True)
def digits(project):
    shutil.copy(SAMPLE, project / "src")


def accuracy(text):
    (line,) = [line for line in text.splitlines() if "accuracy" in line]
    return float(line.split("accuracy ")[1].split()[0])


def test_a_job_whose_nodes_the_service_starts_loses_the_first_and_completes(tmp_path):
    """``test_replacement`` has the same of a job whose nodes are jobs of their own, with a notice, too."""
    eviction = Eviction(node=0, at_step=25, notice=0)
    with LocalWorkspace(evictions=[eviction], folder=tmp_path / "workspace", start=FORKED) as workspace:
        client = workspace.ml_client
        job = client.jobs.create_or_update(make("service", most=3))
        client.jobs.stream(job.name)
        assert client.jobs.get(job.name).status == "Completed"
        assert len(workspace.evicted) == 1
        assert accuracy(workspace.log(job.name)) > 0.5
        client.jobs.download(job.name, all=True)
    paths = together(tmp_path / "workspace", tmp_path / "together")
    assert audit_folder(paths, Picture.of(read_events(paths.events))).exactly_once
    kept = list(Path("named-outputs/azureml_elastic_checkpoints").rglob("manifest.json"))
    assert any("step-000000000069" in str(path) for path in kept)
    assert list(Path("artifacts/outputs/azureml-elastic/events").glob("*.jsonl"))


def test_a_gang_that_the_service_starts_again_goes_on_from_its_checkpoint():
    eviction = Eviction(node=1, at_step=15)
    pools = {"cluster": Pool(nodes=2)}
    with LocalWorkspace(evictions=[eviction], pools=pools, requeue=True, start=FORKED) as workspace:
        job = workspace.ml_client.jobs.create_or_update(make("gang", most=2))
        assert workspace.wait(job.name, 200) == "Completed", workspace.log(job.name)
        text = workspace.log(job.name)
    starts = [int(line.rpartition(" ")[2]) for line in text.splitlines() if "continuing after step" in line]
    assert 0 in starts
    assert max(starts) >= 15
