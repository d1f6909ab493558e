"""Several processes: exact gradients, checkpoints across world sizes, damage, and failures that reach all ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from azureml_elastic.config import ElasticResources, Plan
from azureml_elastic.train.data.sampling import DataSpec, order
from tests.support.train import workers
from tests.support.worlds import World

PLAN = Plan(resources=ElasticResources(max_instance_count=3), audit=True).to_json()


def expected_gradients(length, global_batch_size, drop_last):
    spec = DataSpec(length, global_batch_size=global_batch_size, seed=0, shuffle=True, drop_last=drop_last)
    x, y = workers.dataset(length).tensors
    model, found, consumed = workers.network(), [], 0
    while window := spec.window(consumed, global_batch_size):
        ids = torch.from_numpy(order(spec, 0)(np.arange(window.start, window.stop)))
        model.zero_grad()
        nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        found.append(workers.flat(parameter.grad for parameter in model.parameters()))
        consumed = window.stop
    return found


@pytest.mark.parametrize(
    ("world_size", "length", "global_batch_size", "drop_last"),
    [(1, 23, 8, False), (2, 23, 7, False), (3, 23, 8, False), (3, 25, 8, False), (3, 25, 8, True)],
)
def test_gradients_are_those_of_one_process(world_size, length, global_batch_size, drop_last, tmp_path):
    expected = expected_gradients(length, global_batch_size, drop_last)
    for gradients in World(
        world_size, workers.gradients, tmp_path / "c", length, global_batch_size, drop_last
    ).values():
        assert len(gradients) == len(expected)
        for got, want in zip(gradients, expected, strict=True):
            assert (torch.tensor(got, dtype=want.dtype) - want).norm() <= 1e-9 * want.norm()


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.shards_on_cpus)], ids=["ddp", "fsdp2"])
def test_a_checkpoint_is_restored_bitwise_at_any_world_size(sharded, tmp_path):
    saved = World(2, workers.save_stack, tmp_path, sharded).values()
    if not sharded:  # rank 1 has seen other data; the buffers of rank 0 are saved
        assert saved[0]["tensors"]["model/0.weight"] == saved[1]["tensors"]["model/0.weight"]
        assert saved[0]["tensors"]["model/1.running_mean"] != saved[1]["tensors"]["model/1.running_mean"]
    worlds = [(size, World(size, workers.restore_stack, tmp_path, sharded)) for size in (3, 1)]
    for size, world in worlds:
        values = world.values()
        assert len(values) == size
        for step, data, content in values:
            assert step == 3
            assert data == {"epoch": 1}
            assert content == saved[0]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.shards_on_cpus), "zero"])
def test_four_two_and_three_ranks_train_what_one_run_would_have(kind, tmp_path):
    (whole,) = World(1, workers.train_in_parts, tmp_path / "whole", "ddp", 200).values()
    for size, until in [(4, 60), (2, 130), (3, 200)]:
        values = World(size, workers.train_in_parts, tmp_path / "parts", kind, until, 50).values()
    for weights in values:
        assert torch.allclose(torch.tensor(weights), torch.tensor(whole), rtol=0, atol=1e-5)


def test_random_numbers_go_on_after_a_restart(tmp_path):
    (whole,) = World(1, workers.train_with_dropout, tmp_path / "whole", 12).values()
    World(1, workers.train_with_dropout, tmp_path / "parts", 7).values()
    (parts,) = World(1, workers.train_with_dropout, tmp_path / "parts", 12).values()
    assert parts == whole


def test_damage_sends_all_ranks_back_together(tmp_path):
    first, second = World(2, workers.restore_damaged, tmp_path).values()
    assert first == second
    for kind in workers.DAMAGES:
        assert first[kind] == [2, 2, 2.0] or first[kind] == (2, 2, 2.0), kind
    assert "neither it nor an older one is whole" in first["all"]
    assert "To start anew" in first["all"]


def test_a_rank_that_cannot_save_fails_on_all_and_the_old_checkpoint_stays(tmp_path):
    folder = tmp_path / "c"
    first, second = World(2, workers.failing_saves, folder).values()
    assert first == second
    assert "rank 0: OSError: [Errno 28] No space left on device" in first[0]
    assert "rank 1: OSError: [Errno 28] No space left on device" in first[1]
    assert "rank 0: NotADirectoryError" in first[2]
    pointer = json.loads((tmp_path / "c-gone" / "latest.json").read_text())
    assert pointer["step"] == 1
    assert (tmp_path / "c-gone" / pointer["directory"] / "manifest.json").exists()


def test_a_history_of_kills_and_world_sizes_ends_where_an_undisturbed_run_ends(tmp_path):
    undisturbed = World(1, workers.train_steps, tmp_path / "a", 3).values()[0]
    folder, environment = tmp_path / "b", {"AZUREML_ELASTIC_RUN_DIR": tmp_path / "run", "AZUREML_ELASTIC_PLAN": PLAN}
    for number, (size, stop) in enumerate([(2, 6), (3, 11), (1, 16), (2, None)]):
        world = World(
            size,
            workers.train_audited,
            folder,
            stop,
            **environment,
            AZUREML_ELASTIC_ROUND=number,
        )
        outcomes = world.outcomes()
        if stop is not None:
            assert {outcome.code for outcome in outcomes} == {9}
    values = [outcome.value for outcome in outcomes]
    assert [value["first"] for value in values] == [15, 15]
    for value in values:
        assert value["steps"] == undisturbed["steps"] == 21
        assert value["lr"] == undisturbed["lr"]
        assert torch.allclose(torch.tensor(value["weights"]), torch.tensor(undisturbed["weights"]), rtol=1e-9)
    # for each step, the last round that trained it counts
    lines = [
        json.loads(line) for path in (tmp_path / "run" / "samples").iterdir() for line in path.read_text().splitlines()
    ]
    last = {step: max(line["round"] for line in lines if line["step"] == step) for step in range(1, 22)}
    for epoch in range(3):
        trained = [
            sample
            for line in lines
            if "ids" in line and line["epoch"] == epoch and line["round"] == last[line["step"]]
            for sample in line["ids"]
        ]
        assert sorted(trained) == list(range(50))


def test_forked_data_workers_leave_the_groups_of_the_parent_alone(tmp_path):
    assert World(1, workers.forked_after_a_session, tmp_path / "c").values() == [[0, 1, 2, 3]]
