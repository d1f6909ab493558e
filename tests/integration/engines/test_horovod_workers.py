"""Horovod's workers of one node under the engine, without an agent."""

import os
import time

import pytest
from torch.distributed import TCPStore

from azureml_elastic.config import ElasticResources, Plan
from azureml_elastic.engines.engine import RoundStore
from azureml_elastic.environment import names as variables
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.worker_messages import Step

pytest.importorskip("horovod", reason="Horovod is not installed")

STATE = """
import os, sys
from pathlib import Path
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from azureml_elastic.train.horovod import TorchState

hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
state = TorchState(model=model, optimizer=optimizer, scale=[hvd.rank()], epoch=0)
"""
NEWEST = """
if hvd.rank() == 1:  # as a worker that is left of an earlier round
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state.epoch = 3
    state.commits, state._saved_state = 7, {**state._saved_state, "commits": 7, "epoch": 3}
expected = {name: value.clone() for name, value in model.state_dict().items()}

@hvd.elastic.run
def train(state):
    assert (state.commits, state.epoch, state.scale) == (7, 3, [1])
    steps = {float(each["step"]) for each in optimizer.state_dict()["state"].values()}
    assert steps == {1.0}, steps  # new workers take no step of their own
    if hvd.rank() == 1:
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert torch.equal(weights[0], weights[1])
    with torch.no_grad():
        model.weight.zero_()
    state.restore()  # before the first commit: what was received
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert weights[0].any() and torch.equal(weights[0], weights[1])

train(state)
"""
AGAIN = """
marker = Path(sys.argv[1]) / "failed"

@hvd.elastic.run
def train(state):
    while state.epoch < 4:
        state.epoch += 1
        state.commit()
        if state.epoch == 2 and hvd.rank() == 1 and not marker.exists():
            marker.touch()
            raise HorovodInternalError("as after an error of the network")
        hvd.allreduce(torch.ones(1), name="gradient")
    assert hvd.size() == 2

train(state)
"""


class Agent:
    """An agent that has no checkpoint and takes all commits."""

    def __init__(self):
        self.steps = []
        self.started = []

    def pointer(self):
        return None

    def commit(self, reference, stall_seconds):
        pass

    def report(self, report):
        (self.steps if isinstance(report, Step) else self.started).append(report.step)


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def run(tmp_path, monkeypatch, agent):
    """Return a function that runs a program with two workers, and returns its exit code."""
    from azureml_elastic.engines.horovod.engine import HorovodEngine

    monkeypatch.setenv(variables.ROUND, "1")
    monkeypatch.setenv(variables.RUN_DIR, str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    plan = Plan(resources=ElasticResources(max_instance_count=1))
    monkeypatch.setenv(variables.PLAN, plan.to_json())
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = RoundStore("127.0.0.1", server.port, b"", lambda: False)

    def run_program(text):
        program = tmp_path / "program.py"
        program.write_text(text)
        engine = HorovodEngine("node", 2, (os.sys.executable, str(program), str(tmp_path)), agent)
        try:
            engine.enter(WorkerIdentity(0, 0, 1, 1), store)
            code, until = None, time.monotonic() + 120
            while code is None and time.monotonic() < until:
                code = engine.poll()
                time.sleep(0.02)
            return code
        finally:
            engine.stop()

    yield run_program
    store.close()
    del server


def test_all_workers_go_on_from_the_state_with_the_most_commits(run, agent):
    assert run(STATE + NEWEST) == 0
    assert agent.started == [7]


def test_workers_connect_again_after_an_error_without_a_loss(run, agent):
    assert run(STATE + AGAIN) == 0
    assert agent.started == [0, 2]
    assert agent.steps[-1] == 4


def test_a_worker_that_fails_ends_the_node_with_its_exit_code(run):
    assert run(STATE + "sys.exit(3 if hvd.rank() == 1 else 0)\n") == 3
