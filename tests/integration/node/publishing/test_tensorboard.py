"""TensorBoard's own reader finds each step once, also after a restart from an earlier one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from azureml_elastic.node.publishing.tensorboard import TensorBoardPublisher
from azureml_elastic.node.publishing.translation import Update, Value

pytestmark = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def update(*steps, value=0.5, **fields):
    return Update(tuple(Value("loss", step, value, 1000.0 + step) for step in steps), **fields)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(each.step, each.value) for each in found.Scalars("loss")]


def test_steps_that_are_trained_again_replace_the_earlier_ones(tmp_path):
    publisher = TensorBoardPublisher(tmp_path / "logs", "node-0")
    publisher.publish([update(took_over=True), update(0, resumed=0), update(1, 2, 3, 4)])
    assert scalars(tmp_path / "logs") == [(step, 0.5) for step in range(5)]
    publisher.publish([update(2, value=0.25, resumed=2), update(3, 4, 5, value=0.25)])
    publisher.close()
    assert scalars(tmp_path / "logs") == [(0, 0.5), (1, 0.5), (2, 0.5), (2, 0.25), (3, 0.25), (4, 0.25), (5, 0.25)]
    assert len(list((tmp_path / "logs").glob("events.out.tfevents.*.node-0"))) == 2


def test_nothing_is_written_without_values(tmp_path):
    publisher = TensorBoardPublisher(tmp_path / "logs", "node-0")
    publisher.publish([Update(tags={"a": "b"})])
    publisher.close()
    assert not (tmp_path / "logs").exists()
