"""The cluster with a small real node: processes, faults, ends."""

import io
import os
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from rich.console import Console

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.events import Restored
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from azureml_elastic.local.processes import MARKER
from azureml_elastic.local.view import LiveView, PlainView
from tests.support.paths import SUPPORT
from tests.support.waiting import until

FAKE_NODE = str(SUPPORT / "fake_node.py")


def cluster(tmp_path, chaos="", nodes=(1, 3), **options):
    return LocalCluster(
        nodes,
        chaos=parse_schedule(chaos),
        run_dir=tmp_path / "run",
        node_command=(sys.executable, FAKE_NODE),
        **{"timeout": 30.0, **options},
    )


def survivors(run_dir):
    """Return the processes of this run except zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if MARKER in environment and environment.get("AZUREML_ELASTIC_RUN_DIR") == str(run_dir):
            found.append(process)
    return found


def nodes_of(report):
    return {node.name: (node.ending, node.exit_code) for node in report.nodes}


def test_an_undisturbed_run(tmp_path):
    report = cluster(tmp_path, audit=True).run(["steps", "20"])
    assert (report.outcome, report.exit_code, report.last_step) == ("succeeded", 0, 20)
    assert nodes_of(report) == dict.fromkeys(("node-0", "node-1", "node-2"), ("exited", 0))
    assert report.world_sizes == (3,)
    assert report.audit.complete
    assert report.audit.seen == 200
    assert load_report(tmp_path / "run") == report
    assert survivors(tmp_path / "run") == []
    assert "steps" in (tmp_path / "run" / "logs" / "node-0.log").read_text()


def test_a_lost_and_a_new_node(tmp_path):
    chaos = "kill=rank0@step:13,add@step:50"
    report = cluster(tmp_path, chaos, audit=True).run(["meet", "80", "node-3"])
    assert report.outcome == "succeeded"
    assert report.world_sizes == (3, 2, 3)
    assert [fault.fault for fault in report.faults] == chaos.split(",")
    killed = report.faults[0].nodes[0]
    assert report.faults[1].nodes == ("node-3",)
    assert nodes_of(report)[killed] == ("killed", -signal.SIGKILL)
    assert sorted(nodes_of(report).values()) == [("exited", 0)] * 3 + [("killed", -signal.SIGKILL)]
    assert report.recoveries[0].lost == (killed,)
    assert report.recoveries[0].since == "loss"
    assert 0 < report.recoveries[0].seconds < 10
    assert report.audit.exactly_once
    assert survivors(tmp_path / "run") == []


def test_a_preempted_node_leaves_by_itself_and_the_run_goes_on(tmp_path):
    report = cluster(tmp_path, "preempt=any@step:10/20s", audit=True).run(["grow", "60", "2"])
    assert report.outcome == "succeeded"
    assert report.world_sizes == (3, 2)
    assert sorted(nodes_of(report).values()) == [("exited", 0), ("exited", 0), ("preempted", 143)]
    assert report.recoveries[0].lost == report.faults[0].nodes
    assert report.audit.exactly_once


def test_a_preempted_node_that_does_not_leave_in_time_is_killed(tmp_path):
    report = cluster(tmp_path, "preempt=any@step:5/0.2s", nodes=(1, 1)).run(["deaf"])
    assert nodes_of(report) == {"node-0": ("preempted", -signal.SIGKILL)}
    assert "All nodes have ended (node-0 preempted)" in report.message


def test_a_frozen_node_comes_back(tmp_path):
    report = cluster(tmp_path, "freeze=node-1@step:10/0.5s").run(["steps", "80"])
    assert report.outcome == "succeeded"
    assert nodes_of(report)["node-1"] == ("exited", 0)


def test_a_permanently_frozen_node_does_not_delay_the_end(tmp_path):
    # The fake node never waits for others, but a frozen one may hold the lock of the shared state and block all.
    report = cluster(tmp_path, "freeze=node-0@0s,kill=node-1@0.1s,kill=node-2@0.1s").run(["hang"])
    assert report.outcome == "failed"
    assert "All nodes have ended (node-0 frozen, node-1 killed, node-2 killed)" in report.message
    assert survivors(tmp_path / "run") == []


def test_seconds_of_a_program_with_a_session_count_from_its_first_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from azureml_elastic import train\n")
    report = cluster(tmp_path, "kill=node-2@0s").run(["python", str(script), "late", "20"])
    assert report.outcome == "succeeded"
    events = read_events(tmp_path / "run" / "events")
    assert report.faults[0].nodes == ("node-2",)
    assert report.faults[0].time >= min(event.time for event in events if isinstance(event, Restored))


def test_faults_that_never_happened_are_in_the_report(tmp_path):
    chaos = "kill=node-9@step:3,kill=node-2@step:5,preempt=node-2@step:15,add@step:9999,freeze=any@600s"
    report = cluster(tmp_path, chaos).run(["grow", "40", "2"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0)
    assert [(fault.fault, fault.nodes) for fault in report.faults] == [("kill=node-2@step:5", ("node-2",))]
    missed = {fault.fault: fault.reason for fault in report.missed_faults}
    seconds = missed.pop("freeze=any@600s")
    assert missed == {
        "kill=node-9@step:3": "there was no node-9; started were node-0 to node-2",
        "preempt=node-2@step:15/30s": "node-2 had already ended",
        "add@step:9999": f"the run ended at step {report.last_step}",
    }
    assert re.fullmatch(r"the run ended after \d+\.\d s of training", seconds)
    assert load_report(tmp_path / "run").missed_faults == report.missed_faults


def test_a_run_without_nodes_ends_if_none_is_added(tmp_path):
    report = cluster(tmp_path, "kill=any@step:3,kill=any@step:3", nodes=(1, 2)).run(["steps", "1000"])
    assert (report.outcome, report.exit_code) == ("failed", 1)
    assert "All nodes have ended" in report.message


def test_a_node_that_is_added_after_all_have_ended_continues_the_run(tmp_path):
    chaos = "kill=any@0.5s,kill=any@0.5s,add@1.5s"  # all by one clock, so in this order
    report = cluster(tmp_path, chaos, nodes=(1, 2), audit=True).run(["meet", "40", "node-2"])
    assert report.outcome == "succeeded"
    assert nodes_of(report)["node-2"] == ("exited", 0)
    assert report.audit.exactly_once


def test_a_program_that_fails_ends_the_run_with_its_exit_code(tmp_path):
    report = cluster(tmp_path).run(["fail", "5", "7"])
    assert (report.outcome, report.exit_code) == ("failed", 7)
    assert report.message == "the program failed on purpose"


def test_nodes_that_cannot_start_end_the_run_with_the_log_s_name(tmp_path):
    broken = LocalCluster(
        (1, 2),
        run_dir=tmp_path / "run",
        node_command=(sys.executable, "-c", "import sys; print('error: why'); sys.exit(2)"),
    )
    report = broken.run(["steps", "1"])
    assert report.exit_code == 2
    assert "exited with 2 after 'error: why'" in report.message
    assert str(tmp_path / "run" / "logs" / "node-0.log") in report.message


def test_the_timeout_stops_the_run(tmp_path):
    report = cluster(tmp_path, timeout=1.5).run(["steps", "100000"])
    assert (report.outcome, report.exit_code) == ("failed", 124)
    assert "1.5 s" in report.message
    assert {ending for ending, _ in nodes_of(report).values()} == {"stopped"}
    assert survivors(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["timeout", "exit_grace"])
@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1.0, "soon"])
def test_impossible_time_limits_are_refused_before_a_folder_is_made(tmp_path, name, limit):
    with pytest.raises(UsageError, match=rf"{name}: .* (give more than 0 s|such as '10m' or '1h30m')"):
        cluster(tmp_path, **{name: limit})
    assert not (tmp_path / "run").exists()


def test_processes_that_outlive_their_agent_are_ended_and_counted(tmp_path):
    report = cluster(tmp_path, nodes=(1, 1)).run(["orphan", "5"])
    assert report.outcome == "succeeded"
    assert report.nodes[0].leftovers == 1
    assert survivors(tmp_path / "run") == []


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path):
    """SIGINT arrives while the nodes train."""

    def interrupt():
        until(lambda: list((tmp_path / "run" / "events").glob("*.jsonl")))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cluster(tmp_path).run(["hang"])
    thread.join()
    report = load_report(tmp_path / "run")
    assert (report.outcome, report.exit_code) == ("interrupted", 130)
    assert survivors(tmp_path / "run") == []


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    script = (
        "import sys; from pathlib import Path; from azureml_elastic.local.cluster import LocalCluster\n"
        "LocalCluster((1, 2), run_dir=Path(sys.argv[1]), node_command=(sys.executable, sys.argv[2])).run(['hang'])"
    )
    run_dir = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", script, str(run_dir), FAKE_NODE]) as launcher:
        try:
            until(lambda: len(survivors(run_dir)) >= 4)
        finally:
            found = len(survivors(run_dir))
            launcher.kill()
    assert found == 4  # two agents, each with a worker in its own session
    until(lambda: not survivors(run_dir))


def test_a_used_folder_is_refused(tmp_path):
    cluster(tmp_path, nodes=(1, 1)).run(["steps", "1"])
    with pytest.raises(UsageError, match="already contains a run"):
        cluster(tmp_path, nodes=(1, 1)).run(["steps", "1"])


def test_the_plain_view_prints_events_faults_and_output(tmp_path):
    stream = io.StringIO()
    view = PlainView(Console(file=stream, width=200))
    cluster(tmp_path, "kill=rank0@step:13", view=view, nodes=(1, 2)).run(["grow", "20", "1"])
    output = stream.getvalue()
    assert "node-0 | node-0 runs ['grow', '20', '1']" in output
    assert "* fault kill=rank0@step:13: node-" in output
    assert "the run succeeded" in output


def test_the_live_view_shows_each_node_s_state(tmp_path):
    stream = io.StringIO()
    view = LiveView(Console(file=stream, width=160, force_terminal=True))
    cluster(tmp_path, "kill=rank0@step:13", view=view, nodes=(1, 2)).run(["grow", "40", "1"])
    output = stream.getvalue()
    assert "training" in output
    assert "killed" in output
    assert "world size" in output
