"""The learning rate of a DeepSpeed engine, whose optimizer steps several times for one step of the run."""

from __future__ import annotations

import pytest

from azureml_elastic.config import FixedPerWorkerBatch, Ramp
from tests.support.deepspeed import scaled
from tests.support.worlds import World

LINEAR = FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=4))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_are_those_of_the_multiplied_rate(stage, tmp_path):
    for found in World(2, scaled.fit, tmp_path, 3, stage, LINEAR).values():
        assert found["factors"] == [2, 2, 2]
        assert found["between"] == {scaled.RATE}
        for rates in found["applied"]:
            assert len(rates) > 1
            assert set(rates) == {scaled.RATE * 2}
        engine, reference, control = found["weights"]
        assert engine == reference
        assert engine != control


@pytest.mark.parametrize("stage", [2, 3])
def test_a_ramp_counts_steps_of_the_run(stage, tmp_path):
    for size, until, factors in [(1, 2, [1, 1]), (2, 5, [1, 1.25, 1.5])]:
        for found in World(size, scaled.fit, tmp_path, until, stage, LINEAR).values():
            assert found["factors"] == factors
            assert [set(rates) for rates in found["applied"]] == [{scaled.RATE * factor} for factor in factors]
            assert all(len(rates) > 1 for rates in found["applied"])
            assert found["between"] == {scaled.RATE}
