"""Jobs that run an engine, submitted as they would be to Azure ML, whose machines are evicted."""

import json
import shutil
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources, NodePool, TableRendezvous
from azureml_elastic.cli import app
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support.listening import reachable_addresses
from tests.support.paths import PROGRAMS
from tests.support.waiting import until

PACKAGES = {"dask": "distributed", "ray": "ray"}
"""Package of each framework, whose program is among those of the whole runs."""
TASKS = 24
RESULT = str(sum(number * number for number in range(TASKS)))
POOLS = {"spot": Pool(nodes=2), "cluster": Pool(nodes=1)}
PORTS = (15000, 15099)
JOB = """
type: command
code: src
command: python program.py {folder} undisturbed
environment: azureml:anything@latest
compute: azureml:cluster
elastic:
  min_instance_count: 2
  max_instance_count: 2
  placement: gang
  distribution: {{framework: {framework}}}
"""


@pytest.fixture(params=sorted(PACKAGES))
def framework(request, project):
    """Name of a framework whose program is in ``src``."""
    if request.param == "ray" and set(psutil.net_if_addrs()) != {"lo"}:
        pytest.skip("Ray puts the machine's own address in the place of 127.0.0.1: run this where there is no other")
    pytest.importorskip(PACKAGES[request.param], reason=f"the extra {request.param} is not installed")
    shutil.copy(PROGRAMS / f"{request.param}_program.py", project / "src" / "program.py")
    return request.param


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def executions(folder):
    return [len((folder / f"executed-{number}").read_text()) for number in range(TASKS)]


def test_finished_results_survive_an_eviction_with_notice_and_the_run_that_of_its_first_node(framework, tmp_path):
    job = ElasticCommandJob(
        code="src",
        command=f"python program.py {tmp_path} evicted",
        environment="anything@latest",
        compute=tuple(NodePool(name, max_instance_count=pool.nodes) for name, pool in POOLS.items()),
        resources=ElasticResources(min_instance_count=1, max_instance_count=3),
        distribution=ElasticDistribution(framework=framework, process_count_per_instance=1),
        rendezvous=TableRendezvous(port_range=PORTS),
    )
    with LocalWorkspace(pools=POOLS) as workspace:
        client = workspace.ml_client
        Path("config.json").write_text(json.dumps(dict(workspace.config)))
        submitted = client.jobs.create_or_update(job)
        until((tmp_path / "computed").exists, timeout=120)
        nodes = list(client.jobs.list(parent_job_name=submitted.name))
        leads = ["rank 0 of 3 nodes" in workspace.log(node.name) for node in nodes]
        first, other = leads.index(True), leads.index(False)
        if job.distribution.listens_in_range:
            assert {port for _, port in reachable_addresses()} <= set(range(PORTS[0], PORTS[1] + 1))
        workspace.evict(Eviction(node=other, after=0))
        until((tmp_path / "result-after-notice").exists, timeout=120)
        assert (tmp_path / "result-after-notice").read_text() == RESULT
        assert executions(tmp_path) == [1] * TASKS
        until(lambda: "rank 0 of 2 nodes" in workspace.log(nodes[first].name))
        workspace.evict(Eviction(node=first, after=0, notice=0))
        assert workspace.wait(submitted.name, 120) == "Completed", workspace.log(submitted.name)
        assert (tmp_path / "result").read_text() == RESULT
        assert len((tmp_path / "starts").read_text()) == 2
        run("report", submitted.name, "--to", "report")
    report = load_report(Path("report"))
    last = next(number for number in range(3) if number not in (first, other))
    assert report.rounds[-1].members == (nodes[last].display_name,)
    endings = {node.name: node.ending for node in report.nodes}
    assert endings == {node.display_name: "killed" if node is nodes[first] else "exited" for node in nodes}
    assert {total.cause for total in report.activities} >= {"preemption", "node loss"}


def test_a_file_runs_a_gang_on_this_machine(framework, tmp_path):
    Path("job.yml").write_text(JOB.format(folder=tmp_path, framework=framework))
    assert "the run succeeded" in run("submit", "job.yml", "--local", "--run-dir", "out", "--plain")
    assert (tmp_path / "result").read_text() == RESULT
    assert executions(tmp_path) == [1] * TASKS
    report = load_report(Path("out"))
    assert [len(round_.members) for round_ in report.rounds] == [2]
    run("report", "out", "--html", "page.html")
    assert "The run succeeded" in Path("page.html").read_text()
