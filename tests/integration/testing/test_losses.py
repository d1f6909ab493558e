"""Evicted machines, and how the service responds."""

import time
from functools import partial
from pathlib import Path

import pytest
from azure.ai.ml import Output, command, dsl

from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support.waiting import until

SHARED = Output(type="uri_folder", mode="rw_mount", path="azureml://datastores/workspaceblobstore/paths/shared/")

# The first attempt waits for its eviction; later ones find its file.
SECOND_TIME = """
import os, sys, time
from pathlib import Path
place = Path(sys.argv[1], os.environ.get("NODE_RANK", "0"))
if place.exists():
    place.with_suffix(".again").write_text(os.environ["AZUREML_CR_COMPUTE_CONTEXT"])
    sys.exit(0)
place.write_text("")
print("waiting", place.name, flush=True)
while not Path(sys.argv[1], "1.again").exists() or place.name != "0":
    time.sleep(0.02)
"""

# Queries the metadata service of its machine as Azure documents it, and exits after a notice.
LISTENS = """
import json, os, sys, time, urllib.request
def ask(path):
    address = os.environ["AZUREML_ELASTIC_SCHEDULED_EVENTS"] + path
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Metadata": "true"})) as answer:
        return answer.read().decode()
name = ask("/instance/compute/name?api-version=2021-02-01&format=text")
while True:
    events = json.loads(ask("/scheduledevents?api-version=2020-07-01"))["Events"]
    if any(event["EventType"] == "Preempt" and name in event["Resources"] for event in events):
        print("notice")
        sys.exit(143)
    time.sleep(0.02)
"""


def make(**fields):
    return command(
        command="python train.py ${{outputs.shared}}",
        code="src",
        environment="anything@latest",
        compute="cluster",
        outputs={"shared": SHARED},
        **fields,
    )


def elastic(least, most):
    job = make(distribution={"type": "pytorch", "process_count_per_instance": 1}, instance_count=least)
    job.resources.max_instance_count = most
    return job


def evict_when_waiting(workspace, name, node):
    while f"waiting {node}" not in workspace.log(name):
        time.sleep(0.02)
    workspace.evict(Eviction(node=node, after=0, notice=0))


def test_a_preempted_job_fails(script):
    script("import time; time.sleep(1000)")
    with LocalWorkspace(evictions=[Eviction(node=0, after=0, notice=0)]) as workspace:
        job = workspace.ml_client.jobs.create_or_update(make())
        assert workspace.wait(job.name, 60) == "Failed"
        with pytest.raises(Exception, match="PreemptionError"):
            workspace.ml_client.jobs.stream(job.name)
        (evicted,) = workspace.evicted
        assert evicted.job == job.name


def test_a_preempted_job_is_started_again_where_the_service_does_so(script):
    script(SECOND_TIME)
    pools = {"cluster": Pool(nodes=1)}
    with LocalWorkspace(pools=pools, requeue=True) as workspace:
        job = workspace.ml_client.jobs.create_or_update(make())
        evict_when_waiting(workspace, job.name, 0)
        assert workspace.wait(job.name, 60) == "Completed", workspace.log(job.name)
        workspace.ml_client.jobs.download(job.name, output_name="shared")
    assert '"run_attempt_count": 2' in Path("named-outputs/shared/0.again").read_text()


def test_the_service_replaces_a_lost_node_of_an_elastic_job_and_the_others_go_on(script):
    script(SECOND_TIME)
    pools = {"cluster": Pool(nodes=2, provisioning=0.2)}
    with LocalWorkspace(pools=pools) as workspace:
        job = workspace.ml_client.jobs.create_or_update(elastic(1, 2))
        evict_when_waiting(workspace, job.name, 1)
        assert workspace.wait(job.name, 60) == "Completed", workspace.log(job.name)
        assert [evicted.machine for evicted in workspace.evicted] == ["cluster-1"]


def test_a_scheduled_event_reaches_the_node_of_its_machine_alone(script):
    script(LISTENS)
    step = make()

    @dsl.pipeline
    def both():
        step()
        step()

    pipeline = both()
    pipeline.settings.default_compute = "cluster"
    pipeline.settings.continue_on_step_failure = True
    with LocalWorkspace() as workspace:
        client = workspace.ml_client
        job = client.jobs.create_or_update(pipeline)
        workspace.evict(Eviction(node=1, after=0, notice=1000))
        children = partial(client.jobs.list, parent_job_name=job.name)
        until(lambda: any(child.status == "Failed" for child in children()), interval=0.4)
        first, second = client.jobs.list(parent_job_name=job.name)
        assert (first.status, second.status) == ("Running", "Failed")
        assert workspace.log(second.name) == "notice\n"
        client.jobs.begin_cancel(job.name)
        assert workspace.wait(job.name, 60) == "Canceled"


def test_a_node_that_ignores_the_notice_is_gone_when_its_notice_is_over(script):
    script("import time; time.sleep(1000)")
    with LocalWorkspace(evictions=[Eviction(node=0, after=0, notice=0.5)]) as workspace:
        job = workspace.ml_client.jobs.create_or_update(make())
        assert workspace.wait(job.name, 60) == "Failed"


def test_a_dedicated_machine_is_not_taken_away(script):
    script("import time; time.sleep(1)")
    pools = {"cluster": Pool(nodes=1, tier="dedicated")}
    with LocalWorkspace(evictions=[Eviction(node=0, after=0, notice=0)], pools=pools) as workspace:
        job = workspace.ml_client.jobs.create_or_update(make())
        assert workspace.wait(job.name, 60) == "Completed"
        assert workspace.evicted == ()


def test_a_pipeline_that_does_not_continue_ends_with_its_first_failure(script):
    script("import os, sys, time; sys.exit(3) if sys.argv[2:] else time.sleep(1000)")
    good, bad = make(), make()
    bad.component.command = "python train.py ${{outputs.shared}} bad"

    @dsl.pipeline
    def both():
        good()
        bad()

    pipeline = both()
    pipeline.settings.default_compute = "cluster"
    with LocalWorkspace() as workspace:
        job = workspace.ml_client.jobs.create_or_update(pipeline)
        assert workspace.wait(job.name, 60) == "Failed"
        states = {child.status for child in workspace.ml_client.jobs.list(parent_job_name=job.name)}
        assert states == {"Canceled", "Failed"}
