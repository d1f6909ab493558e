"""DeepSpeed engines over changing world sizes and stages."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file

from azureml_elastic.checkpoint.format.catalogue import export, newest_whole
from azureml_elastic.checkpoint.storage.locations import open_storage
from tests.support.deepspeed import engines
from tests.support.worlds import World

STEPS = (6, 13, 20)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of one rank that trains through, and what its engine has in the end."""
    ((losses, _, end),) = World(1, engines.fit, tmp_path_factory.mktemp("whole"), STEPS[-1], 1).values()
    return losses, end


def train_in_parts(folder, parts, kind=None, offload=False, micro=None):
    losses, before = [], None
    for (size, stage), until in zip(parts, STEPS, strict=False):
        values = World(size, engines.fit, folder, until, stage, kind, offload, micro).values()
        more, began, end = values[0]
        for other, other_began, other_end in values[1:]:
            assert other == more
            assert other_began == began
            assert other_end == end
        if before is not None:
            require_same(began, before)
        losses += more
        before = end
    return losses, before


def require_same(one, other):
    """What a stage has not, or keeps elsewhere, is not compared."""
    for key in one:
        if one[key] is not None and other[key] is not None:
            assert one[key] == other[key], key


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 1), (3, 1), (1, 1)],
        [(2, 2), (3, 2), (1, 2)],
        [(2, 3), (3, 3), (1, 3)],
        [(2, 2), (2, 3), (3, 1)],
        [(3, 3), (2, 0), (3, 2)],
    ],
    ids=["zero1", "zero2", "zero3", "zero2-3-1", "zero3-0-2"],
)
def test_losses_are_those_of_the_uninterrupted_run(parts, uninterrupted, tmp_path):
    losses, end = train_in_parts(tmp_path, parts)
    assert losses == pytest.approx(uninterrupted[0], rel=0, abs=1e-5)
    assert {key: end[key] for key in ("steps", "lr", "batches")} == {
        key: uninterrupted[1][key] for key in ("steps", "lr", "batches")
    }


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ([(1, 1), (3, 1), (2, 1)], {}),
        ([(2, 2), (3, 3), (1, 2)], {}),
        ([(3, 3), (1, 0), (2, 3)], {}),
        ([(2, 2), (3, 2), (1, 2)], {"offload": True}),
        ([(2, 3), (3, 3), (1, 3)], {"offload": True}),
    ],
    ids=["zero1", "zero2-3-2", "zero3-0-3", "offload2", "offload3"],
)
def test_accumulated_micro_batches_change_nothing(parts, options, uninterrupted, tmp_path):
    if options and parts[0][1] == 2 and engines.LOSES_GRADIENTS:
        (outcome,) = World(1, engines.fit, tmp_path, 1, 2, None, True, 2).outcomes()
        assert "loses gradients" in outcome.error
        return
    losses, _ = train_in_parts(tmp_path, parts, micro=2, **options)
    assert losses == pytest.approx(uninterrupted[0], rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ([(2, 1), (3, 2), (2, 3)], {"kind": "bf16"}),
        ([(3, 3), (2, 1)], {"kind": "bf16"}),
        ([(2, 2), (3, 3), (2, 1)], {"kind": "fp16"}),
        ([(2, 2), (3, 2)], {"offload": True}),
        ([(3, 3), (2, 3)], {"offload": True}),
    ],
    ids=["bf16", "bf16-3-1", "fp16", "offload2", "offload3"],
)
def test_every_bit_is_restored(parts, options, tmp_path):
    if options.get("kind") == "fp16" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed refuses fp16 on this processor")
    losses, end = train_in_parts(tmp_path, parts, **options)
    assert all(math.isfinite(loss) for loss in losses)
    if options.get("kind") == "fp16":
        assert STEPS[0] <= end["skipped"] < STEPS[-1]
        assert end["scale"]["cur_scale"] < 2**19


def test_a_checkpoint_has_whole_parameters_for_others(tmp_path):
    World(2, engines.fit, tmp_path / "c", 3, 3).values()
    storage = open_storage(tmp_path / "c")
    manifest = newest_whole(storage)
    assert export(storage, manifest, "engine/parameters", tmp_path / "model.safetensors") == 7
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: tuple(parameter.shape) for name, parameter in engines.Net().named_parameters()
    }
    assert torch.equal(tensors["frozen.weight"], first_net().frozen.weight)


def first_net():
    torch.manual_seed(0)
    return engines.Net()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((1, 1, "engine", 3), "gradient_accumulation_steps is 1, but a step has several micro-batches"),
        ((2, 1, "model"), "Track the engine alone"),
    ],
)
def test_what_would_be_wrong_is_refused(options, message, tmp_path):
    (said,) = World(1, engines.refused, tmp_path, *options).values()
    assert message in said
