"""Whole runs in which Azure announces, and withdraws, the preemption of one machine of the set."""

from __future__ import annotations

import time
from pathlib import Path

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.events import NodeLeft, RoundEntered, RoundReopened
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.metadata_service import MetadataService
from tests.support.node_server import StartAt
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING, after_gathering, at_step

PROGRAM = str(PROGRAMS / "chaos_train.py")
TIMEOUT_S = 120.0
SIGTERM_EXIT = 143


def start_at(service: MetadataService) -> StartAt:
    """Return the start of nodes that find the service at the address of their own machine."""
    return StartAt(more=lambda env: {variables.SCHEDULED_EVENTS: service.address(env[variables.NODE_ID])})


def run(tmp_path: Path, service: MetadataService, play):
    """Play a part once all three nodes train."""
    run_dir = tmp_path / "run"
    cluster = LocalCluster(
        (1, 3),
        start=start_at(service),
        run_dir=run_dir,
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=10),
        rendezvous=GATHERING,
    )
    with at_step(run_dir, 15, 3, lambda _: play()):
        report = cluster.run([PROGRAM, "--epochs", "12", "--gather", "3"])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.audit is not None
    assert report.audit.complete, report.audit
    assert report.audit.rolled_back_steps == 0
    return report


def test_the_announced_machine_leaves_and_its_neighbours_train_on(tmp_path):
    with MetadataService(first_delay=2.0) as service:
        report = run(tmp_path, service, lambda: service.announce("Preempt", "node-1"))
    assert after_gathering(report, 3) == (3, 2)
    assert {node.name: node.exit_code for node in report.nodes} == {"node-0": 0, "node-1": SIGTERM_EXIT, "node-2": 0}
    events = read_events(report.paths.events)
    (reopened,) = [each for each in events if isinstance(each, RoundReopened) and each.lost]
    leaders = {each.round: each.node for each in events if isinstance(each, RoundEntered) and each.rank == 0}
    assert (reopened.node, reopened.lost) == (leaders[reopened.round], ("node-1",)), "when all have stopped"
    (left,) = [event for event in events if isinstance(event, NodeLeft) and event.exit_code]
    assert left.reason.startswith("preempted (scheduled event Preempt ")


def test_events_that_are_not_for_leaving_change_nothing(tmp_path):
    with MetadataService() as service:

        def play() -> None:
            service.announce("Freeze", "node-0", "node-1", "node-2", duration=9)
            service.announce("Preempt", "node-7")
            service.announce("Redeploy", "node-1", notice=7 * 86_400)
            asked = service.documents
            deadline = time.monotonic() + TIMEOUT_S
            while service.documents < asked + 6 and time.monotonic() < deadline:
                time.sleep(0.02)

        report = run(tmp_path, service, play)
    assert after_gathering(report, 3) == (3,)
    assert {node.exit_code for node in report.nodes} == {0}
