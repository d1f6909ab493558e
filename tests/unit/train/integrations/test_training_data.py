"""Which data of an accelerate script the session leaves to accelerate, and why, once they are trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from azureml_elastic.train.integrations.accelerate.training_data import TrainingData

DATA = TensorDataset(torch.zeros(8, 2))
BATCHES = BatchSampler(SequentialSampler(DATA), 3, drop_last=True)


class Numbers(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter(range(8))


class Divided(list):
    """A loader of accelerate's own."""

    __hash__ = object.__hash__


class OwnSampler(SequentialSampler):
    """A sampler of the script's own."""


def accelerator(kind="MULTI_CPU", *, dispatch=False):
    """The parts of an accelerator that decide, with a model in evaluation mode."""
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        dispatch_batches=dispatch,
        gradient_state=SimpleNamespace(active_dataloader=None),
        _models=[nn.Linear(2, 2).eval()],
        _optimizers=[object()],
    )


def shuffled():
    return DataLoader(DATA, shuffle=True)


@pytest.mark.parametrize(
    ("found", "loader", "reason"),
    [
        (accelerator(), DataLoader(Numbers()), "its dataset is an IterableDataset, whose samples have no index"),
        (accelerator(), DataLoader(DATA, sampler=OwnSampler(DATA)), "the loader has a OwnSampler"),
        (accelerator(), DataLoader(DATA, batch_sampler=BATCHES), "the loader has a batch sampler of its own"),
        (
            accelerator(),
            DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
            "the sampler draws with replacement",
        ),
        (accelerator(dispatch=True), shuffled(), "dispatch_batches=True has rank 0 read all data"),
        (accelerator("FSDP"), shuffled(), "FSDP version 1 shards the model"),
        (accelerator("MEGATRON_LM"), shuffled(), "Megatron-LM has checkpoints of its own"),
        (accelerator("XLA"), shuffled(), "the device is an XLA device"),
        (accelerator(), DataLoader(DATA), "no model was in training mode when the iteration began"),
    ],
)
def test_data_that_are_left_are_named_once_when_they_are_trained(found, loader, reason, caplog):
    data, session, divided = TrainingData(), SimpleNamespace(is_main=True, trains=False), Divided()
    assert list(data.prepare(session, found, loader, lambda: divided)) == []
    assert data.loop is None
    assert not caplog.messages, "they may be an evaluation's"
    found.gradient_state.active_dataloader = divided
    for _ in range(2):
        data.warn_of_left(session, found)
    (warning,) = caplog.messages
    assert f"does not divide among the ranks: {reason}. The run neither saves nor restores this training" in warning


def test_data_that_no_prepared_loader_has_yielded_are_named(caplog):
    TrainingData().warn_of_left(SimpleNamespace(is_main=True, trains=False), accelerator())
    assert "does not divide among the ranks: no prepared loader has yielded it." in caplog.text
