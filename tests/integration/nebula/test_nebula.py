"""Nebula's interface: listed checkpoints are complete, and loaded values are verified."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import azureml_elastic.nebula as nm
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, UsageError
from azureml_elastic.train.deepspeed_batches import config_for
from tests.support import nebula_saving
from tests.support.worlds import World


@pytest.fixture
def folder(tmp_path):
    nm.init(persistent_storage_path=str(tmp_path / "c"))
    yield tmp_path / "c"
    nm.wait()


def save(tag, **values):
    checkpoint = nm.Checkpoint(tag, len(values))
    for name, value in values.items():
        checkpoint.save(name, value)
    nm.wait()


def test_a_saved_value_is_loaded(folder):
    weights = {"w": torch.arange(6.0).reshape(2, 3), "steps": 7}
    checkpoint = nm.Checkpoint()
    checkpoint.save("model", weights)
    weights["w"].zero_()  # the copy was made before
    nm.wait()
    latest = nm.get_latest_checkpoint()
    assert latest.tag == checkpoint.tag
    loaded = latest.load("model")
    assert torch.equal(loaded["w"], torch.arange(6.0).reshape(2, 3))
    assert loaded["steps"] == 7
    assert torch.equal(torch.load(nm.get_latest_checkpoint_path("model"))["w"], loaded["w"])


def test_an_empty_folder_has_no_checkpoints(folder):
    assert nm.list_checkpoints() == []
    assert nm.get_latest_checkpoint() is None
    assert nm.get_checkpoint("a") is None
    assert nm.get_latest_checkpoint_path("model") is None


def test_only_complete_checkpoints_are_listed(folder):
    save("a", model=1, optimizer=2)
    nm.Checkpoint("b", 2).save("model", 3)
    nm.wait()
    assert [each.tag for each in nm.list_checkpoints()] == ["a"]
    assert nm.get_latest_checkpoint().files == ["model", "optimizer"]


def test_the_newest_of_a_tag_is_used_and_old_ones_are_removed(folder):
    for value in range(4):
        save("a" if value % 2 else "b", model=value)
    assert [(each.tag, each.load("model")) for each in nm.list_checkpoints()] == [("b", 2), ("a", 3)]
    assert nm.get_checkpoint("b").load("model") == 2
    assert len(list((folder / "nebula").iterdir())) == 2


def test_a_restarted_script_continues_the_numbers(folder):
    save("a", model=1)
    nm.init(persistent_storage_path=str(folder))
    save("a", model=2)
    assert nm.get_latest_checkpoint().load("model") == 2
    assert len(nm.list_checkpoints()) == 2


def test_a_flipped_bit_is_detected(folder):
    save("a", model={"w": torch.zeros(100)})
    path = Path(nm.get_latest_checkpoint_path("model"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="checksum"):
        nm.get_latest_checkpoint().load("model")


def test_other_objects_are_unpickled_only_on_demand(folder):
    save("a", model=torch.nn.Linear(2, 2))
    latest = nm.get_latest_checkpoint()
    with pytest.raises(Exception, match="weights_only"):
        latest.load("model")
    assert latest.load("model", weights_only=False).in_features == 2


def test_a_failure_is_reported(folder):
    checkpoint = nm.Checkpoint("a", 2)
    checkpoint.save("model", 1)
    nm.wait()
    checkpoint.save("model", 2)
    with pytest.raises(CheckpointError, match="could not be written"):
        nm.wait()


def test_a_checkpoint_of_which_a_file_is_missing_is_never_complete(folder):
    save("whole", model=1, optimizer=2)
    for _ in range(3):
        checkpoint = nm.Checkpoint("torn", -2)
        checkpoint.save("model", 1)
        checkpoint.save("model", 2)  # fails: the file exists
        checkpoint.commit()
        with pytest.raises(CheckpointError, match="could not be written"):
            nm.wait()
    assert [each.tag for each in nm.list_checkpoints()] == ["whole"]


def test_other_content_of_the_folder_is_not_removed(folder):
    other = folder / "step-000000000001.round-000001.00000000"
    other.mkdir()
    for value in range(4):
        save("a", model=value)
    assert other.exists()


@pytest.mark.parametrize("name", ["", "../model", "a/b", "model.sum", "manifest.json", ".hidden"])
def test_invalid_names_are_refused(folder, name):
    with pytest.raises(UsageError, match="cannot be a file's name"):
        nm.Checkpoint("a").save(name, 1)


def test_a_missing_file_is_named(folder):
    save("a", model=1)
    with pytest.raises(UsageError, match="it has model"):
        nm.get_latest_checkpoint().load("optimizer")


def test_a_script_that_ends_has_written_everything(tmp_path):
    script = f"""
import azureml_elastic.nebula as nm, torch
nm.init(persistent_storage_path={str(tmp_path / "c")!r})
nm.Checkpoint("a").save("model", torch.zeros(1_000_000))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    (found,) = nm.list_checkpoints(str(tmp_path / "c"))
    assert found.load("model").shape == (1_000_000,)


@pytest.mark.parametrize("num_of_files", [2, -2])
def test_ranks_complete_a_checkpoint_together(num_of_files, tmp_path):
    for tags, files, weights in World(2, nebula_saving.save_together, tmp_path / "c", num_of_files).values():
        assert tags == ["global_step1"]
        assert files == ["part0", "part1"]
        assert weights == [[0.0] * 4, [1.0] * 4]


def test_deepspeeds_block_becomes_a_policy():
    block = {
        "enabled": True,
        "persistent_storage_path": "/mnt/checkpoints",
        "persistent_time_interval": 60,
        "num_of_version_in_retention": 3,
        "enable_nebula_load": True,
    }
    policy = nm.policy({"train_batch_size": 8, "nebula": block})
    assert (policy.path, policy.every, policy.keep) == ("/mnt/checkpoints", timedelta(seconds=60), 3)
    assert nm.policy(block) == policy
    assert nm.policy({"nebula": {**block, "enabled": False}}) is None
    assert nm.policy({}) is None
    assert "nebula" not in config_for({"nebula": block}, 8, 2)


def test_a_configuration_is_made_for_any_number_of_ranks():
    config = {"train_batch_size": 10, "optimizer": {"type": "AdamW"}, "elasticity": {"enabled": True}}
    for size in range(1, 13):
        made = config_for(config, 10, size)
        micro, total = made["train_micro_batch_size_per_gpu"], made["train_batch_size"]
        assert (micro * size, made["gradient_accumulation_steps"]) == (total, 1)
        assert 10 <= total < 10 + size
        assert "elasticity" not in made
    assert config["train_batch_size"] == 10
    with pytest.raises(UsageError, match="train_batch_size is 10, but the loader's global batch is 12"):
        config_for(config, 12, 2)
    with pytest.raises(UsageError, match="gradient_accumulation_steps is 4"):
        config_for({"gradient_accumulation_steps": 4}, 8, 2)
