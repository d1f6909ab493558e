"""A batch that is computed in parts: the same gradients, less memory, and what cannot be divided is left whole."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward

IGNORED = -100


class Output(OrderedDict):
    """An output by name, as those of language models."""


class TinyForCausalLM(nn.Module):
    """A model that computes the mean loss of its labels but the first of each sequence, and returns a cache."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits, past_key_values=object())


class Flattened(nn.Module):
    """A model with a row for each of its 3 features, and a number that has none."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).reshape(-1), self.number


def gradients(model, compute):
    model.zero_grad()
    compute(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_gradients(model, compute, limit):
    divided = copy.deepcopy(model)
    divide_forward(divided, limit)
    for found, expected in zip(gradients(divided, compute), gradients(model, compute), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    return divided


@pytest.mark.parametrize("limit", [1, 3, 4, 9])
def test_gradients_are_those_of_the_whole_batch(limit):
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 5))
    x, y = torch.randn(10, 4), torch.randint(5, (10,))
    assert_same_gradients(model, lambda each: nn.functional.cross_entropy(each(x), y), limit)


def test_a_models_own_loss_is_weighed_by_its_labels():
    labels = torch.randint(11, (6, 8))
    labels[0] = IGNORED  # a part without a label
    labels[3, 2:] = IGNORED
    ids = torch.randint(11, (6, 8))
    divided = assert_same_gradients(TinyForCausalLM(), lambda each: each(input_ids=ids, labels=labels)["loss"], 1)
    output = divided(input_ids=ids, labels=labels)
    assert type(output) is Output
    assert output["logits"].shape == (6, 8, 11)
    assert "past_key_values" not in output


def test_rows_may_be_several_a_sample():
    assert_same_gradients(Flattened("text"), lambda each: (each(torch.arange(12.0).reshape(4, 3))[0] ** 2).sum(), 1)


def test_memory_is_that_of_a_part():
    def kept(model):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()
        return sum(sizes)

    x = torch.randn(64, 16)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU())])
    whole = kept(model)
    divide_forward(model, 8)
    assert kept(model) < whole / 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "batch normalisation"),
        (Flattened(torch.tensor(1)), "without a row"),
        (Flattened(object), None),
    ],
)
def test_what_cannot_be_divided_takes_the_batch_whole_with_one_warning(model, reason, caplog):
    divide_forward(model, 2)
    for _ in range(2):
        model(torch.randn(6, 3))
    assert [reason in each.message for each in caplog.records] == ([True] if reason else [])


def test_evaluations_and_small_batches_are_not_divided():
    sizes = []
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(()))
    inner = model.forward
    model.forward = lambda x: (sizes.append(len(x)), inner(x))[1]
    divide_forward(model, 4)
    model(torch.randn(4, 3))
    with torch.no_grad():
        model(torch.randn(9, 3))
    model.eval()(torch.randn(8, 3))
    assert sizes == [4, 9, 8]


def test_a_copy_has_weights_of_its_own_and_a_model_can_be_pickled():
    model = Flattened(1)
    divide_forward(model, 2)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert copied(torch.ones(6, 3))[0].sum() == 0
    assert model(torch.ones(6, 3))[0].sum() == 18
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(torch.ones(6, 3))[0].sum() == 18
