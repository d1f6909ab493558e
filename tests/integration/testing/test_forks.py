"""Nodes that the workspace forks are those that their commands start, and are started so where they must be."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources
from azureml_elastic.local.processes import MARKER, set_subreaper
from azureml_elastic.submit.runtime.staging import RUNTIME_FILE, stage_runtime
from azureml_elastic.testing import Eviction, LocalWorkspace, Pool
from azureml_elastic.testing.forks.listener import NodeForks
from tests.support.node_server import FORKED
from tests.support.tiny_training import tiny_training
from tests.support.waiting import until

PROBE = """
import json, os, pathlib, psutil, shutil, signal, sys

print("on standard error", file=sys.stderr)
print("an output line")
commands = [" ".join(process.cmdline()) for process in psutil.Process().parents()]
process = {
    "forked": any('"at_once": true' in command for command in commands),
    "argv": sys.argv[:1],
    "path": sys.path,
    "file": pathlib.Path(__file__).name,
    "folder": pathlib.Path.cwd().name,
    "environment": dict(os.environ),
    "python": shutil.which("python"),
    "leads": os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGIO, signal.SIGCHLD)],
    "descriptors": len(os.listdir("/proc/self/fd")),
    "input": os.stat(0).st_rdev,
}
pathlib.Path(sys.argv[1]).write_text(json.dumps(process))
"""
OF_ONE_RUN = ("AZUREML_", "AZURE_ML_", "MASTER_", "MLFLOW_", "TORCHELASTIC_")
OF_ONE_SHELL = ("CURL_CA_BUNDLE", "OLDPWD", "PWD", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")
OF_ONE_WORKSPACE = ("MSI_ENDPOINT", "OBO_ENDPOINT")

TRAINS = tiny_training("pathlib.Path(sys.argv[1]).touch(); time.sleep(.05)")

INTERRUPTED = """
import sys
from azureml_elastic import ElasticCommandJob, ElasticResources
from azureml_elastic.testing import LocalWorkspace
from pathlib import Path

with LocalWorkspace(start="fork", folder=Path(sys.argv[1])) as workspace:
    one = ElasticResources(max_instance_count=1)
    job = ElasticCommandJob(
        code="src", command=sys.argv[2], environment="anything@latest", compute="cluster", resources=one
    )
    submitted = workspace.ml_client.jobs.create_or_update(job)
    print(workspace.wait(submitted.name), flush=True)
"""


def make(command, nodes=1, **distribution):
    return ElasticCommandJob(
        code="src",
        command=command,
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(min_instance_count=nodes, max_instance_count=nodes),
        distribution=ElasticDistribution(max_restarts=0, **distribution),
        replacement=None,
    )


def marked():
    """Return the running processes of nodes, which have the markers of a launcher."""
    found = []
    for process in psutil.process_iter():
        try:
            if "/" in process.environ().get(MARKER, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def under(folder):
    """Return the running processes of nodes below a workspace's folder."""
    found = []
    for process in marked():
        try:
            if process.cwd().startswith(str(folder)):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def probe(workspace, found):
    submitted = workspace.ml_client.jobs.create_or_update(make(f"python train.py {found} | tee log.txt"))
    assert workspace.wait(submitted.name, 200) == "Completed", workspace.log(submitted.name)
    text = workspace.log(submitted.name)
    assert "an output line" in text
    assert "on standard error" in text
    assert "not forked" not in text
    return json.loads(found.read_text())


def test_a_worker_finds_what_it_finds_without_a_fork(script, tmp_path):
    script(PROBE)
    with LocalWorkspace(start=FORKED, folder=tmp_path / "forking") as workspace:
        forked = probe(workspace, tmp_path / "forked.json")
    with LocalWorkspace() as workspace:
        started = probe(workspace, tmp_path / "started.json")
    assert (forked.pop("forked"), started.pop("forked")) == (True, False)
    # A started node imports the library that was sent with the job, from where it was unpacked.
    there = started["environment"].pop("PYTHONPATH").split(os.pathsep)[0]
    assert there.endswith("/site")
    started["path"].remove(there)
    for found in (forked, started):
        found["environment"].pop("PYTHONPATH", None)
        found["path"] = [Path(entry).name if entry.endswith("/work") else entry for entry in found["path"]]
    variables = [found.pop("environment") for found in (forked, started)]
    assert forked == started
    assert variables[0].keys() == variables[1].keys()
    assert {
        name: value
        for name, value in variables[0].items()
        if value != variables[1][name]
        and not name.startswith(OF_ONE_RUN)
        and name not in (*OF_ONE_SHELL, *OF_ONE_WORKSPACE)
    } == {}


def test_a_failure_is_that_of_the_program(script):
    script("import sys; print('the reason', file=sys.stderr); sys.exit(7)")
    with LocalWorkspace(start=FORKED) as workspace:
        submitted = workspace.ml_client.jobs.create_or_update(make("python train.py"))
        assert workspace.wait(submitted.name, 200) == "Failed"
        with pytest.raises(Exception, match=r"exited with status code 7[^\"]*the reason"):
            workspace.ml_client.jobs.stream(submitted.name)


def test_an_evicted_node_is_killed_and_a_cancelled_one_leaves_at_a_step(script, tmp_path):
    script(TRAINS)
    folder = tmp_path / "workspace"
    with LocalWorkspace(pools={"cluster": Pool(nodes=2)}, start=FORKED, folder=folder) as workspace:
        client = workspace.ml_client
        job = make(f"python train.py {tmp_path}/$AZUREML_RUN_ID", nodes=2).with_options(
            resources={"min_instance_count": 1, "max_instance_count": 2}
        )
        submitted = client.jobs.create_or_update(job)
        nodes = list(client.jobs.list(parent_job_name=submitted.name))
        until(lambda: all((tmp_path / node.name).exists() for node in nodes), interval=0.1)
        lost, left = (next(folder.glob(f"nodes/cluster-{number}")) for number in (1, 0))
        assert any(process.ppid() == os.getpid() for process in under(lost))  # the fork, beside its shell and wrapper
        workspace.evict(Eviction(node=1, after=0, notice=0))
        until(lambda: client.jobs.get(nodes[1].name).status == "Failed", interval=0.1)
        assert under(lost) == []
        assert under(left)
        until(lambda: "rank 0 of 1 node" in workspace.log(nodes[0].name), interval=0.1)
        client.jobs.begin_cancel(submitted.name)
        assert workspace.wait(submitted.name, 60) == "Canceled"
        assert "leaving at the next step" in workspace.log(nodes[0].name)
        assert under(folder) == []


def test_nothing_outlives_a_killed_workspace(script, tmp_path):
    script(PROBE + "import time; time.sleep(1000)\n")
    folder, found = tmp_path / "workspace", tmp_path / "found.json"
    words = [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(folder), f"python train.py {found}"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        try:
            until(lambda: found.exists() and found.read_text(), timeout=200, interval=0.1)
            server = next(
                process.pid
                for process in psutil.Process(launcher.pid).children()
                if "azureml_elastic.forks" in " ".join(process.cmdline()) and process not in marked()
            )
            assert under(folder)
        finally:
            launcher.kill()
    assert json.loads(found.read_text())["forked"]
    until(lambda: not under(folder))
    until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE)


# --- the wrapper, without a workspace ------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path):
    """Run a command of a shell whose interpreter is the wrapper, and return its exit code and output."""
    before = set_subreaper(True)
    with NodeForks(tmp_path / "wrappers in a folder", FORKED) as forks:

        def run(command, **variables):
            path = f"{forks.folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, MARKER: "0/node-0"}
            environ |= {"PYTHONUNBUFFERED": "1", **variables}
            done = subprocess.run(
                ["/bin/bash", "-c", command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout

        yield run
    set_subreaper(before)


def test_a_node_is_forked_and_ends_as_its_command_does(shell):
    code, text = shell("python -m azureml_elastic.node --help")
    assert code == 0
    assert text.startswith("usage: python -m azureml_elastic.node")
    command = "-m azureml_elastic.node -- python train.py"
    forked, started = shell(f"python {command}"), shell(f"{sys.executable} {command}")
    assert forked == started
    assert forked[0] == 2
    assert "not forked" not in forked[1]


def test_a_library_that_was_sent_is_the_installed_one_or_is_executed(shell, tmp_path):
    archive = stage_runtime(tmp_path / "cache")
    code, text = shell(f"python {archive} --help")
    assert (code, text.partition(" ")[0]) == (0, "usage:")
    other = tmp_path / "other" / RUNTIME_FILE
    other.parent.mkdir()
    with zipfile.ZipFile(other, "w") as files:
        files.writestr("__main__.py", "print('executed')")
        files.writestr("site/azureml_elastic/__init__.py", "")
    code, text = shell(f"python {other}")
    assert code == 0
    reason = "the library that was sent with the job is not the one that is installed here"
    assert text.splitlines() == [f"This node is not forked, its command is started: {reason}.", "executed"]


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("nice -n 5", "nice"),
        ("umask 027;", "Umask"),
        ("ulimit -n 200;", "limits"),
        ("trap '' USR2;", "SigIgn"),  # not HUP, which is ignored where nohup has started the tests
    ],
)
def test_what_only_a_new_process_takes_over_from_the_shell_is_no_fork(shell, before, reason):
    code, text = shell(f"{before} python -m azureml_elastic.node --help")
    assert code == 0
    line, usage = text.split("\n", 1)
    assert line == (
        "This node is not forked, its command is started: its command has changed what a new process takes over: "
        f"{reason}."
    )
    assert usage.startswith("usage: python -m azureml_elastic.node")


def test_what_is_no_node_is_executed_as_without_the_wrapper(shell, tmp_path):
    code = "import os, shutil, sys; print(sys.argv, sys.executable, shutil.which('python'), os.environ['_'])"
    code += "; sys.exit(3)"
    (tmp_path / "program.py").write_text(code)
    exit_code, text = shell(f"python {tmp_path / 'program.py'} 'two words' ''")
    assert exit_code == 3
    here = str(Path(sys.executable).parent / "python")
    assert text == f"{[str(tmp_path / 'program.py'), 'two words', '']} {here} {here} {here}\n"
    assert shell("echo 'print(1)' | python -") == (0, "1\n")
    code, text = shell("python -c 'import os; os.kill(os.getpid(), 15)'; echo $?")
    assert text.splitlines()[-1] == str(128 + signal.SIGTERM)


def test_the_doctor_and_a_long_name_are_no_forks(shell):
    words = "python -m azureml_elastic.node -- python -m azureml_elastic.node.diagnostics.doctor --help"
    assert "the doctor examines what a new process finds" in shell(words)[1]
    _, text = shell("python -m azureml_elastic.node --help", **{MARKER: "0/" + "n" * 200})
    assert "the name of its machine is longer than the 128 bytes for it" in text
