"""The batch sizes of DeepSpeed configurations."""

from __future__ import annotations

import pytest

from azureml_elastic.errors import UsageError
from azureml_elastic.train.deepspeed_batches import BatchSizes, batch_sizes, for_engine

BATCH, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({MICRO: 8}, BatchSizes(24, 8, 1)),
        ({MICRO: 8, ACCUMULATION: 2}, BatchSizes(48, 8, 2)),
        ({BATCH: 48}, BatchSizes(48, 16, 1)),
        ({BATCH: 48, MICRO: 8}, BatchSizes(48, 8, 2)),
        ({BATCH: 48, ACCUMULATION: 2}, BatchSizes(48, 8, 2)),
        ({BATCH: 48, MICRO: 8, ACCUMULATION: 2}, BatchSizes(48, 8, 2)),
        ({BATCH: 50, MICRO: 8, ACCUMULATION: "auto"}, BatchSizes(50, 8, 3)),
        ({ACCUMULATION: 2}, None),
        ({MICRO: "auto"}, None),
    ],
)
def test_what_a_configuration_means(config, sizes):
    assert batch_sizes(config, 3) == sizes


def test_numbers_that_contradict_each_other():
    with pytest.raises(UsageError, match=r"train_batch_size is 32, but .* \(8\) x .* \(2\) x 3 ranks.* is 48"):
        batch_sizes({BATCH: 32, MICRO: 8, ACCUMULATION: 2}, 3)


def test_what_an_engine_gets():
    config = {BATCH: 24, MICRO: 8, "zero_optimization": {"stage": 2}, "elasticity": {"enabled": True}}
    expected = {MICRO: 8, ACCUMULATION: 2, "zero_optimization": {"stage": 2}}
    assert for_engine(config, BatchSizes(24, 8, 1), 3) == expected
    assert for_engine(config, BatchSizes(24, 8, 1), 1)[ACCUMULATION] == 1
