"""What the integrations leave to Lightning, transformers and DeepSpeed, or refuse, and what they say of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from azureml_elastic.errors import UsageError
from azureml_elastic.train.deepspeed_batches import batch_sizes
from azureml_elastic.train.integrations.deepspeed import training_loop
from azureml_elastic.train.integrations.deepspeed import training_loop as deepspeed_loop
from azureml_elastic.train.integrations.lightning import left_to_lightning
from azureml_elastic.train.integrations.lightning import training_loop as lightning_loop
from azureml_elastic.train.integrations.transformers import training_data as transformers_data
from azureml_elastic.train.integrations.transformers import training_loop as transformers_loop

pl = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

DATA = TensorDataset(torch.zeros(8, 2))


class Numbers(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter(range(8))


class Session:
    """A session of one rank that has trained nothing."""

    world_size, reference_world_size, is_main, trains = 1, 1, True, False
    device = torch.device("cpu")

    def drive(self, loop):
        """Take a loop that trains nothing."""

    def from_main(self, value):
        return value

    def windows(self, dataset, **options):
        self.given = options
        return type("Windows", (), {"micro_batches": 2, "__len__": lambda _: 8})()


@pytest.fixture
def session():
    return Session()


def said(caplog):
    """Return what this library has logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("azureml_elastic")]


class OwnStrategy(pl.strategies.SingleDeviceStrategy):
    """A strategy of the script's own."""


def lightning_trainer(**options):
    options = {"barebones": True, **options}
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)


@pytest.mark.parametrize(
    ("options", "manual", "reason"),
    [
        ({}, False, None),
        ({}, True, "the optimization is manual"),
        ({"strategy": OwnStrategy("cpu")}, False, "the strategy is OwnStrategy"),
        ({"strategy": pl.strategies.ModelParallelStrategy(1, 1)}, False, None),
        (
            {"strategy": pl.strategies.ModelParallelStrategy(1, 2)},
            False,
            "several ranks compute the same samples, by tensor parallelism",
        ),
        ({"reload_dataloaders_every_n_epochs": 1}, False, "the training data are loaded anew in each epoch"),
        ({"limit_train_batches": 0.5}, False, "only a part of the training data is used"),
        ({"overfit_batches": 2}, False, "only a part of the training data is used"),
        (
            {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", [])], "barebones": False},
            False,
            "ModelPruning renames the weights while it trains",
        ),
    ],
)
def test_fits_that_are_left_to_lightning(session, caplog, options, manual, reason):
    model = pl.LightningModule()
    model.automatic_optimization = not manual
    assert lightning_loop.obstacle(session, lightning_trainer(**options), model) == reason
    assert len(said(caplog)) == bool(reason)
    if reason:
        assert f"Trainer.fit() does not use the elastic session: {reason}. Where a node is lost" in said(caplog)[0]


def transformers_trainer(folder, **options):
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)
    return transformers.Trainer(model=nn.Linear(2, 2), args=arguments)


def test_trainings_that_are_left_to_transformers(session, caplog, tmp_path):
    plain = transformers_trainer(tmp_path)
    searched = transformers_loop.obstacle(session, plain, (None, {"lr": 0.1}), {})
    assert searched == "a search of hyperparameters trains several times"
    assert transformers_loop.obstacle(session, plain, (), {"trial": {"lr": 0.1}}) == searched
    resized = transformers_loop.obstacle(session, transformers_trainer(tmp_path, auto_find_batch_size=True), (), {})
    assert resized == "auto_find_batch_size changes the batch size"
    assert transformers_loop.obstacle(session, plain, (), {}) is None
    reasons = (searched, searched, resized)
    assert said(caplog) == [f"Trainer.train() does not use the elastic session: {reason}." for reason in reasons]


class Partly(transformers.Trainer):
    """A trainer with a loop around that of transformers, and an evaluation of its own."""

    def _inner_training_loop(self, *args, **kwargs):
        return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """Evaluate nothing."""


class Wholly(Partly):
    """A trainer with a training loop of its own."""

    def _inner_training_loop(self, *args, **kwargs):
        """Train nothing."""


def test_a_training_loop_of_a_subclass_is_said_where_it_does_not_call_that_of_transformers(session, caplog, tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    model = nn.Linear(2, 2)
    assert transformers_loop.obstacle(session, Partly(model, arguments), (), {}) is None
    reason = transformers_loop.obstacle(session, Wholly(model, arguments), (), {})
    assert reason == "Wholly has a training loop of its own"
    assert f"Trainer.train() does not use the elastic session: {reason}." in caplog.text


def test_a_second_training_and_one_of_other_ranks(session, tmp_path):
    module = pl.LightningModule()
    session.world_size = 2
    with pytest.raises(UsageError, match="The run has 2 ranks, but Lightning works with 1"):
        lightning_loop.obstacle(session, lightning_trainer(), module)
    with pytest.raises(UsageError, match="The run has 2 ranks, but transformers works with 1"):
        transformers_loop.obstacle(session, transformers_trainer(tmp_path), (), {})
    session.world_size, session.trains = 1, True
    second = "another training of this process has used the session"
    assert lightning_loop.obstacle(session, lightning_trainer(), module) == second
    assert transformers_loop.obstacle(session, transformers_trainer(tmp_path), (), {}) == second


SAMPLED = DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 8, 8))


@pytest.mark.parametrize(
    ("loader", "sampler"),
    [(DataLoader(Numbers(), batch_size=2), "_InfiniteConstantSampler"), (SAMPLED, "WeightedRandomSampler")],
)
def test_data_that_are_left_to_lightning(session, caplog, loader, sampler):
    trainer = lightning_trainer(use_distributed_sampler=False)
    loop = lightning_loop.TrainingLoop(session, trainer)
    assert loop.process_dataloader(lambda *given: given[-1], trainer, None, "train", loader) is loader
    assert f"The training data come from DataLoader with {sampler}: Lightning divides them" in caplog.text


BATCHES = [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("loader", "given"),
    [
        (lambda: SAMPLED, ("WeightedRandomSampler", 8, False)),
        (lambda: DataLoader(DATA, batch_sampler=BATCHES), ("list", 3, True)),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), None),
        (lambda: StatefulDataLoader(DATA, shuffle=True), None),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_data_of_the_scripts_own_samplers_are_divided_with_lightning(session, caplog, loader, given):
    trainer = lightning_trainer()
    loop = lightning_loop.TrainingLoop(session, trainer)
    assert loop.process_dataloader(None, trainer, None, "train", loader()).micro_batches == 2
    drawn = session.given["drawn"]
    assert (drawn and (drawn.name, drawn.length, drawn.whole_batches)) == given
    assert session.given["shuffle"]
    assert not said(caplog)


def test_loggers_that_begin_anew_are_named_once(caplog):
    class Cloud:
        def __init__(self, given=None):
            self._id = given

    class Other(Cloud):
        """A logger without an id."""

    trainer = SimpleNamespace(is_global_zero=True)
    for _ in range(2):
        left_to_lightning.warn_of_new_versions(trainer, [Cloud("a"), Other()])
    left_to_lightning.warn_of_new_versions(SimpleNamespace(is_global_zero=False), [Cloud()])
    assert [text.partition(",")[0] for text in said(caplog)] == ["Other begins anew in this process"]


def test_several_training_loaders_of_lightning_are_refused(session):
    trainer = lightning_trainer()
    loop = lightning_loop.TrainingLoop(session, trainer)
    assert loop.process_dataloader(None, trainer, None, "train", DataLoader(DATA, shuffle=True)).micro_batches == 2
    with pytest.raises(UsageError, match="several loaders at once"):
        loop.process_dataloader(None, trainer, None, "train", DataLoader(DATA, shuffle=True))


def test_data_that_are_left_to_transformers(session, caplog, tmp_path):
    data = transformers_data.TrainingData(session, transformers_trainer(tmp_path))
    loader = DataLoader(Numbers(), batch_size=2)
    assert next(iter(data.get_train_dataloader(lambda: loader))).tolist() == [0, 1]
    reason = "the samples of Numbers have no index"
    assert f"transformers divides the training data among the ranks: {reason}." in caplog.text
    assert "a step may train some more samples" in caplog.text


CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


@pytest.fixture
def deepspeed(session):
    return deepspeed_loop.TrainingLoop(session, SimpleNamespace(), batch_sizes(CONFIG, 1))


def distributed(batch_size):
    return DataLoader(DATA, batch_size=batch_size, sampler=DistributedSampler(DATA, num_replicas=1, rank=0))


def test_loaders_that_are_left_to_the_script_with_deepspeed(deepspeed, caplog):
    assert deepspeed.replaced(distributed(4)) is None
    assert "TensorDataset among the ranks by itself: its batch size is 4, and that of the engine 2" in caplog.text
    first = distributed(2)
    assert deepspeed.replaced(first) is deepspeed.replaced(first)
    assert deepspeed.replaced(distributed(2)) is None
    assert "by itself: another loader is the one of the training" in caplog.text


def test_batches_of_other_loaders_are_named_with_deepspeed_once_they_are_trained(deepspeed, caplog):
    for _ in range(2):
        deepspeed.backward(lambda loss: loss, torch.zeros(1))
    (text,) = said(caplog)
    assert "and the run neither saves nor restores this training" in text


@pytest.mark.parametrize(
    ("dataset", "curriculum", "reason"),
    [(Numbers(), False, "it has no index"), (DATA, True, "the engine has curriculum learning")],
)
def test_data_that_are_left_to_deepspeed(deepspeed, caplog, dataset, curriculum, reason):
    loader = SimpleNamespace(curriculum_learning_enabled=curriculum)
    assert deepspeed.deepspeed_io(lambda _: loader, dataset) is loader
    assert f"DeepSpeed divides the samples of {type(dataset).__name__} among the ranks: {reason}." in caplog.text


@pytest.mark.parametrize("option", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_a_part_of_a_folder_is_refused(session, tmp_path, option):
    folders = training_loop.CheckpointFolders(session, SimpleNamespace())
    (tmp_path / "tag" / training_loop._STATE).mkdir(parents=True)
    assert folders.find(tmp_path, "tag") == Path(tmp_path, "tag")
    with pytest.raises(UsageError, match="holds the state of the engine as a whole"):
        folders.find(tmp_path, "tag", **option)
