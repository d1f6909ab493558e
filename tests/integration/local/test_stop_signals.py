"""A local run that signals stop: its nodes leave, its report is complete, and nothing is left running."""

import contextlib
import itertools
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from azureml_elastic.ledger.events import CheckpointCommitted, Progress
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.processes import MARKER
from tests.support.node_server import FORKED
from tests.support.paths import SUPPORT
from tests.support.waiting import until

FAKE_NODE = str(SUPPORT / "fake_node.py")
PROGRAM = str(SUPPORT.parent / "runs" / "scripts" / "chaos_train.py")

LAUNCHER = """
import signal, sys, typer
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
from pathlib import Path
from rich.console import Console
from azureml_elastic.cli.failures import explained
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.view import PlainView
app = typer.Typer(pretty_exceptions_enable=False)
@app.command()
@explained()
def go(run_dir: Path, node: str, program: str, chaos: str = ""):
    LocalCluster((1, 2), run_dir=run_dir, node_command=(sys.executable, node), audit=True, view=PlainView(Console()),
                 chaos=parse_schedule(chaos)).run(program.split())
app()
"""


def marked(run_dir):
    """Return the processes of this run except zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if MARKER in environment and environment.get("AZUREML_ELASTIC_RUN_DIR") == str(run_dir):
                found.append(process)
    return found


def runs(process, script):
    """Whether a process that has not ended has a script in its command."""
    try:
        return str(script) in process.cmdline()
    except psutil.Error:
        return False


def trains(run_dir, nodes=2):
    """Whether that many nodes have reported a step."""
    events = read_events(run_dir / "events") if (run_dir / "events").is_dir() else []
    return len({event.node for event in events if isinstance(event, Progress)}) >= nodes


def started(run_dir):
    """Whether all nodes have written a line; programs that hang report no step."""
    logs = list((run_dir / "logs").glob("node-?.log"))
    return len(logs) == 2 and all(log.stat().st_size for log in logs)


@contextlib.contextmanager
def launched(run_dir, program, *options, **popen):
    argv = [sys.executable, "-c", LAUNCHER, str(run_dir), FAKE_NODE, program, *options]
    popen = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **popen}
    with subprocess.Popen(argv, **popen) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def endings(report):
    return [(node.ending, node.exit_code) for node in report.nodes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_the_nodes_leave(tmp_path, number):
    run_dir = tmp_path / "run"
    with launched(run_dir, "steps 100000", "--chaos", "kill=node-9@step:1,add@step:200000") as launcher:
        until(lambda: trains(run_dir))
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=300)
    report = load_report(run_dir)
    assert launcher.returncode == 128 + number
    assert "Traceback" not in error
    assert (report.outcome, report.exit_code) == ("interrupted", 128 + number)
    assert report.message == f"{number.name} stopped the run at step {report.last_step}."
    assert endings(report) == [("stopped", 143)] * 2
    assert report.last_step > 0
    assert report.audit.seen > 0
    assert [fault.fault for fault in report.missed_faults] == ["kill=node-9@step:1", "add@step:200000"]
    assert not list(run_dir.glob("report.json.*"))
    assert marked(run_dir) == []


def test_the_second_signal_kills_nodes_that_do_not_leave(tmp_path):
    run_dir = tmp_path / "run"
    with launched(run_dir, "deaf") as launcher:
        until(lambda: started(run_dir))
        launcher.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1.0)
        assert len(marked(run_dir)) == 4  # two agents, each with a worker
        launcher.send_signal(signal.SIGINT)
        launcher.wait(15)
    report = load_report(run_dir)
    assert launcher.returncode == report.exit_code == 130
    assert report.outcome == "interrupted"
    assert endings(report) == [("stopped", -signal.SIGKILL)] * 2
    assert marked(run_dir) == []


def test_nodes_that_do_not_leave_in_time_are_killed(tmp_path):
    run_dir = tmp_path / "run"
    thread = threading.Thread(target=lambda: (until(lambda: started(run_dir)), os.kill(os.getpid(), signal.SIGTERM)))
    thread.start()
    command = (sys.executable, FAKE_NODE)
    cluster = LocalCluster((1, 2), run_dir=run_dir, node_command=command, exit_grace=0.5)
    with pytest.raises(SystemExit) as ended:
        cluster.run(["deaf"])
    thread.join()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert endings(load_report(run_dir)) == [("stopped", -signal.SIGKILL)] * 2
    assert marked(run_dir) == []


def test_a_signal_before_the_nodes_start_leaves_a_report_and_no_emulator(tmp_path, monkeypatch):
    emulator = tmp_path / "azurite-table"  # an emulator that does not listen yet
    signals = f"process.kill({os.getpid()}, 'SIGTERM'); setInterval(() => {{}}, 1000);"
    (tmp_path / "emulator.js").write_text(signals)
    (tmp_path / "emulator.js").chmod(0o700)
    emulator.symlink_to("emulator.js")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run_dir = tmp_path / "run"
    cluster = LocalCluster((1, 2), run_dir=run_dir, node_command=(sys.executable, FAKE_NODE), table="azurite")
    with pytest.raises(SystemExit):
        cluster.run(["steps", "5"])
    report = load_report(run_dir)
    assert (report.outcome, report.exit_code, report.nodes) == ("interrupted", 128 + signal.SIGTERM, ())
    assert report.message == "The run was interrupted before its nodes were started."
    until(lambda: not any(runs(process, emulator.resolve()) for process in psutil.process_iter()))


def test_signals_without_end_neither_tear_the_report_nor_leave_a_process(tmp_path):
    run_dir = tmp_path / "run"
    with launched(run_dir, "steps 100000", "--chaos", "freeze=any@step:2") as launcher:
        until(lambda: trains(run_dir, 1))  # a frozen node may block the other one
        for number in itertools.cycle((signal.SIGINT, signal.SIGHUP, signal.SIGTERM)):
            if launcher.poll() is not None:
                break
            launcher.send_signal(number)
            time.sleep(0.01)
    report = load_report(run_dir)
    assert report.outcome == "interrupted"
    assert {node.ending for node in report.nodes} <= {"stopped", "frozen"}
    assert report.exit_code in (129, 130, 143)  # two signals may be pending at once, and are received by number
    assert len(report.nodes) == 2
    assert report.name == run_dir.name
    assert marked(run_dir) == []


def test_a_closed_terminal_stops_the_run(tmp_path):
    """The kernel sends SIGHUP, and from then on everything that is written to the terminal fails."""
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    drain = threading.Thread(target=read_all, args=(ours,))
    become_leader = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
    argv = [sys.executable, "-c", become_leader + LAUNCHER, str(run_dir), FAKE_NODE, "steps 100000"]
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    with subprocess.Popen(argv, **options) as launcher:
        os.close(theirs)
        drain.start()
        try:
            until(lambda: trains(run_dir))
            STOP_READING.set()
            drain.join()
            os.close(ours)
            launcher.wait(300)
        finally:
            launcher.kill()
    report = load_report(run_dir)
    assert (report.outcome, report.exit_code) == ("interrupted", 128 + signal.SIGHUP)
    assert endings(report) == [("stopped", 143)] * 2
    assert marked(run_dir) == []


STOP_READING = threading.Event()


def read_all(descriptor):
    """Read a terminal, so that its writers never wait."""
    os.set_blocking(descriptor, False)
    while not STOP_READING.is_set():
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 1 << 16)
        time.sleep(0.005)


def test_real_nodes_save_and_leave(tmp_path):
    run_dir = tmp_path / "run"
    thread = threading.Thread(target=lambda: (until(lambda: trains(run_dir), 60), os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    cluster = LocalCluster((1, 2), run_dir=run_dir, start=FORKED)
    with pytest.raises(KeyboardInterrupt):
        cluster.run([PROGRAM, "--epochs", "1000", "--step-delay", "0.05"])
    thread.join()
    report = load_report(run_dir)
    assert (report.outcome, report.exit_code) == ("interrupted", 130)
    assert endings(report) == [("stopped", 143)] * 2
    saved = [event.step for event in read_events(run_dir / "events") if isinstance(event, CheckpointCommitted)]
    assert max(saved) == report.last_step
    assert marked(run_dir) == []
