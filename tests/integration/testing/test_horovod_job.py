"""A job with Horovod, submitted as it would be to Azure ML, whose machines are evicted."""

import shutil

import pytest

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support.horovod_trace import Trace
from tests.support.paths import PROGRAMS

pytest.importorskip("horovod", reason="Horovod is not installed")


def test_no_batch_is_trained_again_after_an_eviction_with_notice_and_no_commit_is_lost_without(project, tmp_path):
    shutil.copy(PROGRAMS / "horovod_program.py", project / "src" / "program.py")
    job = ElasticCommandJob(
        code="src",
        command=f"python program.py {tmp_path}",
        environment="anything@latest",
        compute="spot",
        resources=ElasticResources(min_instance_count=1, max_instance_count=3),
        distribution=ElasticDistribution(framework="horovod", process_count_per_instance=1),
    )
    trace = Trace(tmp_path)
    with LocalWorkspace(pools={"spot": Pool(nodes=3)}) as workspace:
        client = workspace.ml_client
        submitted = client.jobs.create_or_update(job)
        trace.wait_for(size=3, entries=1)
        nodes = list(client.jobs.list(parent_job_name=submitted.name))
        first, other, _ = sorted(range(3), key=lambda node: "rank 0 of 3 nodes" not in workspace.log(nodes[node].name))
        workspace.evict(Eviction(node=other, after=0))
        trace.wait_for(size=2, entries=2)
        workspace.evict(Eviction(node=first, after=0, notice=0))
        trace.wait_for(size=1, entries=3)
        trace.wait_for_commit(200)
        (tmp_path / "enough").touch()
        assert workspace.wait(submitted.name, 120) == "Completed", workspace.log(submitted.name)
    assert float((tmp_path / "result").read_text()) < 0.1
    _, left, lost = trace.entries()
    assert trace.last_commit(before=left) == left.batch
    assert trace.last_commit(before=lost) - lost.batch in (0, 5)  # a commit is recorded before all workers have kept it
    assert lost.pids < left.pids
