"""Whole runs of a script without a session: a new node waits until the others have trained."""

from __future__ import annotations

from datetime import timedelta

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ledger.events import RoundReopened
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
    reasons = [event.reason for event in read_events(tmp_path / "run" / "events") if isinstance(event, RoundReopened)]
    assert reasons == ["lost node-1", "joining: node-3"]
