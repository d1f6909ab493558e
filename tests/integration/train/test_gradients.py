"""The gradient of a step is that of all its samples at once, at any world size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.train.data.sampling import Cursor, DataSpec, order, parts
from azureml_elastic.train.optim.learning_rate import GradientNoiseScale
from tests.support.train import gradients
from tests.support.worlds import World

LENGTH, GLOBAL_BATCH = 53, 24  # the last window has 5 samples: fewer than most worlds here have ranks
SIZES = (1, 2, 3, 4, 5, 7, 12)


def of_one_process(length=LENGTH, size=GLOBAL_BATCH, tokens=False):
    spec = DataSpec(length, global_batch_size=size, seed=0, shuffle=True, drop_last=False)
    samples, model, found, cursor = gradients.data(length), gradients.network().double(), [], Cursor()
    sentences = gradients.Sentences(length)
    while window := spec.window(cursor.consumed, size):
        ids = order(spec, 0)(torch.arange(window.start, window.stop).numpy()).tolist()
        x, y = gradients.pad([sentences[index] for index in ids]) if tokens else samples[ids]
        model.zero_grad()
        nn.functional.cross_entropy(model(x.double()), y).backward()
        found.append(gradients.flat(model))
        cursor = Cursor(0, window.stop)
    return found


def error(found, expected):
    """The largest relative error over the steps."""
    found, expected = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("world_size", SIZES)
def test_gradients_are_those_of_all_samples_at_once(world_size, tmp_path):
    policy = FixedGlobalBatch()
    for found in World(world_size, gradients.of_each_step, tmp_path, LENGTH, GLOBAL_BATCH, policy).values():
        assert error(found, of_one_process()) <= 1e-6


@pytest.mark.parametrize("world_size", [3, 5, 12])
def test_means_of_means_are_not(world_size, tmp_path):
    policy = FixedGlobalBatch()
    arguments = (tmp_path, LENGTH, GLOBAL_BATCH, policy, None, False)
    for found in World(world_size, gradients.of_each_step, *arguments).values():
        assert error(found, of_one_process()) >= 1e-2


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (FixedGlobalBatch(), {"micro_batch_size": 3}),
        (FixedGlobalBatch(logical_workers=8), {}),
        (FixedGlobalBatch(logical_workers=5), {"micro_batch_size": 2, "num_workers": 2}),
        (FixedGlobalBatch(logical_workers=8, reduce="exact"), {}),
    ],
    ids=["micro-batches", "logical workers", "both", "exact"],
)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_accumulated_gradients_are_too(world_size, policy, options, tmp_path):
    arguments = (tmp_path, LENGTH, GLOBAL_BATCH, policy, options)
    for found in World(world_size, gradients.of_each_step, *arguments).values():
        assert error(found, of_one_process()) <= 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_batch_per_worker_makes_larger_windows(world_size, tmp_path):
    policy = FixedPerWorkerBatch(scaling="none", reference_world_size=2)
    expected = of_one_process(size=GLOBAL_BATCH // 2 * world_size)
    for found in World(world_size, gradients.of_each_step, tmp_path, LENGTH, GLOBAL_BATCH, policy).values():
        assert error(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (FixedGlobalBatch(), {}),
        (FixedGlobalBatch(), {"micro_batch_size": 3}),
        (FixedGlobalBatch(logical_workers=8, reduce="exact"), {}),
    ],
    ids=["whole", "micro-batches", "exact"],
)
@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_means_over_tokens_are_weighted_by_tokens(world_size, policy, options, tmp_path):
    arguments = (tmp_path, LENGTH, GLOBAL_BATCH, policy, options)
    for found in World(world_size, gradients.of_tokens, *arguments).values():
        assert error(found, of_one_process(tokens=True)) <= 1e-6


@pytest.mark.shards_on_cpus
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 3}], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_sharded_gradients_are_weighted_too(world_size, options, tmp_path):
    arguments = (tmp_path, LENGTH, GLOBAL_BATCH, FixedGlobalBatch(), options, True, True)
    for found in World(world_size, gradients.of_each_step, *arguments).values():
        assert error(found, of_one_process()) <= 1e-6


@pytest.mark.parametrize(
    ("world_size", "options", "hooked"),
    [(3, {}, False), (3, {}, True), (2, {"micro_batch_size": 5}, False), (7, {"micro_batch_size": 2}, False)],
)
def test_the_noise_is_that_of_the_micro_batches(world_size, options, hooked, tmp_path):
    size = 8  # samples of a worker
    count = min(size * world_size, LENGTH)
    ids = order(DataSpec(LENGTH, global_batch_size=size, seed=0, shuffle=True, drop_last=False), 0)(
        torch.arange(count).numpy()
    ).tolist()
    squares, batches, mean = 0.0, 0, torch.zeros(())
    for rank in range(world_size):
        for part in parts(count, world_size, rank, most=options.get("micro_batch_size")):
            x, y = gradients.data(LENGTH)[[ids[index] for index in part]]
            model = gradients.network().double()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            gradient = torch.tensor(gradients.flat(model), dtype=torch.float64)
            squares, batches = squares + len(part) / count * float(gradient.square().sum()), batches + 1
            mean = mean + len(part) / count * gradient
    squared = float(mean.square().sum())
    expected = GradientNoiseScale().observe(squares, squared, micro_batches=batches, count=count, reference=size)
    policy = FixedPerWorkerBatch(scaling="adascale")
    arguments = (tmp_path, LENGTH, size, policy, options, hooked)
    for moments, factor, calls in World(world_size, gradients.noise, *arguments).values():
        assert bool(calls) == hooked
        assert moments == pytest.approx(expected.moments, rel=1e-5)
        assert factor == pytest.approx(expected.gain(1, world_size), rel=1e-5)
        assert 1 < factor <= world_size
