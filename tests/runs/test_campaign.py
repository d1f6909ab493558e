"""Random faults of nodes, their processes, the network, the table and the disk: each run ends well and loses nothing.

Whether it does is observed from outside: the program's processes write what they have trained to files of their own,
and its weights count each sample. A few seeds run with the other tests; ``python -m nox -s chaos`` runs a hundred and
lists how long training stood still. A seed is replayed by ``CAMPAIGN_SEEDS=17:18 python -m pytest
tests/runs/test_campaign.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

import psutil
import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, HealthPolicy
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.accounting import account
from azureml_elastic.ledger.events import RoundEntered, WorkerFailed, WorkersStarted
from azureml_elastic.ledger.picture import NodeTime, Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import Report
from tests.support.campaign import Line, Trial, completed, lost_although_held, seen, standstill_s, trained_again
from tests.support.namespaces import Namespaces
from tests.support.node_server import FORKED, StartAt
from tests.support.paths import PROGRAMS
from tests.support.small_disk import disk, fill_for
from tests.support.whole_runs import at_step, gathering_cluster, processes_of

PROGRAM = str(PROGRAMS / "counted_train.py")
EPOCHS, SAMPLES = 8, 240
CHOSEN = os.environ.get("CAMPAIGN_SEEDS")
SEEDS = range(*map(int, CHOSEN.split(":"))) if CHOSEN else (0, 1, 2, 3, 8, 10, 11)
"""By default each process of a node is killed, or all of them, and two have notices."""

FAILURES = {
    "worker killed": {"killed", "connection"},
    "agent killed": set(),
    "preload server killed": {"store", "killed"},  # the kernel ends its forks with it, and one of them is noticed first
    "round store killed": {"store"},
}
"""What nodes say of the death of one process."""


class Injection:
    """The fault of a trial that the launcher cannot inject, and what it has killed."""

    def __init__(self, trial, run_dir, network):
        self.trial, self.run_dir, self.network = trial, run_dir, network
        self.at, self.dead = None, set()

    def __call__(self, events):
        entered = [event for event in events if isinstance(event, RoundEntered)]
        members = max(entered, key=lambda event: event.round).members
        node = members[0] if self.trial.victim == "rank0" or "round store" in self.trial.kind else members[1]
        self.at = time.time()
        if self.trial.kind == "disk":
            fill_for(self.run_dir, self.trial.seconds)
        elif self.network is not None:
            lost = ((node, members[2]), (members[2], node))[: 1 if self.trial.kind == "one-way cut" else 2]
            for here, there in lost:
                self.network.cut(here, there)
            time.sleep(self.trial.seconds)
            for here, there in lost:
                self.network.mend(here, there)
        elif self.trial.process is not None:
            self._strike([event for event in events if isinstance(event, WorkersStarted) and event.node == node][-1])

    def _strike(self, workers):
        process = psutil.Process(processes_of(workers, self.run_dir / "events")[self.trial.process])
        if self.trial.kind.endswith("killed"):
            self.dead = {process.pid, *(child.pid for child in process.children(recursive=True))}
            process.kill()
            return
        process.suspend()
        time.sleep(self.trial.seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def listening() -> set[int]:
    """Return the ports on which this process listens."""
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults(tmp_path, seed, request, monkeypatch, record_property):
    trial = Trial.draw(seed)
    notice = "notice" in trial.kind
    observed = tmp_path / "observed"
    observed.mkdir()
    ports = listening()
    with contextlib.ExitStack() as stack:
        table, start, network, folder = "sqlite", FORKED, None, tmp_path
        if trial.kind == "table":
            table = "azurite"
            emulator = request.getfixturevalue("azurite")
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", emulator.connection_string)
        if "cut" in trial.kind:
            network = spaces = stack.enter_context(Namespaces([f"node-{number}" for number in range(trial.nodes)]))
            start = StartAt(
                network=lambda env: spaces.space(env[variables.NODE_ID]),
                more=lambda env: {variables.LOCAL_ADDRESS: spaces.addresses[env[variables.NODE_ID]]},
            )
        if trial.kind == "disk":
            folder = stack.enter_context(disk(tmp_path / "small", 600))
        cluster = gathering_cluster(
            folder,
            trial.schedule,
            seed,
            nodes=(1, trial.nodes),
            start=start,
            checkpoint=CheckpointPolicy(every_steps=1000, keep=100),
            table=table,
            distribution=ElasticDistribution(recovery=trial.recovery),
            health=HealthPolicy(quarantine_strikes=None),  # a node that is stopped twice joins again all the same
            timeout=240,
        )
        injection = Injection(trial, folder / "run", network)
        with at_step(folder / "run", trial.step, trial.nodes, injection):
            arguments = ["--epochs", str(EPOCHS), "--step-delay", "0.1", "--ballast", "256" if notice else "0"]
            report = cluster.run([PROGRAM, str(observed), *arguments])
        trail = f"seed {seed}: {trial}: {report.message}; files in {tmp_path}"
        assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
        assert all(node.leftovers == 0 for node in report.nodes), trail
        assert listening() <= ports, trail
        lines = completed(observed)
        if trial.kind in ("node killed", "notice", "burst"):
            check_accounting(report, trail)
        if trial.kind in FAILURES and not trial.schedule:
            events = read_events(report.paths.events)
            failures = {event.failure_kind for event in events if isinstance(event, WorkerFailed)}
            assert failures <= FAILURES[trial.kind], (failures, trail)
            assert len(report.rounds) > 1, trail
        if notice:
            check_notice(report, lines, trial.kind == "notice", trail)
    killed = {node.name for node in report.nodes if node.exit_code == -signal.SIGKILL}
    measured = {"kind": trial.kind, "recovery": trial.recovery, "again": len(trained_again(lines))}
    record_property("campaign", {**measured, "standstill_s": standstill_s(lines, injection.at)})
    assert {line.step for line in lines} == set(range(1, EPOCHS * SAMPLES // 12 + 1)), trail
    assert seen(observed), trail
    assert all(counts == {float(EPOCHS): SAMPLES} for counts in seen(observed)), (seen(observed), trail)
    assert lost_although_held(lines, injection.dead | killed) == set(), trail


def test_what_the_observer_takes_for_lost():
    lines = [Line(1.0, 1, 1, "a", 1), Line(1.1, 1, 2, "a", 1), Line(1.2, 1, 2, "b", 2), Line(4.0, 2, 2, "b", 3)]
    assert trained_again(lines).keys() == {2}
    assert lost_although_held(lines, {"a"}) == lost_although_held(lines, {2}) == {2}
    assert lost_although_held(lines, {"a", 2}) == set()
    assert standstill_s([*lines, Line(4.2, 2, 3, "b", 3)], 1.15) == pytest.approx(3.05)


def check_notice(report: Report, lines: Sequence[Line], long: bool, trail: str) -> None:
    """Verify that what a node with a notice has trained is committed, by others if it was killed while it saved."""
    (victim,) = report.faults[0].nodes
    agreed = "All workers stop after the same step" in (report.paths.logs / f"{victim}.log").read_text()
    if long:
        assert agreed, trail
        assert {node.name: node.exit_code for node in report.nodes}[victim] == 128 + signal.SIGTERM, trail
    if agreed:  # else it was gone before, on a busy machine
        trained = max(line.step for line in lines if line.node == victim)
        # Not by events: a node that has committed may be killed before it has written that down.
        committed = {int(path.parent.name[5:17]) for path in report.paths.checkpoints.glob("step-*/committed")}
        assert committed & {trained - 1, trained, trained + 1}, f"{trail}; trained {trained}, committed {committed}"


def check_accounting(report: Report, trail: str) -> None:
    """Compare the accounting with what the launcher and the step log know."""
    walls = {node.name: NodeTime(node.began or 0.0, node.ended or 0.0) for node in report.nodes}
    spans = account(Picture.of(read_events(report.paths.events)), walls)
    for node in report.nodes:
        own = [span for span in spans if span.node == node.name]
        if own:  # else it was killed before its agent wrote a line
            assert all(one.ended == other.started for one, other in pairwise(own)), trail
            attributed = sum(span.seconds for span in own)
            assert attributed == pytest.approx(walls[node.name].seconds, rel=0.005), (node.name, own, trail)
    assert {span.cause for span in spans} - {None} <= {"node loss", "preemption", "scale-up"}, (spans, trail)
    assert report.audit is not None
    assert report.audit.complete, trail
    assert report.lost_steps <= report.audit.rolled_back_steps, trail
