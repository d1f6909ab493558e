"""The command line with a local workspace: status, logs, outputs and cancellation of a run."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from azureml_elastic import ElasticCommandJob, ElasticResources, NodePool, ReplacementPolicy
from azureml_elastic.cli import app
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from tests.support.command_imports import completions, imported_packages
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS, SAMPLES
from tests.support.waiting import until

SAMPLE = SAMPLES / "digits.py"

JOB = """
type: command
code: src
command: python digits.py --epochs ${{inputs.epochs}}
environment: azureml:anything@latest
compute: azureml:cluster
inputs: {epochs: 9}
elastic: {max_instance_count: 2}
"""
PLAIN = ("--set", "elastic.distribution.preload_workers=false", "--set", "elastic.metrics.mlflow=false")
"""Without a preload server a worker starts in less time if its script imports nothing, and its agent without MLflow."""
NODES = ("node_0", "node_1")
DEAR = {"azure.ai", "torch", "numpy", "pandas"}
ANOTHER_PROCESS = """
import sys, time
from azure.ai.ml import MLClient, command
from azure.identity import DefaultAzureCredential
client = MLClient(DefaultAzureCredential(), "00000000-0000-0000-0000-0000000000aa", "local", "local")
job = client.jobs.create_or_update(command(command="sleep 1000", environment="x@latest", compute="spot"))
while (status := client.jobs.get(job.name).status) not in ("Failed", "Completed"):
    time.sleep(0.1)
print(status)
"""


@pytest.fixture
def run(project):
    shutil.copy(SAMPLE, project / "src")
    runner = CliRunner()

    def invoke(*words):
        return runner.invoke(app, list(words))

    return invoke


def configure(workspace):
    Path("config.json").write_text(json.dumps(dict(workspace.config)))


def test_a_file_is_shown_and_submitted_and_its_run_is_followed_read_and_downloaded(run):
    Path("job.yml").write_text(JOB)
    with LocalWorkspace(start=FORKED) as workspace:
        configure(workspace)
        shown = run("submit", "job.yml", "--set", "inputs.epochs=1", "--dry-run")
        assert shown.exit_code == 0, shown.output
        assert not shown.stderr
        assert "node_1:" in shown.output
        assert "azureml_elastic_runtime.pyz" in shown.output
        wrong = run("submit", "job.yml", "--set", "elastic.max_instance_count=0")
        assert wrong.exit_code == 2
        assert "max_instance_count" in wrong.output
        assert not list(workspace.ml_client.jobs.list())
        # The second node comes while the first one trains.
        slow = "command=python digits.py --epochs ${{inputs.epochs}} --step-delay 0.05"
        words = ["submit", "job.yml", "--set", "inputs.epochs=2", "--set", slow, "--stream"]
        with connected(workspace, *words) as submitting:
            name = submitting.stdout.readline().strip()
            # The log of a node is printed to its end while the run is streamed.
            assert not imported_packages([["logs", name, "--node", "node_0"]], workspace.variables) & DEAR
            streamed = submitting.stdout.read()
            assert submitting.wait(300) == 0, streamed
        (job,) = workspace.ml_client.jobs.list()
        assert (job.name, job.status) == (name, "Completed")
        read_status(run, job.name)
        read_logs(run, job.name)
        read_report(run, job.name)
        # By a process of its own: aiohttp knows the certificates that there were when it was imported.
        shown, wrong = connected(workspace, "checkpoints", "list", job.name).communicate()
        assert shown.splitlines()[0].endswith(f"/azureml-elastic/{job.name}"), wrong
        assert "committed" in shown
        words = [
            ["status", job.name],
            ["logs", job.name, "--tail", "1"],
            ["report", job.name],
            ["status", job.name, "--watch"],
        ]
        imported = imported_packages(words, workspace.variables)
        assert not imported & DEAR, "each import would take longer than the command"
        assert "azure" in imported
        shown = run("status", job.name, "--watch", "--plain")
        assert shown.exit_code == 0, shown.output
        assert "2 workers on node_0, node_1" in shown.output or "2 workers on node_1, node_0" in shown.output
        assert "* the run succeeded" in shown.output.splitlines()
        assert job.name in completions("azureml-elastic status ")
        shown = run("download", job.name, "--to", "there")
        assert list(Path("there").rglob("manifest.json")), shown.output
        shown = run("cancel", job.name)
        assert "has ended already" in shown.output
        shown = run("status", "no-such-run")
        assert shown.exit_code == 2
        assert "has no job 'no-such-run'" in shown.output
        shown = run("logs", job.name, "--node", "node_7")
        assert "has no node 'node_7'. There are: node_0, node_1" in shown.output


def read_status(run, name):
    """Read the state of an ended run of two nodes, also as JSON."""
    shown = run("status", name)
    assert shown.exit_code == 0, shown.output
    assert "node_0" in shown.output
    assert shown.output.count("Completed") == 3
    assert "The run succeeded in round" in shown.output
    assert re.search(r"step (\d+)( of \d+)?, checkpoint of step \1\b", shown.output), shown.output
    document = json.loads(run("status", name, "--json").stdout)
    assert (document["name"], document["status"], document["world_size"]) == (name, "Completed", 2)
    assert {node["node"]: node["status"] for node in document["nodes"]} == dict.fromkeys(NODES, "Completed")


def read_report(run, name):
    """Make the report of an ended run of two nodes from its table, and again from the folder that it leaves."""
    shown = run("report", name, "--json", "report.json", "--html", "report.html")
    assert shown.exit_code == 0, shown.output
    page = Path("report.html").read_text()
    assert "The run succeeded" in page
    assert "node_1" in page
    assert "node-hours" in page
    assert "the run succeeded at step" in shown.output
    assert "goodput" in shown.output
    made = json.loads(Path("report.json").read_text())
    assert made["name"] == name
    assert {node["name"]: node["ending"] for node in made["nodes"]} == {"node_0": "exited", "node_1": "exited"}
    assert [round_["last_step"] for round_ in made["rounds"]][-1] > 0
    seconds = {each["activity"]: each["seconds"] for each in made["activities"]}
    assert seconds["training"] > 0
    walls = sum(node["ended"] - node["began"] for node in made["nodes"])
    assert sum(each["seconds"] for each in made["activities"]) == pytest.approx(walls, rel=0.005)
    assert {(node["pool"], node["tier"]) for node in made["nodes"]} == {("cluster", "low_priority")}
    assert "node-hours" in shown.output
    assert made["bill"]["lines"][0]["cost"] is None
    prices = {made["nodes"][0]["size"]: {"low_priority": 3600, "dedicated": 18000}}
    file = {"currency": "EUR", "date": "2026-01-31", "source": "a test", "per_hour": prices}
    Path("prices.json").write_text(json.dumps(file))
    again = run("report", f"runs/{name}", "--prices", "prices.json", "--json", "billed.json")
    assert again.exit_code == 0, again.output
    assert "goodput" in again.output
    assert "Saved against dedicated nodes: " in again.output
    billed = json.loads(Path("billed.json").read_text())
    assert float(billed["bill"]["lines"][0]["cost"]) == pytest.approx(walls, rel=0.001)
    assert "There is no folder" in run("report", "runs/another").output


def read_logs(run, name):
    """Read the logs of an ended run of two nodes: of rank 0's, of another one, of both, and their last lines."""
    shown = run("logs", name)
    assert shown.exit_code == 0, shown.output
    assert "rank 0 of 2 nodes" in shown.output
    one = run("logs", name, "--node", "node_1").stdout.splitlines()
    assert any("rank" in line for line in one)
    assert run("logs", name, "--node", "node_1", "--tail", "2").stdout.splitlines() == one[-2:]
    both = run("logs", name, "--all").stdout.splitlines()
    assert [line.removeprefix("node_1 | ") for line in both if line.startswith("node_1 | ")] == one
    assert len([line for line in both if "| " in line and "rank 0 of 2 nodes" in line]) == 1
    assert run("logs", name, "--all", "--node", "node_1").exit_code == 2


COMMAND = [sys.executable, "-c", "from azureml_elastic.cli import main; main()"]


def connected(workspace, *words):
    """A process of a command that is connected to a workspace."""
    environ = {**os.environ, **workspace.variables}
    return subprocess.Popen([*COMMAND, *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def dashboard(name, *parts):
    """A running dashboard whose page has these parts, as a function that returns its page."""
    with subprocess.Popen([*COMMAND, "report", name, "--serve"], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]

            def page():
                with urllib.request.urlopen(url, timeout=60) as response:
                    return response.read().decode()

            assert [part for part in parts if part not in page()] == []
            yield page
        finally:
            process.kill()


def test_a_file_runs_on_this_machine_and_leaves_its_files(run):
    Path("job.yml").write_text(JOB + "outputs: {model: {type: uri_folder}}\n")
    shown = run("submit", "job.yml", "--local", "--evict", "1@step:10/0s", "--run-dir", "out", "--plain")
    assert shown.exit_code == 0, shown.output
    assert "node_1 is evicted without notice at step" in shown.output
    assert "the run succeeded at step" in shown.output
    report = load_report(Path("out"))
    assert [fault.nodes for fault in report.faults] == [("node_1",)]
    assert {node.name: node.ending for node in report.nodes} == {"node_0": "exited", "node_1": "killed"}
    assert report.rounds[0].lost == ("node_1",)
    assert sorted(path.name for path in Path("out/events").iterdir()) == ["node_0.jsonl", "node_1.jsonl"]
    assert "rank 0 of" in Path("out/logs/node_0.log").read_text() + Path("out/logs/node_1.log").read_text()
    listed = run("checkpoints", "list", "out")
    assert listed.exit_code == 0, listed.output
    assert "committed" in listed.stdout
    # Nothing of it is left in this process, and no second run takes the folder.
    assert "workspace" not in os.environ.get("HTTPS_PROXY", "")
    again = run("submit", "job.yml", "--local", "--run-dir", "out")
    assert again.exit_code == 2
    assert "already contains a run" in again.output
    wrong = run("submit", "job.yml", "--evict", "1@step:10")
    assert wrong.exit_code == 2
    assert "--evict needs --local" in wrong.output
    assert "cannot be combined" in run("submit", "job.yml", "--local", "--stream").output


def test_a_run_on_this_machine_that_fails_says_why(run):
    one = JOB.replace("max_instance_count: 2", "max_instance_count: 1")
    Path("src/short.py").write_text("import sys\nsys.exit(f'What is {sys.argv[1]}?')\n")
    Path("job.yml").write_text(one.replace("digits.py --epochs", "short.py --no-such-option"))
    shown = run("submit", "job.yml", "--local", "--run-dir", "out", "--plain", *PLAIN)
    assert shown.exit_code == 1, shown.output
    assert "the run failed" in shown.output
    assert "--no-such-option" in load_report(Path("out")).message


def test_a_failed_run_on_this_machine_says_how_to_go_on_and_goes_on_so(run):
    shutil.copy(PROGRAMS / "failing.py", "src")
    elastic = "elastic: {max_instance_count: 1, checkpoint: {every_steps: 3}, distribution: {max_restarts: 0}}"
    job = JOB.replace("digits.py --epochs ${{inputs.epochs}}", "failing.py all notes 8").partition("inputs:")[0]
    Path("job.yml").write_text(job + elastic)
    shown = run("submit", "job.yml", "--local", "--run-dir", "out", "--plain", *PLAIN)
    assert shown.exit_code == 1, shown.output
    assert "to continue from its last checkpoint: azureml-elastic local --resume-from out PROGRAM" in shown.stderr
    assert "Uploading" not in shown.output
    assert shown.stdout.startswith("files: out\n")
    assert load_report(Path("out")).name == "out"
    options = ["--nodes", "1", "--run-dir", "more", "--resume-from", "out", "--plain"]
    continued = run("local", *options, "src/failing.py", "never", "notes")
    assert continued.exit_code == 0, continued.output
    assert "training goes on after step 6" in continued.stdout


def test_a_run_on_this_machine_ends_as_its_command(run):
    Path("src/short.py").write_text("print('done')\n")
    Path("job.yml").write_text(JOB.replace("max_instance_count: 2", "max_instance_count: 1"))
    options = ["--set", "command=python short.py; exit 5", "--local", "--run-dir", "out", "--plain", *PLAIN]
    shown = run("submit", "job.yml", *options)
    assert shown.exit_code == 5, shown.output
    assert "the run failed" in shown.output
    assert "The program succeeded, but the command on job ended with 5" in load_report(Path("out")).message


def test_a_command_of_a_workspace_submits_to_it_also_where_a_file_names_another_one(run):
    assert run("init", "starter").exit_code == 0
    Path("config.json").write_text("{}")
    Path("starter/src/short.py").write_text("print('done')\n")
    options = ["--set", "command=python short.py", "--set", "elastic.max_instance_count=1", *PLAIN]
    words = ["workspace", "start", "--", *COMMAND, "submit", "starter/job.yml", *options]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The workspace waits for the job. azure-ai-ml ends its progress by a line that only resets a colour.
    name = done.stdout.strip()
    address, waiting, ended = [line for line in done.stderr.splitlines() if line.strip("\x1b[39m")]
    assert re.fullmatch(rf"https://\S+/runs/{name}\?wsid=/subscriptions/\S+&tid=\S+", address)
    assert waiting.startswith(f"azureml-elastic: waiting for {name}. Ctrl-C")
    assert ended == f"azureml-elastic: {name}: Completed"
    assert Path("config.json").read_text() == "{}"
    assert not Path("workspace.sh").exists()


def test_another_shell_sources_a_file(project):
    """The file connects the login and the addresses of a process, and is gone with the workspace."""
    serving = subprocess.Popen([*COMMAND, "workspace", "start"], stdout=subprocess.PIPE, text=True)
    try:
        line = serving.stdout.readline()
        assert line.strip() == f". {shlex.quote(str(project / 'workspace.sh'))}"
        listing = shlex.join([*COMMAND, "status", "no-such-run"])
        shell = subprocess.run(
            ["/bin/sh", "-c", f"cd / && {line.strip()} && {listing}"], capture_output=True, text=True, check=False
        )
        assert "has no job 'no-such-run'" in shell.stderr
        assert shell.returncode == 2, shell.stderr
    finally:
        serving.terminate()
        serving.communicate(timeout=300)
    assert serving.returncode == 0
    assert not Path("workspace.sh").exists()
    assert not Path("config.json").exists()


def test_a_shell_is_opened_in_a_workspace(project, monkeypatch):
    (project / "shell").write_text("#!/bin/sh\nprintenv AZUREML_ARM_WORKSPACE_NAME; exit 5\n")
    (project / "shell").chmod(0o700)
    monkeypatch.setenv("SHELL", str(project / "shell"))
    done = subprocess.run([*COMMAND, "workspace", "start", "--shell"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("local\n", 5), done.stderr


def test_a_command_runs_in_a_workspace_of_its_own(run, project):
    """Another process finds the workspace and its login by nothing but the environment and config.json."""
    (project / "submit.py").write_text(ANOTHER_PROCESS)
    options = ["--pool", "spot=2", "--evict", "0@1s/0s", "--folder", "kept files"]
    command = shlex.join([*COMMAND, "workspace", "start", *options, "--", sys.executable, "submit.py"])
    done = subprocess.run(["/bin/sh", "-c", f"{command}; echo $?"], capture_output=True, text=True, check=False)
    # The job has failed before the command, which has seen it fail and succeeds itself.
    assert "FAILED" in done.stdout.upper()
    assert done.stdout.splitlines()[-1] == "1", done.stderr
    assert ": Failed" in done.stderr.splitlines()[-1]
    wrong = run("workspace", "start", "--folder", "kept files", "--", "true")
    assert wrong.exit_code == 2
    assert f"The folder {project / 'kept files'} has the logs of an earlier workspace" in " ".join(wrong.output.split())
    wrong = run("workspace", "start", "--pool", "spot", "--", "true")
    assert wrong.exit_code == 2
    assert "'spot' is not a pool" in wrong.output
    wrong = run("workspace", "start", "--evict", "x", "--", "true")
    assert "'x' is not an eviction" in wrong.output
    Path("config.json").write_text("{}")
    wrong = run("workspace", "start")
    assert "exists already" in wrong.output


def test_a_run_without_a_node_is_brought_back_by_the_command_and_cancelled_with_all_its_jobs(run):
    machines = {"spot": Pool(nodes=1, refill=None), "dedicated": Pool(nodes=1, tier="dedicated")}
    pools = (NodePool("spot", max_instance_count=1), NodePool("dedicated", max_instance_count=1))
    policy = ReplacementPolicy(by_nodes=False, interval=1, fallback_after=1, retry_after=1)
    job = ElasticCommandJob(
        code="src",
        command="python digits.py --epochs 200 --step-delay 0.05",
        environment="anything@latest",
        compute=pools,
        resources=ElasticResources(max_instance_count=1),
        replacement=policy,
    )
    with (
        LocalWorkspace(pools=machines, evictions=[Eviction(node=0, at_step=5)], start=FORKED) as workspace,
        contextlib.ExitStack() as dashboards,
    ):
        configure(workspace)
        client = workspace.ml_client
        submitted = client.jobs.create_or_update(job)
        assert workspace.wait(submitted.name, 120) == "Failed"
        live = None
        with Path("watched.txt").open("w") as out:
            watching = subprocess.Popen(
                [*COMMAND, "replace-nodes", submitted.name, "--interval", "1"], stdout=out, stderr=out
            )
        try:
            name = f"{submitted.name}-dedicated-0"
            until(lambda: name in [job.name for job in client.jobs.list()], interval=0.4)
            (node,) = client.jobs.list(parent_job_name=name)
            until(lambda: "continuing after step" in workspace.log(node.name), interval=0.4)
            shown = run("status", submitted.name)
            assert "dedicated_0" in shown.output
            assert re.search(r"world size 1 on 1 node\nstep \d+.*checkpoint of step \d+", shown.output), shown.output
            assert re.search(r"dedicated_0.*Running.*rank 0", shown.output), shown.output
            shown = run("report", submitted.name, "--to", "now")
            assert shown.exit_code == 0, shown.output
            assert "has no recorded end" in shown.output
            report = load_report(Path("now"))
            endings = {node.name: node.ending for node in report.nodes}
            assert endings["dedicated_0"] == "running"
            assert {total.cause for total in report.activities} >= {None, "preemption"}
            assert next(total for total in report.activities if total.activity == "training").seconds > 0
            with Path("live.txt").open("w") as out:
                live = subprocess.Popen(
                    [*COMMAND, "status", "--watch", submitted.name, "--plain"], stdout=out, stderr=out
                )
            until(lambda: "1 worker on dedicated_0" in Path("live.txt").read_text())
            page = dashboards.enter_context(
                dashboard(submitted.name, "The run is running", "dedicated_0", "data-poll=")
            )
            # By the name of a job that came later it is the same run.
            assert f"{submitted.name}: Failed" in run("status", name).output
            wrong = run("replace-nodes", name, "--once", "--budget", "5")
            assert wrong.exit_code == 2
            assert f"and the run '{submitted.name}' was submitted without" in " ".join(wrong.output.split())
            assert "active node" in run("checkpoints", "prune", submitted.name, "--yes").output
            assert f"cancelling {name}" in run("cancel", submitted.name).output
            assert watching.wait(300) == 1, Path("watched.txt").read_text()
            assert live.wait(300) == 1, Path("live.txt").read_text()
            until(lambda: "data-poll=" not in page().partition("<body")[0], interval=0.5)
        finally:
            for process in filter(None, (watching, live)):
                process.kill()
                process.wait()
    watched = Path("watched.txt").read_text()
    assert f"submitted {submitted.name}-spot-1: a node was lost" in watched
    assert f"submitted {name}: nodes of spot do not start" in watched
    assert "The run was cancelled." in watched
