"""Random losses, freezes, new nodes and faults of the table: each run ends well and sees each sample exactly once.

A few seeds run with the other tests; ``python -m nox -s chaos`` runs a hundred. A seed is replayed by
``CHAOS_SEEDS=17:18 python -m pytest tests/runs/test_random_schedules.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import psutil
import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, HealthPolicy
from azureml_elastic.ledger.accounting import account
from azureml_elastic.ledger.events import Event, RoundEntered
from azureml_elastic.ledger.picture import NodeTime, Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.model import Freeze, Kill, Preempt, Schedule
from azureml_elastic.local.faults.schedule import random_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS

PROGRAM = str(PROGRAMS / "chaos_train.py")
KINDS = ("kill", "preempt", "add", "freeze", "table")
CAUSES = {Kill: "node loss", Freeze: "node loss", Preempt: "preemption"}
FIRST, LAST = (int(number) for number in os.environ.get("CHAOS_SEEDS", "0:4").split(":"))


def schedule(seed: int) -> Schedule:
    """Draw the faults; the first loss is always a sudden one."""
    drawn = random_schedule(seed, faults=2 + seed % 3, last_step=60, kinds=KINDS)
    faults = [
        Kill(fault.target, fault.when) if isinstance(fault, Preempt) and index == 0 else fault
        for index, fault in enumerate(drawn.faults)
    ]
    return replace(drawn, faults=tuple(faults))


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_random_losses_and_new_nodes(tmp_path, seed, request, monkeypatch):
    faults = schedule(seed)
    table = "sqlite"
    if faults.disturbs_table:
        table = "azurite"
        emulator = request.getfixturevalue("azurite")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", emulator.connection_string)
    ports = listening()
    cluster = LocalCluster(
        (1, 3),
        start=FORKED,
        chaos=faults,
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=7),
        table=table,
        # A node that is frozen twice joins again all the same.
        distribution=ElasticDistribution(recovery="in_process" if seed % 2 else "restart"),
        health=HealthPolicy(quarantine_strikes=None),
    )
    report = cluster.run([PROGRAM])
    trail = f"seed {seed}: {faults}: {report.message}; files in {report.paths.run_dir}"
    assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
    assert report.audit is not None, trail
    assert (report.audit.missing, report.audit.repeated) == (0, 0), trail
    assert (report.audit.steps, report.audit.seen) == (80, 944), trail
    assert all(node.leftovers == 0 for node in report.nodes), trail
    assert listening() <= ports, trail
    check_accounting(report, faults, trail)


def check_accounting(report: Report, faults: Schedule, trail: str) -> None:
    """Compare the accounting with what the launcher and the step log know."""
    events = read_events(report.paths.events)
    walls = {node.name: NodeTime(node.began or 0.0, node.ended or 0.0) for node in report.nodes}
    spans = account(Picture.of(events), walls)
    for node in report.nodes:
        own = [span for span in spans if span.node == node.name]
        if own:  # else it was killed before its agent wrote a line
            assert all(one.ended == other.started for one, other in pairwise(own)), trail
            attributed = sum(span.seconds for span in own)
            assert attributed == pytest.approx(walls[node.name].seconds, rel=0.005), (node.name, own, trail)
    injected = {CAUSES[type(fault)] for fault in faults.faults if type(fault) in CAUSES} | {"scale-up"}
    if any(isinstance(fault, Freeze) for fault in faults.faults):
        injected.add("connection")  # a worker's collective may break before its node is held to be lost, or instead
    assert {span.cause for span in spans} - {None} <= injected, (spans, trail)
    for lost in [fault for fault in report.faults if fault.fault.startswith("kill")]:
        if any(round_.lost == lost.nodes for round_ in report.rounds):
            assert any(span.cause == "node loss" for span in spans), trail
    assert report.audit is not None
    if dies_alone(report, events):  # with it goes what its agent had not recorded yet of the steps of its workers
        assert report.lost_steps <= report.audit.rolled_back_steps, trail
    else:
        assert report.lost_steps == report.audit.rolled_back_steps, trail
    if report.lost_steps == 0:
        assert report.samples == report.audit.seen, trail
    else:  # where in the round the other samples were is known as exactly as its steps were recorded
        assert report.samples == pytest.approx(report.audit.seen, rel=0.05), trail


def dies_alone(report: Report, events: Sequence[Event]) -> bool:
    """Return whether all nodes of a round were killed at once."""
    entered = [event for event in events if isinstance(event, RoundEntered)]
    for fault in report.faults:
        members = [event.members for event in entered if event.node in fault.nodes and event.time < fault.time]
        if fault.fault.startswith("kill") and members and set(members[-1]) <= set(fault.nodes):
            return True
    return False
