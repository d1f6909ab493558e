"""Which data of an accelerate script the session leaves to accelerate, and why, once they are trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from azureml_elastic.train.integrations.accelerate.training_data import TrainingData, _same_data

DATA = TensorDataset(torch.zeros(8, 2))
BATCHES = BatchSampler(SequentialSampler(DATA), 3, drop_last=True)


class Numbers(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter(range(8))


class Divided(list):
    """A loader of accelerate's own."""

    __hash__ = object.__hash__


class Endless(Sampler):
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(8))


class Dividing(Endless):
    """A sampler that divides the samples by itself."""

    num_replicas, rank = 2, 0

    def __len__(self):
        return 4


def accelerator(kind="MULTI_CPU", *, dispatch=False, split=False):
    """The parts of an accelerator that decide, with a model in evaluation mode."""
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        dispatch_batches=dispatch,
        split_batches=split,
        gradient_state=SimpleNamespace(active_dataloader=None),
        _models=[nn.Linear(2, 2).eval()],
        _optimizers=[object()],
    )


def shuffled():
    return DataLoader(DATA, shuffle=True)


@pytest.mark.parametrize(
    ("found", "loader", "reason"),
    [
        (accelerator(), DataLoader(Numbers()), "the samples of Numbers have no index"),
        (accelerator(), DataLoader(DATA, sampler=Endless()), "Endless has no length"),
        (accelerator(), DataLoader(DATA, sampler=Dividing()), "Dividing divides them by itself"),
        (
            accelerator(),
            DataLoader(DATA, sampler=BATCHES, batch_size=None),
            "its dataset is asked for whole batches, by batch_size=None",
        ),
        (
            accelerator(split=True),
            DataLoader(DATA, batch_sampler=[[0, 1]] * 4),
            "split_batches=True cuts the batches of list",
        ),
        (accelerator(dispatch=True), shuffled(), "dispatch_batches=True has rank 0 read all data"),
        (accelerator("FSDP"), shuffled(), "FSDP version 1 shards the model"),
        (accelerator("MEGATRON_LM"), shuffled(), "Megatron-LM has checkpoints of its own"),
        (accelerator("XLA"), shuffled(), "the device is an XLA device"),
        (
            accelerator(),
            DataLoader(DATA, batch_sampler=BATCHES),
            "no model was in training mode when the iteration began",
        ),
        (accelerator(), DataLoader(DATA), "no model was in training mode when the iteration began"),
    ],
)
def test_data_that_are_left_are_named_once_when_they_are_trained(found, loader, reason, caplog):
    data, session, divided = (
        TrainingData(),
        SimpleNamespace(is_main=True, trains=False, reference_world_size=2),
        Divided(),
    )
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


def test_parts_of_a_dataset_are_not_taken_for_each_other():
    """But a loader that is made anew in each epoch is the same, with another seed."""

    def loader(sampler, **options):
        return DataLoader(DATA, sampler=sampler, **{"batch_size": 2, **options})

    def weighted(first, seed):
        return WeightedRandomSampler([first, 1.0], 8, generator=torch.Generator().manual_seed(seed))

    same = [
        (loader(SubsetRandomSampler([0, 1])), loader(SubsetRandomSampler([0, 1]))),
        (loader(weighted(2.0, 0)), loader(weighted(2.0, 1))),
        (DataLoader(DATA, 2, shuffle=True), DataLoader(DATA, 2, shuffle=True)),
        (DataLoader(DATA, 2, shuffle=True, generator=torch.Generator()), DataLoader(DATA, 2, shuffle=True)),
        (DataLoader(DATA, batch_sampler=BATCHES), DataLoader(DATA, batch_sampler=BATCHES)),
    ]
    other = [
        (loader(SubsetRandomSampler([0, 1])), loader(SubsetRandomSampler([2, 3]))),
        (loader(weighted(2.0, 0)), loader(weighted(3.0, 0))),
        (loader(Endless()), loader(Dividing())),
        (loader(Endless()), loader(Endless(), batch_size=3)),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), DataLoader(DATA, batch_sampler=[[2, 3]])),
    ]
    assert [_same_data(*pair) for pair in same] == [True] * len(same)
    assert [_same_data(*pair) for pair in other] == [False] * len(other)
