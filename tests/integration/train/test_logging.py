"""``run.log()`` in a session: the step that each value belongs to, and rank 0 alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.worker_messages import Logged
from azureml_elastic.train import Session
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.session.run import Run
from azureml_elastic.train.session.training_state import SessionContext
from tests.support.train import workers


class Agent(StandaloneAgent):
    """An agent that keeps what it receives."""

    def __init__(self, folder, identity):
        super().__init__(LocalStorage(folder), identity)
        self.values = []

    def report(self, report):
        if isinstance(report, Logged):
            self.values.append((report.step, report.values))


def open_session(folder, **options):
    identity = WorkerIdentity(0, 0, 1, 0)
    agent = Agent(folder, identity)
    run = Session(Run(SessionContext(identity, agent, LocalStorage(folder), workers.policy(folder), **options)))
    return run, agent


@pytest.fixture
def session(tmp_path):
    run, agent = open_session(tmp_path)
    yield run, agent
    run.__exit__(None, None, None)


def test_values_belong_to_the_open_batch_or_to_the_step_before(session):
    run, agent = session
    model = run.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4)
    run.log({"begin": 0})
    for epoch in run.epochs(2):
        for (x,) in loader:
            loss = model(x).mean()
            run.log({"loss": loss})
            run.backward(loss)
            optimizer.step()
            run.log({"stepped": run.steps})
            run.commit()
            run.log({"after": run.steps})
        run.log({"epoch": epoch})
    run.finish()
    by_name = {}
    for step, values in agent.values:
        for name in values:
            by_name.setdefault(name, []).append(step)
    assert by_name == {
        "begin": [0],
        "loss": [1, 2, 3, 4],
        "stepped": [1, 2, 3, 4],
        "after": [1, 2, 3, 4],
        "epoch": [2, 4],
    }
    assert [step for step, _ in agent.values] == sorted(step for step, _ in agent.values)
    with pytest.raises(UsageError, match=r"run\.log\(\) was called after run\.finish\(\)"):
        run.log({"late": 1})


def test_a_loop_of_one_s_own_logs_before_its_commit(session):
    run, agent = session
    model = run.wrap(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"run\.log\(\) was called before run\.track\(\)"):
        run.log({"loss": 1})
    run.track(model=model)
    for _ in range(2):
        run.log({"loss": 1})
        run.commit()
    run.log({"accuracy": 0.5})
    run.finish()
    assert agent.values == [(1, {"loss": 1.0}), (2, {"loss": 1.0}), (2, {"accuracy": 0.5})]


def test_values_of_a_step_without_a_commit_are_dropped(session):
    run, agent = session
    model = run.wrap(nn.Linear(1, 1))
    run.track(model=model)
    for (_,) in run.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=2):
        run.log({"loss": 1})
        break
    run.finish()
    assert agent.values == []
