"""A number of labels knows whether a loss was divided by it."""

from __future__ import annotations

import pytest
import torch

from azureml_elastic.train.integrations.transformers.progress import LabelCount, count_labels


@pytest.fixture
def count():
    return LabelCount.of(torch.tensor(12))


@pytest.mark.parametrize(
    "use",
    [
        lambda count: torch.ones(()) / count,
        lambda count: count * 2,
        lambda count: count.item(),
        float,
        lambda count: torch.ones(()).div_(count),
        lambda count: torch.ones(()) / count.to("cpu"),
    ],
)
def test_a_computation_uses_it_and_is_a_plain_tensor(count, use):
    result = use(count)
    assert count.used == [True]
    assert not isinstance(result, LabelCount)


@pytest.mark.parametrize(
    "look",
    [
        lambda count: count.to("cpu"),
        lambda count: count.to(torch.device("cpu"), non_blocking=True),
        lambda count: count.device,
        lambda count: count.dtype,
        lambda count: count.shape,
        lambda count: count.dim(),
        torch.is_tensor,
        repr,
    ],
)
def test_moving_or_looking_at_it_is_no_use(count, look):
    look(count)
    assert count.used == [False]


def test_labels_are_counted_as_the_trainer_does():
    batch = {"labels": torch.tensor([[5, 6, -100], [-100, 7, 8]])}
    assert count_labels(object(), batch) == 4
    shifting = type("Trainer", (), {"_loss_shifts_labels": True})()
    assert count_labels(shifting, batch) == 3
    assert count_labels(shifting, {**batch, "shift_labels": torch.tensor([1, -100])}) == 1
