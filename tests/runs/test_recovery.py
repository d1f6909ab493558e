"""Losses cost no completed step, whether workers are started anew or stay: whole runs of real nodes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.events import (
    Event,
    NodeStarted,
    Progress,
    Restored,
    RoundReopened,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.reading import EventReader
from tests.support.node_server import run_script
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import after_gathering, assert_whole, gathering_cluster, workers_at_step

PROGRAM = str(PROGRAMS / "chaos_train.py")
TO_THE_FAULT = (PROGRAM, "--epochs", "5", "--fault-at")

both = pytest.mark.parametrize("recovery", ["restart", "in_process"])


def cluster(tmp_path, recovery, chaos="", nodes=(1, 3), handover_s=5, **options):
    distribution = ElasticDistribution(
        recovery=recovery,
        handover_timeout=timedelta(seconds=handover_s),
        process_count_per_instance=options.pop("count", 1),
    )
    options = {"checkpoint": CheckpointPolicy(), "distribution": distribution, **options}
    return gathering_cluster(tmp_path, chaos, nodes=nodes, **options)


def assert_nothing_lost(report):
    assert_whole(report)
    assert report.audit.rolled_back_steps == 0, report.audit
    for before, after in zip(report.rounds, report.rounds[1:], strict=False):
        if after.restored_step is not None:
            assert after.restored_step >= (before.last_step or 0)  # progress is not written down at every step


@both
def test_a_killed_node_costs_no_step(tmp_path, recovery):
    report = cluster(tmp_path, recovery, "kill=rank0@step:25").run([*TO_THE_FAULT, "25", "--gather", "3"])
    assert_nothing_lost(report)
    assert after_gathering(report, 3) == (3, 2)
    assert report.recoveries[-1].lost == report.faults[0].nodes
    if recovery == "in_process":  # survivors keep their processes
        pids: dict[str, set[int]] = {}
        for event in EventReader(report.paths.events).read():
            if isinstance(event, WorkersStarted):
                pids.setdefault(event.node, set()).update(event.pids)
        assert all(len(found) == 1 for found in pids.values()), pids


def kept(text):
    """Return what averaging.py has printed."""
    line = next(line for line in text.splitlines() if "kept {" in line)
    return json.loads(line.partition("kept ")[2])


@both
def test_averages_that_are_not_tracked_go_on_where_they_were(tmp_path, recovery):
    script = str(PROGRAMS / "averaging.py")
    environment = {**os.environ, variables.RUN_DIR: str(tmp_path)}
    expected = kept(run_script([sys.executable, script], env=environment, timeout=120).stdout)
    report = cluster(tmp_path, recovery, "kill=rank0@step:23", (1, 2)).run([script])
    assert_nothing_lost(report)
    found = kept("".join(path.read_text() for path in report.paths.logs.glob("*.log")))
    assert found.pop("norms") == pytest.approx(expected.pop("norms"), rel=1e-5)
    assert found == expected
    assert found["updates"] == 60


def restored_from(report):
    """Return where each round but the first has restored its state from."""
    restored = [event for event in EventReader(report.paths.events).read() if isinstance(event, Restored)]
    return {event.directory for event in restored if event.round > min(each.round for each in restored)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run without losses."""
    environment = {**os.environ, variables.RUN_DIR: str(tmp_path_factory.mktemp("undisturbed"))}
    command = [sys.executable, PROGRAM, "--epochs", "5", "--step-delay", "0"]
    return weights_in(run_script(command, env=environment, timeout=120).stdout)


def weights_in(text):
    line = next(line for line in reversed(text.splitlines()) if "weights" in line)
    return [float(each) for each in line.partition("weights")[2].split()]


def test_a_node_of_a_replica_costs_no_step(tmp_path, undisturbed):
    running = cluster(tmp_path, "restart", "kill=rank0@step:25", count=2, checkpoint=CheckpointPolicy(every_steps=1000))
    report = running.run([*TO_THE_FAULT, "25", "--gather", "6", "--replicas"])
    assert_nothing_lost(report)
    assert after_gathering(report, 6) == (6, 4)
    assert restored_from(report) == {"memory"}
    texts = [path.read_text() for path in report.paths.logs.glob("*.log")]
    found = [weights_in(text) for text in texts if "weights" in text]
    assert found == [pytest.approx(undisturbed, abs=2e-5)]


@both
def test_a_worker_of_a_replica_costs_no_step(tmp_path, recovery):
    running = cluster(tmp_path, recovery, nodes=(2, 2), count=2, checkpoint=CheckpointPolicy(every_steps=1000))
    with meanwhile(kill_a_worker, tmp_path / "run" / "events", 25):
        report = running.run([*TO_THE_FAULT, "25", "--full", "4", "--replicas"])
    assert_nothing_lost(report)
    assert restored_from(report) == {"memory"}


@pytest.mark.parametrize("seconds", [12, pytest.param(60, marks=pytest.mark.chaos)])
@both
def test_a_frozen_node_costs_no_step_and_comes_back(tmp_path, recovery, seconds):
    arguments = [*TO_THE_FAULT, "25", "--full", "2"]
    freeze = f"freeze=rank0@step:25/{seconds}s"
    report = cluster(tmp_path, recovery, freeze, nodes=(1, 2)).run(arguments)
    assert_nothing_lost(report)
    assert after_gathering(report, 2) == (2, 1, 2)
    assert {node.exit_code for node in report.nodes} == {0}  # it is fenced off, and comes back as a new member


@both
def test_what_a_node_holds_that_the_others_gave_up_is_not_thrown_away(tmp_path, recovery):
    """The last of the others is killed: it alone has the newest state."""

    def kill_the_other() -> None:
        workers_at_step(events, 25, "node-0")
        reader, seen = EventReader(events), list[Event]()
        while not any(isinstance(event, RoundReopened) and event.lost == ("node-1",) for event in seen):
            time.sleep(0.02)
            seen += reader.read()
        os.kill(next(event.pid for event in seen if isinstance(event, NodeStarted) and event.node == "node-0"), 9)

    events = tmp_path / "run" / "events"
    policy = CheckpointPolicy(every_steps=1000)
    running = cluster(tmp_path, recovery, "freeze=node-1@step:25/7s", nodes=(1, 2), checkpoint=policy)
    with meanwhile(kill_the_other):
        report = running.run([*TO_THE_FAULT, "25", "--gather", "2"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit.complete, report.audit
    assert report.rounds[-1].restored_step >= 25


@both
def test_a_newcomer_costs_no_step(tmp_path, recovery):
    arguments = [PROGRAM, "--epochs", "5", "--full", "3"]
    report = cluster(tmp_path, recovery, "kill=any@step:10,add@step:20").run(arguments)
    assert_nothing_lost(report)
    assert after_gathering(report, 3) == (3, 2, 3)


@both
@pytest.mark.parametrize("victim", [0, 1])
def test_the_worker_beside_a_killed_one_hands_over_on_a_lone_node(tmp_path, recovery, victim):
    policy = CheckpointPolicy(every_steps=1000)
    running = cluster(tmp_path, recovery, nodes=(1, 1), count=2, checkpoint=policy)
    events = tmp_path / "run" / "events"
    with meanwhile(lambda: os.kill(workers_at_step(events, 25, "node-0").pids[victim], signal.SIGKILL)):
        report = running.run([*TO_THE_FAULT, "25"])
    assert_nothing_lost(report)
    assert restored_from(report) == {"memory"}


@both
def test_a_killed_worker_costs_no_step(tmp_path, recovery):
    running = cluster(tmp_path, recovery, nodes=(1, 2))
    with meanwhile(kill_a_worker, tmp_path / "run" / "events", 25):
        report = running.run([*TO_THE_FAULT, "25", "--full", "2"])
    assert_nothing_lost(report)
    failures = [event for event in EventReader(report.paths.events).read() if isinstance(event, WorkerFailed)]
    assert [(event.exit_code, event.failure_kind) for event in failures] == [(128 + signal.SIGKILL, "killed")]
    # A worker that stays goes on alone, unless the other node's is back before its next step.
    assert after_gathering(report, 2) in ([(2,)] if recovery == "restart" else [(2,), (2, 1, 2)])


def test_neighbours_of_a_killed_worker_hold_nobody_up(tmp_path):
    running = cluster(tmp_path, "in_process", nodes=(1, 2), handover_s=60, count=2)
    with meanwhile(kill_a_worker, tmp_path / "run" / "events", 25):
        report = running.run([*TO_THE_FAULT, "25", "--full", "4"])
    assert_nothing_lost(report)
    assert after_gathering(report, 4) == (4, 2, 4)
    first, second, _ = report.rounds[-3:]
    events = EventReader(report.paths.events).read()
    steps = [event for event in events if isinstance(event, Progress) and event.node == "node-0"]
    last = max(event.time for event in steps if event.round == first.number)
    # Workers that say nothing are given up after a minute here.
    assert min(event.time for event in steps if event.round == second.number) - last < 30


@contextmanager
def meanwhile(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Call a function in a thread beside the block, and raise what it has raised."""
    with ThreadPoolExecutor(1) as threads:
        called = threads.submit(function, *arguments)
        yield
        called.result()


def kill_a_worker(events: Path, step: int, node: str = "node-1") -> None:
    """Kill the worker of a node once a step is reached."""
    os.kill(workers_at_step(events, step, node).pids[0], signal.SIGKILL)


@pytest.mark.shards_on_cpus
def test_sharded_state_goes_on_from_the_newest_copy_in_memory(tmp_path):
    """No worker has all of it: with a node its share is gone, but for the copy on another node."""
    run = cluster(
        tmp_path,
        "restart",
        "kill=rank0@step:47",
        checkpoint=CheckpointPolicy(every_steps=1000, snapshot_every_steps=5),
    )
    report = run.run([*TO_THE_FAULT, "47", "--sharded", "--ballast", "8", "--gather", "3"])
    assert after_gathering(report, 3) == (3, 2)
    assert_goes_on_from_memory(report)


@pytest.mark.parametrize(
    "arguments", [[], pytest.param(["--sharded"], marks=pytest.mark.shards_on_cpus)], ids=["replicated", "sharded"]
)
def test_a_lone_workers_state_outlives_it(tmp_path, arguments):
    """It is killed, with all that it had in mind; the agent has its copies."""
    running = cluster(
        tmp_path, "restart", nodes=(1, 1), checkpoint=CheckpointPolicy(every_steps=1000, snapshot_every_steps=5)
    )
    with meanwhile(kill_a_worker, tmp_path / "run" / "events", 47, "node-0"):
        report = running.run([*TO_THE_FAULT, "47", "--ballast", "8", *arguments])
    assert_goes_on_from_memory(report)


@pytest.mark.shards_on_cpus
def test_a_lone_nodes_state_outlives_its_agent(tmp_path):
    """It is started again on the same machine, whose disk has the copies."""
    options = {
        "checkpoint": CheckpointPolicy(every_steps=1000, snapshot_every_steps=5, snapshot_path=str(tmp_path / "disk"))
    }
    run = cluster(tmp_path, "restart", "kill=node-0@step:47,add@step:47", nodes=(1, 1), **options)
    assert_goes_on_from_memory(run.run([*TO_THE_FAULT, "47", "--sharded", "--ballast", "8"]))
    assert not list((tmp_path / "disk").glob("*/*"))


def assert_goes_on_from_memory(report):
    assert_whole(report)
    before, after = report.rounds[-2:]
    assert after.restored_step % 5 == 0
    assert -12 <= after.restored_step - before.last_step <= 5  # progress is not written down at every step
