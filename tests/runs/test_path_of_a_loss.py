"""How many modules of a node take part in going on without a lost node, as a debugger would step through them."""

from __future__ import annotations

import json

from azureml_elastic.ledger.events import Progress, WorkersStarted
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.entered_modules import FOLDER
from tests.support.node_server import WATCHED, StartAt
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING

MOST = 57
"""Modules of ``node`` and ``ipc``, on any thread of the agent; this limit only goes down."""


def test_a_lost_node_is_read_in_few_modules(tmp_path):
    local = LocalCluster(
        (2, 3),
        start=StartAt(more=lambda _: {FOLDER: str(tmp_path)}, starting=WATCHED),
        chaos=parse_schedule("kill=rank0@step:20"),
        run_dir=tmp_path / "run",
        rendezvous=GATHERING,
    )
    report = local.run([str(PROGRAMS / "chaos_train.py"), "--epochs", "4"])
    assert report.outcome == "succeeded", report.message
    (recovery,) = report.recoveries
    events = EventReader(tmp_path / "run" / "events").read()
    lost = min(each.time for each in events if isinstance(each, Progress) and each.round == 2) - recovery.seconds
    found = {}
    for event in events:
        path = tmp_path / f"{event.node}.json"
        if isinstance(event, WorkersStarted) and event.round == 2 and path.exists():
            entered = json.loads(path.read_text())
            found[event.node] = sorted({name for when, name in entered if lost <= when <= event.time})
    assert len(found) == 2
    most = max(found.values(), key=len)
    assert len(most) <= MOST, most
