"""Random number generators continue their sequences after a restore."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.errors import CheckpointDamaged

CPU = torch.device("cpu")


def draw():
    numpy = np.random  # the global generator is what is saved
    return [torch.rand(3).tolist(), random.random(), random.gauss(), numpy.rand(3).tolist(), numpy.normal()]


@pytest.fixture(autouse=True)
def as_before():
    state = random_state.capture(CPU)
    yield
    random_state.restore(state, CPU)


def test_all_generators_continue():
    draw()
    state = random_state.capture(CPU)
    expected = draw()
    draw()
    random_state.restore(state, CPU)
    assert draw() == expected


def test_the_size_of_the_state_is_fixed():
    shapes = set()
    for seed in range(20):
        random_state.begin(seed)
        draw()
        shapes.add(random_state.capture(CPU).shape)
    assert len(shapes) == 1


def test_each_key_has_its_own_sequence():
    drawn = []
    for key in [("c", 1), ("c", 2), ("d", 1), ("c", 1)]:
        random_state.begin(*key)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({str(each) for each in drawn}) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b'{"python": [3, [1], null], "torch": ""}', b"\xff"])
def test_other_content_is_damage(content):
    with pytest.raises(CheckpointDamaged, match="random number generators"):
        random_state.restore(torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8), CPU)
