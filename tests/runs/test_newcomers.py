"""Whole runs of a script without a session: a new node waits until the others have trained."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ledger.events import RanksConnecting, RoundReopened, StateSaved
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import GATHERING

PROGRAM = str(PROGRAMS / "saving.py")


@pytest.mark.parametrize(
    ("minimum", "options"),
    [(timedelta(hours=1), []), (timedelta(seconds=2), ["--no_save"])],
    ids=["after its save", "after the minimum time"],
)
def test_a_new_node_does_not_stop_a_script_before_it_has_trained(tmp_path, minimum, options):
    cluster = LocalCluster(
        (1, 3),
        chaos=parse_schedule("kill=node-1@2s,add@3s"),
        distribution=ElasticDistribution(
            min_round_duration=minimum, rendezvous=GATHERING, stop_timeout=timedelta(seconds=1)
        ),
        run_dir=tmp_path / "run",
        start=FORKED,
    )
    report = cluster.run(["python", PROGRAM, "--output_dir", str(tmp_path / "out"), *options])
    assert (report.outcome, report.exit_code) == ("succeeded", 0), report.message
    assert report.world_sizes == (3, 2, 3)
    events = read_events(tmp_path / "run" / "events")
    reasons = [event.reason for event in events if isinstance(event, RoundReopened)]
    assert reasons == ["lost node-1", "joining: node-3"]
    # The first round has not saved; the work of the second one is known from its save on alone.
    saves = not options
    assert {event.round for event in events if isinstance(event, RanksConnecting)} == {1, 2, 3}
    assert {event.round for event in events if isinstance(event, StateSaved)} == ({2} if saves else set())
    spans = report.spans(events)
    assert {span.round for span in spans if span.activity == "unknown"} == ({1} if saves else {1, 2})
    assert {span.cause for span in spans if span.activity == "lost work"} == ({"scale-up"} if saves else set())
    assert {span.round for span in spans if span.activity == "training"} == ({2, 3} if saves else {3})
    (recovery,) = report.recoveries
    assert (recovery.resumed, recovery.step, recovery.lost) == (2, None, ("node-1",))
