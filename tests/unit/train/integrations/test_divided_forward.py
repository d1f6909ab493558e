"""A batch that is computed in parts: the same gradients, less memory, and what cannot be divided is left whole."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward

IGNORED = -100


def divide(model, limit):
    """Divide a model whose batch comes from nowhere, so that only its first tensor tells the number of samples."""
    divide_forward(model, CurrentBatch(limit, torch.device("cpu")))


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


class Transposed(nn.Module):
    """A model that has its features first, and standardizes them over the samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.layer(x)
        return (hidden - hidden.mean(0)).T


def gradients(model, compute):
    model.zero_grad()
    compute(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_gradients(model, compute, limit):
    divided = copy.deepcopy(model)
    divide(divided, limit)
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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return, while they live.

    Args:
        model: model whose parameters live already

    Attributes:
        peak: most bytes at a time
    """

    def __init__(self, model):
        super().__init__()
        self._live, self._total, self.peak = set(), 0, 0
        self._add(model.parameters())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _add(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in self._live:
                self._live.add(storage.data_ptr())
                self._total += storage.nbytes()
                weakref.finalize(storage, self._end, storage.data_ptr(), storage.nbytes())
                self.peak = max(self.peak, self._total)

    def _end(self, address, nbytes):
        self._live.discard(address)
        self._total -= nbytes


def test_the_peak_of_a_step_at_half_the_nodes_is_that_at_all_of_them():
    """A rank then has twice the samples."""

    def peak(model, samples):
        tokens = torch.randint(32, (samples, 16))
        optimizer = torch.optim.AdamW(model.parameters())
        with LiveBytes(model) as live:
            for _ in range(2):
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return live.peak

    layers = (nn.TransformerEncoderLayer(32, 2, 128, batch_first=True) for _ in range(3))
    model = nn.Sequential(nn.Embedding(32, 32), *layers, nn.Linear(32, 32))
    all_nodes, whole = peak(model, 8), peak(model, 16)
    divide(model, 8)
    assert peak(model, 16) <= 1.15 * all_nodes < 1.5 * all_nodes < whole


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "batch normalisation"),
        (Flattened(torch.tensor(1)), None),
        (Transposed(), "depend on the others"),
        (Flattened(object), None),
    ],
)
def test_what_cannot_be_divided_takes_the_batch_whole_with_one_warning(model, reason, caplog):
    divide(model, 2)
    for _ in range(2):
        model(torch.randn(6, 3))
    assert [reason in each.message for each in caplog.records] == ([True] if reason else [])


def test_evaluations_and_small_batches_are_not_divided():
    sizes = []
    model = nn.Linear(3, 1)
    inner = model.forward
    model.forward = lambda x: (sizes.append(len(x)), inner(x))[1]
    divide(model, 4)
    model(torch.randn(4, 3))
    with torch.no_grad():
        model(torch.randn(9, 3))
    model.eval()(torch.randn(8, 3))
    assert sizes == [4, 9, 8]


def test_a_copy_has_weights_of_its_own_and_a_model_can_be_pickled():
    model = Flattened(1)
    divide(model, 2)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert copied(torch.ones(6, 3))[0].sum() == 0
    assert model(torch.ones(6, 3))[0].sum() == 18
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(torch.ones(6, 3))[0].sum() == 18
