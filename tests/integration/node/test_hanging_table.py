"""A node that gets a preemption notice while a call of its table hangs leaves at once, not when the call has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

from azureml_elastic.config import (
    ElasticDistribution,
    HealthPolicy,
    PreemptionPolicy,
    RendezvousTimings,
    TableRendezvous,
)
from azureml_elastic.config.plan import Plan
from azureml_elastic.config.resources import ElasticResources
from azureml_elastic.environment import names as variables
from azureml_elastic.ledger.events import NodeLeft, NodeReady
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.faults.model import Disturbance
from azureml_elastic.local.faults.table_proxy import TableProxy
from tests.support.waiting import until


@pytest.fixture
def proxy(azurite):
    with TableProxy(azurite.endpoint) as made:
        yield made


def test_a_node_that_waits_for_a_round_leaves_while_a_call_of_the_table_hangs(tmp_path, proxy):
    (tmp_path / "train.py").write_text("")
    timings = RendezvousTimings(settle_timeout=timedelta(minutes=5))
    plan = Plan(
        resources=ElasticResources(min_instance_count=2, max_instance_count=2),
        distribution=ElasticDistribution(preload_workers=False),
        rendezvous=TableRendezvous(endpoint=proxy.endpoint, timings=timings),
        health=HealthPolicy(check=False),
        preemption=PreemptionPolicy(scheduled_events=None),
    )
    environ = {
        **os.environ,
        variables.PLAN: plan.to_json(),
        variables.RUN_DIR: str(tmp_path / "run"),
        variables.RUN_ID: "run",
        variables.NODE_ID: "node-0",
    }
    command = [sys.executable, "-m", "azureml_elastic.node", "--", "python", "train.py"]
    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen(command, env=environ, cwd=tmp_path, stderr=output) as node:
        try:
            until(lambda: any(isinstance(event, NodeReady) for event in read_events(tmp_path / "run" / "events")))
            hanging = proxy.add(Disturbance("timeout"))
            until(lambda: proxy.hits(hanging))
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 128 + signal.SIGTERM
        finally:
            node.kill()
    *_, left = [event for event in read_events(tmp_path / "run" / "events") if isinstance(event, NodeLeft)]
    assert left.reason == "preempted (SIGTERM)"
    assert "The table is unavailable" not in log.read_text(), "it has waited until the call had ended"
