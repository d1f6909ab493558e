"""Stock scripts whose stack shards the model by FSDP2, in elastic runs: the training is that of one process.

accelerate, and so transformers, shards models on GPUs alone: see ``fsdp_on_cpus``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from azureml_elastic.config import CheckpointPolicy, FixedGlobalBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations.accelerate import training_data
from tests.support.stacks import assert_same_rates, run_stock

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

pytestmark = pytest.mark.shards_on_cpus

SCRIPTS = Path(__file__).parent
EPOCHS, SAMPLES = 2, 470
STEPS = EPOCHS * 20  # windows of 24 samples, the last of an epoch of 14
LOSS, ARRIVAL = 12, 18
"""Steps at which rank 0's node is lost, and another one is started, which takes part in the second epoch."""

PAUSE = 0.3
"""Seconds of a batch, so that the node arrives before the end."""

EXACT = ("--epochs", str(EPOCHS), "--samples", str(SAMPLES), "--dropout", "0")
REPLICATED = {
    "processes": 2,
    "checkpoint": CheckpointPolicy(snapshot_every=None),
    "most_repeated": 0,
    "batch": FixedGlobalBatch(logical_workers=3),
}
"""Replicas of two workers each, whose number follows that of the nodes; snapshots are not needed."""

MOST_REPEATED = 5
"""Steps since the last snapshot, which are taken after each step as far as the one before is written."""


def run(script, folder, *arguments, **options):
    return run_stock(SCRIPTS / f"{script}_script.py", folder / "run", *EXACT, *arguments, **options)


def undisturbed(script, folder, *arguments):
    """Run a script on one node, whose model is not sharded, with the batches of three nodes."""
    alone = {"nodes": (1, 1), "batch": FixedGlobalBatch(logical_workers=3)}
    return run(script, folder, *arguments, "--pause", "0", **alone)


def disturbed(script, folder, *arguments, accumulation=1, most_repeated=MOST_REPEATED, **options):
    """Run it on nodes of which one is lost, and another one arrives."""
    faults = f"kill=rank0@step:{LOSS // accumulation},add@step:{ARRIVAL // accumulation}"
    options = {"chaos": faults, "checkpoint": CheckpointPolicy(snapshot_every_steps=1), **options}
    found = run(script, folder, *arguments, "--pause", str(PAUSE), "--accumulate", str(accumulation), **options)
    found.require_faults(most_repeated)
    return found


def lines(found, pattern="steps.*"):
    return [json.loads(line) for file in found.folder.glob(pattern) for line in file.read_text().splitlines()]


def assert_same_weights(found, expected):
    one, other = (torch.load(each.folder / "model.pt") for each in (found, expected))
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-4)


def rates(found):
    return {round(line["rate"], 8): line["rate"] for line in lines(found) if "rate" in line}


def assert_same_loop(found, expected):
    """Check what a loop with accelerate has recorded."""
    assert found.record["completed_steps"] == expected.record["completed_steps"] == expected.report.last_step
    assert found.report.last_step == expected.report.last_step
    assert_same_rates(*map(rates, (found, expected)))
    for epoch in range(EPOCHS):
        seen = Counter(index for each in lines(found) if each.get("epoch") == epoch for index in each["samples"])
        assert set(seen) == set(range(SAMPLES))
    last = str(EPOCHS - 1)  # those before may be computed again, with later weights
    assert found.record["accuracies"][last] == pytest.approx(expected.record["accuracies"][last], abs=0.02)
    assert_same_weights(found, expected)


@pytest.fixture(scope="module")
def plain_loop(tmp_path_factory):
    return undisturbed("accelerate", tmp_path_factory.mktemp("plain"))


@pytest.mark.xdist_group("accelerate")
class TestAccelerate:
    """Loops with ``accelerate.Accelerator``."""

    def test_a_script_that_counts_its_steps_again(self, tmp_path, plain_loop):
        found = disturbed("accelerate", tmp_path, "--fsdp", "2")
        assert_same_loop(found, plain_loop)
        assert "are counted slowly" not in found.output

    def test_a_script_that_accumulates_and_continues_from_folders_of_its_own(self, tmp_path):
        expected = undisturbed("accelerate", tmp_path / "expected", "--accumulate", "2")
        assert_same_loop(disturbed("accelerate", tmp_path, "--fsdp", "2", "--resume", accumulation=2), expected)

    def test_no_step_is_lost_of_a_model_with_replicas(self, tmp_path, plain_loop):
        found = disturbed("accelerate", tmp_path, "--fsdp", "2", "--replicas", "3", **REPLICATED)
        assert_same_loop(found, plain_loop)


@pytest.fixture(scope="module")
def plain_trainer(tmp_path_factory):
    return undisturbed("trainer", tmp_path_factory.mktemp("plain"))


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "with replicas"])
def test_trainer(tmp_path, plain_trainer, replicated):
    """With folders of parts, and of whole states where there are replicas."""
    expected, sharding, options = plain_trainer, ["--fsdp", "2"], {}
    if replicated:
        sharding += ["--replicas", "3", "--folders", "FULL_STATE_DICT"]
        options = REPLICATED
    found = disturbed("trainer", tmp_path, *sharding, **options)
    assert found.record["max_steps"] == expected.record["max_steps"] == STEPS
    assert_same_rates(dict(found.curve("learning_rate")), dict(expected.curve("learning_rate")))
    for name in ("loss", "grad_norm", "eval_loss"):
        assert dict(found.curve(name)) == pytest.approx(dict(expected.curve(name)), rel=1e-3), name
    seen = Counter(index for line in lines(found, "seen.*") for index in line)
    assert set(seen) == set(range(SAMPLES))
    assert found.record["loss"] == pytest.approx(expected.record["loss"], rel=1e-3)
    assert_same_weights(found, expected)


@pytest.mark.xdist_group("lightning")
def test_lightning(tmp_path):
    expected = undisturbed("lightning", tmp_path / "expected")
    found = disturbed("lightning", tmp_path, "--sharded")
    assert (found.record["steps"], found.record["epoch"]) == (STEPS, EPOCHS)
    assert_same_rates(dict(found.record["rates"]), dict(expected.record["rates"]))
    assert found.record["validated"] == expected.record["validated"]
    # Lightning's sampler repeats samples until each rank has as many.
    assert found.record["loss"] == pytest.approx(expected.record["loss"], rel=0.02)
    for epoch in range(EPOCHS):
        seen = Counter(index for each in lines(found) if each.get("epoch") == epoch for index in each["seen"])
        assert set(seen) == set(range(SAMPLES))
    assert_same_weights(found, expected)


@pytest.mark.parametrize(
    ("kind", "second", "others", "reason"),
    [
        ("FSDP", True, 1, None),
        ("FSDP", False, 1, "FSDP version 1 shards the model"),
        ("FSDP", True, 2, "several ranks compute the same samples, by tensor, context or sequence parallelism"),
        ("MEGATRON_LM", False, 1, "Megatron-LM has checkpoints of its own"),
    ],
)
def test_what_is_left_to_the_stack(kind, second, others, reason):
    config = SimpleNamespace(non_data_parallel_size=others)
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind), is_fsdp2=second, parallelism_config=config
    )
    assert training_data.obstacle(accelerator) == reason


class Session:
    """A session of six ranks, in replicas of two."""

    world_size, is_main = 6, True

    def __init__(self, shape=(3, 2)):
        self.replicas_and_shards = lambda: shape


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"dp_replicate_size": 4, "dp_shard_size": 2}, (3, 2)),
        ({"dp_shard_size": 8}, (1, 6)),
        ({"dp_replicate_size": 8}, (6, 1)),
        ({}, (1, 1)),
        ({"dp_shard_size": 4, "tp_size": 2}, (1, 4)),
    ],
    ids=["replicas of shards", "shards", "replicas", "nothing", "tensor parallelism"],
)
def test_a_mesh_has_the_ranks_of_the_round(given, sizes):
    config = accelerate.ParallelismConfig(**given)
    training_data.fit_to_round(Session(), config)
    assert (config.dp_replicate_size, config.dp_shard_size) == sizes


def test_replicas_of_one_worker_have_no_shards():
    config = accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    with pytest.raises(UsageError, match="those of this run have 1 worker each"):
        training_data.fit_to_round(Session((6, 1)), config)
