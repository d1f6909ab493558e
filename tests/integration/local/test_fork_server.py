"""Nodes that are forked from one process are those that their command starts, and are started so where they must be."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from azureml_elastic.forks.command import Imports
from azureml_elastic.forks.detached import ForkServer
from azureml_elastic.forks.process import ForkRefused
from azureml_elastic.ledger.events import Progress
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.fork_start import ForkStart, start_server
from azureml_elastic.local.node_start import NODE_COMMAND
from azureml_elastic.local.processes import MARKER, set_subreaper
from azureml_elastic.local.view import View
from azureml_elastic.program.command import parse_program
from tests.support.paths import PROGRAMS
from tests.support.waiting import until
from tests.support.whole_runs import GATHERING, after_gathering, assert_whole, gathering_cluster

TRAINING = str(PROGRAMS / "chaos_train.py")

PROBE = """
import json, os, pathlib, signal, sys
import printing
import ranked

assert ranked.RANK == os.environ["RANK"]
print("an output line")
process = {
    "argv": sys.argv,
    "path": sys.path,
    "file": __file__,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "leads": os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGIO, signal.SIGCHLD)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "marked": [line for line in open("/proc/self/environ").read().split("\\0") if "_ELASTIC_LOCAL_NODE" in line],
    "unbuffered": sys.stdout.write_through,
}
pathlib.Path(sys.argv[1], f"{os.environ['GROUP_RANK']}.json").write_text(json.dumps(process))
"""


class Notes(View):
    """The launcher's notes."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def fork_servers():
    """Return the fork servers that this process has started and that are running; their forks have markers."""
    found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return {
        each.pid
        for each in found
        if "azureml_elastic.forks" in " ".join(each.cmdline()) and "/" not in each.environ()[MARKER]
    }


def logs(report):
    return {path.stem: path.read_text() for path in report.paths.logs.glob("*.log")}


def installed(folder, **modules):
    """Write modules into a folder that counts as one of installed modules."""
    (folder / "some-1.0.dist-info").mkdir(parents=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return str(folder)


@pytest.mark.parametrize("start", ["fork", "command"])
def test_a_run_with_faults_takes_the_same_course(tmp_path, start):
    before = fork_servers()
    chaos = "kill=rank0@step:25,add@step:40"
    cluster = gathering_cluster(tmp_path, chaos, nodes=(1, 3), start=start, timeout=150)
    report = cluster.run([TRAINING, "--epochs", "5", "--full", "3"])
    assert_whole(report)
    assert report.audit.rolled_back_steps == 0
    assert after_gathering(report, 3) == (3, 2, 3)
    assert [node.leftovers for node in report.nodes] == [0, 0, 0, 0]
    assert "not forked" not in "".join(logs(report).values())
    assert fork_servers() == before


def test_a_worker_finds_what_it_finds_without_the_server(tmp_path, monkeypatch):
    """Output and variables of its imports are repeated, and what reads a rank is left to it."""
    path = installed(
        tmp_path / "installed",
        printing="import os\nprint('printed while imported')\nos.environ['SET_WHILE_IMPORTED'] = 'yes'\n",
        ranked="import os\nRANK = os.environ.get('RANK')\n",
    )
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "probe.py").write_text(PROBE)
    found = {}
    for start in ("fork", "command"):
        out = tmp_path / start
        out.mkdir()
        cluster = LocalCluster((2, 2), start=start, run_dir=out / "run", timeout=120, rendezvous=GATHERING)
        report = cluster.run([str(tmp_path / "probe.py"), str(out)])
        assert report.exit_code == 0, report.message
        assert report.world_sizes == (2,)
        text = logs(report)
        for log in text.values():
            assert log.index("printed while imported") < log.index("an output line")
            assert "Imported by each worker: ranked reads RANK" in log
        found[start] = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    for forked, started in zip(found["fork"], found["command"], strict=True):
        (marker,), (of_started,) = forked.pop("marked"), started.pop("marked")
        assert marker.partition("/")[2] == of_started.partition("/")[2]
        assert marker.partition("=")[2] == forked["environment"]["AZUREML_ELASTIC_LOCAL_NODE"]
        assert forked.pop("environment").keys() == started.pop("environment").keys()
        assert forked.pop("argv")[0] == started.pop("argv")[0]
        assert forked == started


def test_nodes_outlive_a_killed_server_and_later_ones_are_started_by_their_command(tmp_path):
    before = fork_servers()
    run_dir, notes = tmp_path / "run", Notes()

    def kill():
        reader, step = EventReader(run_dir / "events"), 0
        while step < 15 and not over.wait(0.05):
            step = max([step, *(each.step for each in reader.read() if isinstance(each, Progress))])
        for server in fork_servers() - before:
            os.kill(server, signal.SIGKILL)

    over = threading.Event()
    killing = threading.Thread(target=kill)
    killing.start()
    try:
        report = LocalCluster(
            (1, 2),
            start="fork",
            chaos=parse_schedule("kill=node-1@step:40,add@step:45"),
            run_dir=run_dir,
            timeout=150,
            audit=True,
            rendezvous=GATHERING,
            view=notes,
        ).run([TRAINING, "--epochs", "7", "--full", "2"])
    finally:
        over.set()
        killing.join()
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    assert after_gathering(report, 2) == (2, 1, 2)
    refusal = "the fork server has ended by SIGKILL"
    assert [name for name, text in logs(report).items() if refusal in text] == ["node-2"]
    assert f"nodes are not forked, their command is started: {refusal}" in notes.lines
    assert fork_servers() == before


@pytest.fixture
def output(tmp_path):
    with (tmp_path / "output").open("w+b") as file:
        yield file


def examine(server, output):
    """Start a node that only prints its usage, and return its output."""
    environ = {**os.environ, MARKER: "0/node-0"}
    before = set_subreaper(True)
    try:
        process = ForkStart(lambda _: server).start([*NODE_COMMAND, "--help"], env=environ, output=output)
        assert process.wait(60) == 0
    finally:
        set_subreaper(before)
    output.seek(0)
    return output.read().decode()


def test_a_program_that_is_not_imported_early_is_started_by_commands(tmp_path, output):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text("import psutil\n")
    (folder / "psutil.py").write_text("")  # the agent's
    server = start_server(Imports(parse_program([str(folder / "train.py")])), os.environ)
    try:
        assert not server.wait_ready()
        assert "psutil.py has the name of a module" in server.refusal
        shown = examine(server, output)
        assert shown.startswith(f"This node is not forked, its command is started: {server.refusal}.\n")
        assert "usage: python -m azureml_elastic.node" in shown
        until(lambda: not psutil.pid_exists(server.pid))
    finally:
        server.close()


def test_imports_that_leave_a_thread_behind_are_not_forked(tmp_path):
    text = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(text)
    server = ForkServer(Imports(modules=("threaded",), path=(str(tmp_path),)), os.environ)
    try:
        assert not server.wait_ready()
        assert server.refusal.startswith("the imports started 1 thread (Thread-1")
    finally:
        server.close()


def test_a_failed_import_is_the_reason(tmp_path):
    server = ForkServer(Imports(modules=("absent_module",)), os.environ)
    try:
        assert not server.wait_ready()
        assert server.refusal == "ModuleNotFoundError: No module named 'absent_module'"
    finally:
        server.close()


def test_a_node_is_forked_and_another_environment_of_the_imports_is_refused(tmp_path, output):
    server = start_server(Imports(), {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        request = {"argv": ["--help"], "network": None}
        with pytest.raises(ForkRefused, match="OMP_NUM_THREADS, TORCH_SHOW_CPP_STACKTRACES in the environment"):
            server.fork("", request, {**os.environ, "OMP_NUM_THREADS": "2", "TORCH_SHOW_CPP_STACKTRACES": "1"}, [])
        assert server.wait_ready()
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("OMP_NUM_THREADS", "1")
            assert examine(server, output).startswith("usage: python -m azureml_elastic.node")
        server_process = psutil.Process(server.pid)
        assert server_process.num_threads() == 1
        assert not server_process.children()
    finally:
        server.close()
    assert server.refusal == "the fork server was closed"


def test_a_server_is_as_before_once_it_has_answered(tmp_path):
    (tmp_path / "ending.py").write_text("import os\n\ndef end(*_):\n    os._exit(0)\n")
    server = ForkServer(Imports(modules=("ending",), path=(str(tmp_path),)), os.environ)
    cores, before_it = os.sched_getaffinity(0), set_subreaper(True)
    try:
        assert server.wait_ready()

        def blocked():
            lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            return next(line for line in lines if line.startswith("SigBlk"))

        before = blocked()
        # On one core, where the server goes on behind its answer only when this process waits for something.
        os.sched_setscheduler(server.pid, os.SCHED_IDLE, os.sched_param(0))
        for pid in (0, server.pid):
            os.sched_setaffinity(pid, {min(cores)})
        for _ in range(10):
            process = server.fork("ending:end", {}, os.environ, [])
            assert blocked() == before
            process.wait()
    finally:
        os.sched_setaffinity(0, cores)
        set_subreaper(before_it)
        server.close()
