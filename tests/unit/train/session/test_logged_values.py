"""Logged values: numbers of any kind, assigned to steps, in messages that have a limit."""

from __future__ import annotations

import math
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from azureml_elastic.errors import UsageError
from azureml_elastic.train.session.records import LoggedValues


@pytest.fixture
def sent():
    return []


@pytest.fixture
def values(sent):
    return LoggedValues(SimpleNamespace(report=lambda logged: sent.append((logged.step, logged.values))))


def test_numbers_of_all_kinds_are_floats(values, sent):
    values.add(
        {
            "int": 2,
            "bool": True,
            "tensor": torch.tensor(0.5, requires_grad=True),
            "one": torch.tensor([[3]]),
            "half": torch.tensor(0.5, dtype=torch.bfloat16),
            "numpy": np.float32(0.25),
            "array": np.array([4]),
            "decimal": Decimal("1.5"),
            "inf": math.inf,
        },
        None,
    )
    values.commit(7)
    expected = {"int": 2, "bool": 1, "tensor": 0.5, "one": 3, "half": 0.5, "numpy": 0.25, "array": 4, "decimal": 1.5}
    assert sent == [(7, {**expected, "inf": math.inf})]
    assert all(type(value) is float for value in sent[0][1].values())


def test_a_tensor_that_changes_later_is_logged_as_it_was(values, sent):
    total = torch.tensor(1.0)
    values.add({"total": total}, None)
    total += 1
    values.commit(1)
    assert sent == [(1, {"total": 1.0})]


def test_values_belong_to_the_commit_that_follows_or_to_a_completed_step(values, sent):
    values.add({"loss": 1}, None)
    values.add({"loss": 2}, None)  # replaces it
    values.commit(1)
    values.add({"accuracy": 0.75}, 1)
    assert sent == [(1, {"loss": 2}), (1, {"accuracy": 0.75})], "at once: the process may end before the next commit"
    values.add({"loss": 3}, None)
    values.commit(2)
    assert sent[2:] == [(2, {"loss": 3})]


def test_values_of_a_step_that_is_not_committed_are_dropped(values, sent):
    values.add({"loss": 1}, None)
    values.drop()
    values.commit(1)
    values.add({"loss": 2}, None)
    values.send(wait=True)
    assert sent == []


def test_many_values_of_a_step_are_sent_in_parts(values, sent):
    for part in range(3):
        values.add({f"{part}.{number}": number for number in range(50)}, None)
    values.commit(1)
    assert [(step, len(numbers)) for step, numbers in sent] == [(1, 100), (1, 50)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": torch.ones(2)}, r"'loss' is a torch.float32 tensor of the shape \(2,\); give one real number"),
        ({"loss": torch.tensor(1j)}, "complex64"),
        ({"loss": "0.5"}, "'loss' is '0.5' of the type str; give one real number"),
        ({"loss": None}, "is None of the type NoneType"),
        ({"loss": 10**400}, "of the type int"),
        ({"loss": np.ones(3)}, "of the type ndarray"),
        ({"loss%": 1}, r"the name 'loss%' has other characters .*; write 'loss_'"),
        ({"a" * 251: 1}, "has 251 characters; give at most 250"),
        ({"elastic/x": 1}, "choose another prefix"),
        ({"/loss": 1}, "relative path"),
        ({"a//b": 1}, "relative path"),
        ({"../b": 1}, "relative path"),
        ({"": 1}, "write 'loss'"),
        ({3: 1}, "is of the type int; give a text"),
        ({str(number): 0 for number in range(101)}, "101 values; the limit is 100"),
        ([0.5], "not list"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_what_to_write(values, sent, given, message):
    with pytest.raises(UsageError, match=message):
        values.add(given, None)
    values.commit(1)
    assert sent == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_value_on_a_gpu_is_sent_when_its_copy_is_there(values, sent):
    values.add({"loss": torch.tensor(0.5, device="cuda")}, None)
    values.commit(1)
    values.send(wait=True)
    assert sent == [(1, {"loss": 0.5})]
