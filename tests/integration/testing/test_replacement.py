"""Runs that replace lost nodes, fall back to another pool, and cancel surplus nodes."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from azureml_elastic import ElasticCommandJob, ElasticResources, NodePool, ReplacementPolicy
from azureml_elastic.ledger.events import RoundEntered
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import audit_folder
from azureml_elastic.submit import ElasticCommandJob as Registered
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support import waiting
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.whole_runs import together

SAMPLE = SAMPLES / "digits.py"
SPOT = NodePool("spot", max_instance_count=2)
DEDICATED = NodePool("dedicated", min_instance_count=1, max_instance_count=3)
THREE = ElasticResources(min_instance_count=1, max_instance_count=3)

MACHINES = {"spot": Pool(nodes=2, refill=None), "dedicated": Pool(nodes=3, tier="dedicated")}


def make(*pools, epochs, resources=THREE, program="digits.py --step-delay 0.1", **replacement):
    assert Registered is ElasticCommandJob
    return ElasticCommandJob(
        code="src",
        command=f"python {program} --epochs {epochs}",
        environment="anything@latest",
        compute=pools or "spot",
        resources=resources,
        replacement=ReplacementPolicy(**{"interval": 1, "fallback_after": 2, "retry_after": 1, **replacement}),
        audit=True,
    )


@pytest.fixture(autouse=True)
def programs(project):
    for program in (SAMPLE, PROGRAMS / "chaos_train.py", PROGRAMS / "pace.py"):
        shutil.copy(program, project / "src")


def nodes_of(client, name):
    """Return the state of each node job of a run: those of its first job and those that were asked for later."""
    found = {}
    for job in client.jobs.list():
        if job.name == name or job.name.startswith(f"{name}-"):
            found |= {child.display_name: child.status for child in client.jobs.list(parent_job_name=job.name)}
    return found


def node_of(client, name, node):
    """Return the job of a node."""
    for job in client.jobs.list():
        for child in client.jobs.list(parent_job_name=job.name):
            if job.name.startswith(name) and child.display_name == node:
                return child
    raise AssertionError(node)


until = partial(waiting.until, timeout=200, interval=0.4)  # each look is a request by the SDK


def test_two_evicted_spot_nodes_are_replaced_by_dedicated_ones_and_each_sample_is_seen_once(tmp_path):
    evictions = [Eviction(node=0, at_step=15), Eviction(node=1, at_step=30, notice=0)]
    with LocalWorkspace(pools=MACHINES, evictions=evictions, folder=tmp_path / "workspace", start=FORKED) as workspace:
        client = workspace.ml_client
        run = client.jobs.create_or_update(make(SPOT, DEDICATED, epochs=6, program="chaos_train.py --full 3"))
        assert workspace.wait(run.name, 400) == "Completed"
        assert len(workspace.evicted) == 2
        until(
            lambda: all(status in ("Completed", "Failed", "Canceled") for status in nodes_of(client, run.name).values())
        )
        nodes = nodes_of(client, run.name)
        assert {name: status for name, status in nodes.items() if name in ("spot_0", "spot_1")} == {
            "spot_0": "Failed",
            "spot_1": "Failed",
        }
        assert [nodes[f"dedicated_{number}"] for number in range(3)] == ["Completed"] * 3
        # Asked for, and let go when the run had ended: no spot machine came.
        assert {nodes[name] for name in nodes.keys() - {"spot_0", "spot_1"} if name.startswith("spot")} == {"Canceled"}
        floor = node_of(client, run.name, "dedicated_0")
        client.jobs.download(floor.name, all=True)
    paths = together(tmp_path / "workspace", tmp_path / "together")
    events = read_events(paths.events)
    last = max((event for event in events if isinstance(event, RoundEntered)), key=lambda event: event.round)
    assert last.world_size == 3
    assert audit_folder(paths, Picture.of(events)).exactly_once
    assert list(Path("named-outputs/azureml_elastic_checkpoints").rglob("manifest.json"))
    assert list(Path("artifacts/outputs/azureml-elastic/events").glob("*.jsonl"))


def test_a_dedicated_node_goes_when_the_spot_node_that_it_stands_in_for_has_come():
    machines = {"spot": Pool(nodes=1, refill=None), "dedicated": Pool(nodes=2, tier="dedicated")}
    pools = (NodePool("spot", max_instance_count=1), NodePool("dedicated", min_instance_count=1, max_instance_count=2))
    job = make(*pools, resources=ElasticResources(max_instance_count=2), epochs=40)
    with LocalWorkspace(pools=machines, evictions=[Eviction(node=0, at_step=5)], start=FORKED) as workspace:
        client = workspace.ml_client
        run = client.jobs.create_or_update(job)
        until(lambda: nodes_of(client, run.name).get("dedicated_1") == "Running")
        assert nodes_of(client, run.name)["spot_1"] == "Queued"
        fallback = node_of(client, run.name, "dedicated_1").name
        until(lambda: " of 2 nodes" in workspace.log(fallback))
        workspace.refill("spot")
        until(lambda: nodes_of(client, run.name).get("dedicated_1") == "Canceled")
        assert nodes_of(client, run.name)["spot_1"] == "Running"
        assert "leaving at the next step" in workspace.log(fallback)
        # The owner cancels the run: nothing is asked for any more.
        client.jobs.begin_cancel(run.name)
        until(lambda: set(nodes_of(client, run.name).values()) == {"Canceled", "Failed"})
        assert sorted(nodes_of(client, run.name)) == ["dedicated_0", "dedicated_1", "spot_0", "spot_1"]


def test_nodes_that_the_service_does_not_start_come_as_jobs_of_their_own(tmp_path):
    job = make(epochs=40, resources=ElasticResources(max_instance_count=2, placement="service"))
    with LocalWorkspace(pools=MACHINES, grows=False, folder=tmp_path / "workspace", start=FORKED) as workspace:
        client = workspace.ml_client
        run = client.jobs.create_or_update(job)
        until(lambda: any(each.name == f"{run.name}-job-2" for each in client.jobs.list()))
        until(lambda: " of 2 nodes" in workspace.log(f"{run.name}-job-2"))
        assert client.jobs.get(f"{run.name}-job-2").resources.instance_count == 1
        client.jobs.begin_cancel(run.name)
        until(lambda: client.jobs.get(f"{run.name}-job-2").status in ("Canceled", "Completed", "Failed"))
