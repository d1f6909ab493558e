"""Losses and weights that are NaN or infinite, in a session of one process."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from azureml_elastic import CheckpointPolicy, train
from azureml_elastic.errors import CheckpointError, NonFiniteError, RollbackRequired
from azureml_elastic.train.session.step_checks import WeightsWatch
from tests.support.train import workers
from tests.support.waiting import until

NAN, INFINITE = float("nan"), float("inf")


def policy(folder, on_nonfinite):
    return workers.policy(folder, every_steps=2).model_copy(update={"on_nonfinite": on_nonfinite})


class Loop:
    """A script that multiplies the losses of some steps."""

    def __init__(self, folder, on_nonfinite):
        self.run = train.start(policy(folder, on_nonfinite))
        torch.manual_seed(0)
        self.model = self.run.wrap(nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run.track(model=self.model, optimizer=self.optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(100, 2))
        self.loader = self.run.loader(data, global_batch_size=2)

    def steps(self, count, factors=None, *, skip=()):
        for (x,) in self.loader:
            step = self.run.steps + 1
            self.run.backward(self.model(x).mean() * (factors or {}).get(step, 1.0))
            if step not in skip:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.commit()
            if step == count:
                return


@pytest.fixture
def loop(tmp_path):
    loops = []

    def make(on_nonfinite="warn"):
        close()
        loops.append(Loop(tmp_path, on_nonfinite))
        return loops[-1]

    def close():
        while loops:
            loops.pop().run.__exit__(None, None, None)

    yield make
    close()


def steps_of(folder):
    return sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_weights_that_are_not_finite_are_not_saved_and_warned_about_once(tmp_path, loop, caplog, value):
    each = loop()
    with caplog.at_level(logging.WARNING):
        each.steps(11, {5: value})
        each.run.finish()
    assert steps_of(tmp_path) == [2, 4], "the last good checkpoint is not replaced"
    warned = [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]
    assert [text for text in warned if "of step 5" in text]
    assert len(warned) <= 3, warned


def test_a_script_goes_on_from_its_last_good_checkpoint(loop):
    each = loop()
    each.steps(7, {5: NAN})
    again = loop()
    assert again.run.steps == 4
    assert all(torch.isfinite(parameter).all() for parameter in again.model.parameters())


def test_a_requested_checkpoint_of_such_weights_is_an_error(loop):
    each = loop()
    each.steps(5, {5: NAN})
    with pytest.raises(CheckpointError, match="No checkpoint is taken of step 5: its weights are NaN or infinite"):
        each.run.save(wait=True)


def test_a_loss_alone_is_warned_about_and_its_steps_are_saved(tmp_path, loop, caplog):
    """A script that leaves such steps out by itself has finite weights."""
    each = loop()
    with caplog.at_level(logging.WARNING):
        each.steps(8, {5: NAN, 6: NAN}, skip=(5, 6))
        each.run.finish()
    assert steps_of(tmp_path) == [6, 8]
    assert caplog.text.count("The loss of step 5: NaN or infinite.") == 1
    assert "The loss of step 6" not in caplog.text


def test_the_run_stops_at_the_step(tmp_path, loop):
    each = loop("stop")
    with pytest.raises(NonFiniteError, match=r'of step 5 .* on_nonfinite="stop" ends the run'):
        each.steps(8, {5: NAN})
    assert each.run.steps == 4
    until(lambda: steps_of(tmp_path) == [2, 4])  # that of step 4 was written meanwhile


def test_the_run_rolls_back_for_weights_but_not_for_a_loss(loop):
    each = loop("rollback")
    each.steps(4, {3: NAN}, skip=(3,))
    with pytest.raises(RollbackRequired, match="restarts the run from its last checkpoint"):
        each.steps(8, {5: NAN})
    assert not each.run._run.state.holds_full_state, "the state in memory is not passed on"


def test_a_scaled_loss_that_overflows_does_not_count(caplog):
    model = nn.Linear(1, 1)

    watch = WeightsWatch("stop")
    watch.attach(SimpleNamespace(optimizers=[], modules=[model], scales_gradients=True))
    watch.observe(torch.tensor(INFINITE))
    watch.end_step(1)
    with torch.no_grad():
        model.weight.fill_(NAN)
    with pytest.raises(NonFiniteError):
        watch.end_step(2)


def test_all_weights_count_for_a_checkpoint():
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 1))

    state = SimpleNamespace(optimizers=[], modules=[model], scales_gradients=False)
    watch = WeightsWatch("stop")
    watch.attach(state)
    assert watch.weights_are_finite()
    with torch.no_grad():
        model[0].weight[20, 20] = INFINITE
    watch.end_step(1)  # the next loss tells
    assert not watch.weights_are_finite()
    model.half()
    with torch.no_grad():
        model[0].weight.fill_(60000.0)
    watch.attach(state)
    assert watch.weights_are_finite(), "their norm would overflow"


def test_a_module_without_trained_weights_is_always_finite():
    watch = WeightsWatch("stop")
    watch.attach(
        SimpleNamespace(optimizers=[], modules=[nn.Linear(1, 1).requires_grad_(False)], scales_gradients=False)
    )
    watch.end_step(1)
    assert watch.weights_are_finite()


def test_the_policy_is_checked():
    with pytest.raises(ValueError, match="on_nonfinite"):
        CheckpointPolicy(on_nonfinite="ignore")
