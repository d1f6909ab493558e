"""Steps that a script counts once more: nothing is computed, and the losses are those of the trained steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from azureml_elastic.train.integrations.script_loop.repeated_steps import RepeatedModels, StepHistory, own_loss


class Counted(nn.Module):
    """A classifier that counts its forward passes, and returns its loss if it has labels."""

    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(3, 4), 0

    def forward(self, x, labels=None):
        self.passes += 1
        scores = self.layer(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores} if labels is not None else scores


X, Y = torch.randn(2, 3), torch.tensor([0, 3])


@pytest.fixture
def model():
    return Counted()


def test_the_loss_of_the_models_own_is_the_one_of_that_time(model):
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.certain = True
    losses = []
    for loss in (0.5, 0.25, None):
        repeated.set_loss(loss)
        losses.append(model(X, labels=Y)["loss"].item())
    repeated.end()
    assert losses[:2] == [0.5, 0.25]
    assert losses[2] == pytest.approx(model(X, labels=Y)["loss"].item())
    assert model.passes == 2


def test_a_loss_that_the_script_computes_is_the_one_of_that_time(model):
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.set_loss(0.125)
    scores = model(X)
    loss = nn.functional.cross_entropy(scores.view(-1, 4), Y)
    right = (scores.argmax(-1) == Y).float().mean()
    total = torch.zeros(()) + loss.detach()
    loss.backward()
    assert (loss.item(), total.item()) == (0.125, 0.125)
    assert type(loss) is torch.Tensor
    assert right.item() in (0.0, 0.5, 1.0), "a share of right predictions is no loss"
    assert all(parameter.grad is None for parameter in model.parameters())
    repeated.end()
    assert "forward" not in model.__dict__


def test_terms_of_a_loss_are_the_whole_loss_which_is_said(model):
    said = []
    repeated = RepeatedModels([model], said.append)
    repeated.begin()
    repeated.set_loss(0.125)
    scores = model(X)
    first = nn.functional.cross_entropy(scores, Y)
    assert not said
    second = scores.square().mean()
    assert ((first + second).item(), len(said)) == (0.25, 1)
    assert "sums of them are too large for this epoch" in said[0]


def test_repeated_steps_compute_one_forward_pass(model):
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.certain = True
    for step in range(200):
        repeated.set_loss(float(step))
        assert nn.functional.cross_entropy(model(X), Y).item() == step
    assert model.passes == 1


def test_a_batch_that_the_script_may_only_look_at_is_computed(model):
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.set_loss(0.5)
    more = torch.randn(5, 3)
    with torch.no_grad():
        assert torch.equal(model(more), model.layer(more))
    assert len(model(more)) == 5
    assert nn.functional.cross_entropy(model(more), torch.zeros(5, dtype=torch.long)).item() == 0.5
    assert model.passes == 3


def test_the_history_has_the_losses_of_completed_steps():
    history = StepHistory(2, lambda: 0)
    for step in range(3):
        history.add(torch.tensor(float(step), requires_grad=True))
        history.complete_step(step // 2)  # the second batch had no loss
    history.add(torch.tensor(7.0))
    other = StepHistory(2, lambda: 0)
    other.load_state_dict(history.state_dict())
    assert [other.loss(0, batch) for batch in range(5)] == [0.0, None, 1.0, None, None]
    assert other.loss(1, 0) == 2.0
    assert [other.steps(epoch) for epoch in range(3)] == [2, 1, 0]
    other.add(torch.tensor(9.0))
    other.complete_step(3)
    assert (other.loss(3, 0), other.steps(2), other.steps_from(1)) == (9.0, 0, 2)


def test_a_history_that_begins_later_knows_how_many_steps_there_were():
    history = StepHistory(1, lambda: 0)
    history.begin_at(2, 3)
    history.add(torch.tensor(1.0))
    history.complete_step(2)
    assert (history.steps(1), history.steps(2)) == (0, 4)
    assert [history.loss(2, batch) for batch in (2, 3)] == [None, 1.0]


def test_models_that_a_step_calls_several_times_answer_in_each_shape(model):
    repeated = RepeatedModels([model], [].append)
    repeated.begin()
    repeated.certain = True
    for _ in range(3):
        assert [len(model(torch.zeros(count, 3))) for count in (4, 2)] == [4, 2]
    assert model.passes == 2


def test_outputs_without_a_loss():
    number = torch.tensor(1.5)
    assert own_loss({"loss": number}) is number
    assert own_loss((number, X)) is number
    assert own_loss(X) is own_loss({"logits": X}) is own_loss((X,)) is None
