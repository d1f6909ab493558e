"""Preempted nodes: what they have trained is committed, whether they live to write it or die in the middle of it.

A few seeds run with the other tests; ``python -m nox -s chaos`` runs fifty. A seed is replayed by
``NOTICE_SEEDS=17:18 python -m pytest tests/runs/test_notices.py``.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticDistribution
from azureml_elastic.ledger.events import CheckpointCommitted, RoundEntered
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.model import AtStep, Preempt, Schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS

PROGRAM = str(PROGRAMS / "chaos_train.py")
LONG_NOTICE_S = 30.0
SIGTERM_EXIT = 143
FIRST, LAST = (int(number) for number in os.environ.get("NOTICE_SEEDS", "0:3").split(":"))


def steps_of(node: str, run_dir: Path) -> set[int]:
    """Return the steps that a node has completed."""
    rounds = [event for event in read_events(run_dir / "events") if isinstance(event, RoundEntered)]
    found = set()
    for entered in rounds:
        if entered.node == node:
            path = run_dir / "samples" / f"round-{entered.round}.rank-{entered.rank}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found |= {line["step"] for line in lines if line.get("done")}
    return found


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_what_a_preempted_node_has_trained_is_committed(tmp_path, seed, record_property):
    moments = random.Random(seed)
    # Every third one has its 30 s; the others are gone before they have left, many of them while they write.
    notice = LONG_NOTICE_S if seed % 3 == 0 else moments.uniform(0.25, 0.85)
    victim = moments.choice(["node-0", "node-1"])
    fault = Preempt(victim, AtStep(moments.randint(8, 40)), notice)
    cluster = LocalCluster(
        (1, 2),
        start=FORKED,
        chaos=Schedule((fault,)),
        run_dir=tmp_path / "run",
        audit=True,
        checkpoint=CheckpointPolicy(every_steps=1000),  # so that what is committed is so for the notice
        distribution=ElasticDistribution(recovery="in_process" if seed % 2 else "restart"),
    )
    report = cluster.run([PROGRAM, "--ballast", "256"])
    trail = f"seed {seed}: {fault}: {report.message}; files in {report.paths.run_dir}"
    assert (report.outcome, report.exit_code) == ("succeeded", 0), trail
    assert report.audit is not None, trail
    assert report.audit.complete, trail
    assert report.audit.rolled_back_steps == 0, trail
    events = read_events(tmp_path / "run" / "events")
    trained = max(steps_of(victim, tmp_path / "run"), default=0)
    if not trained:
        pytest.skip(f"{trail}: on a busy machine it was gone before it had joined")
    agreed = "All workers stop after the same step" in (report.paths.logs / f"{victim}.log").read_text()
    if notice < LONG_NOTICE_S and not agreed:
        pytest.skip(f"{trail}: on a busy machine it was gone before all had agreed; test_recovery has such deaths")
    assert agreed, trail
    if notice == LONG_NOTICE_S:
        assert {node.name: node.exit_code for node in report.nodes}[victim] == SIGTERM_EXIT, trail
    entered = max(event.round for event in events if isinstance(event, RoundEntered) and event.node == victim)
    commits = [event for event in events if isinstance(event, CheckpointCommitted)]
    (noticed,) = report.faults
    first = min((event for event in commits if event.time > noticed.time), key=lambda event: event.time)
    record_property("made up for", first.round > entered)
    assert trained - 1 <= first.step <= trained + 1, f"{trail}; trained {trained}, committed {first.step}"
