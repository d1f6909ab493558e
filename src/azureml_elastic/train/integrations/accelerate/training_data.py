"""Which of a script's loaders has the data of the training, that the session divides among the ranks.

The first loader with ``shuffle=True`` is the one. Without any it is the first that the script iterates over while its
models are in training mode, in the data's own order, or in that of a sampler or batch sampler of the script. All others
are accelerate's own; where a script trains their batches, a warning says so.

Where the script has accelerate shard its models, the sizes of its ``ParallelismConfig`` are those of the round.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from azureml_elastic.errors import UsageError
from azureml_elastic.plurals import counted
from azureml_elastic.train.integrations import sources
from azureml_elastic.train.integrations.accelerate.training_loop import Prepared, TrainingLoop
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader, ReplacedLoader
from azureml_elastic.train.integrations.script_loop.states import Repeating, Training
from azureml_elastic.train.integrations.wrapping import first_of
from azureml_elastic.train.session.stack_session import StackSession

_LOG = logging.getLogger(__name__)

_SHARDING = {"MEGATRON_LM": "Megatron-LM has checkpoints of its own", "XLA": "the device is an XLA device"}

FULL_RANKS = "_azureml_elastic_full_ranks"
"""Attribute of a trainer's accelerator with the ranks of a run with all nodes, while trl makes a sampler by them."""

_WARNED = ""
"""In place of the reason, once a warning has named it."""

_ANOTHER = "another loader is the one of the training"


def obstacle(accelerator: Any) -> str | None:
    """Return why the model of an accelerator is left to the stack alone, ``None`` if it is not."""
    if accelerator.distributed_type.value == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        return "FSDP version 1 shards the model"
    config = getattr(accelerator, "parallelism_config", None)  # not in accelerate before 1.9
    if config is not None and config.non_data_parallel_size > 1:
        return "several ranks compute the same samples, by tensor, context or sequence parallelism"
    return _SHARDING.get(accelerator.distributed_type.value)


def fit_to_round(session: StackSession, config: Any) -> None:
    """Set the numbers of replicas and shards to those of the round: accelerate refuses others than there are ranks.

    A collective, where the script has replicas that are sharded.

    Raises:
        UsageError: the replicas of the round cannot be sharded.
    """
    if config.total_size == 1 or config.non_data_parallel_size > 1:
        return
    replicas, shards = 1, session.world_size
    if config.dp_shard_size == 1:
        replicas, shards = session.world_size, 1
    elif config.dp_replicate_size > 1:
        replicas, shards = session.replicas_and_shards()
        if shards == 1 and replicas > 1:
            raise UsageError(
                f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}, dp_shard_size="
                f"{config.dp_shard_size}) shards each replica, but those of this run have {counted(shards, 'worker')} "
                "each. Give ElasticDistribution(nodes_per_replica=...) or process_count_per_instance a larger number."
            )
    if (config.dp_replicate_size, config.dp_shard_size) != (replicas, shards) and session.is_main:
        _LOG.info("ParallelismConfig has %d replicas of %d shards in this round.", replicas, shards)
    # It also keeps a table of the sizes, of which it makes the mesh.
    config._set_size("dp_replicate", replicas)  # noqa: SLF001
    config._set_size("dp_shard", shards)  # noqa: SLF001


class TrainingData:
    """The loaders that a script has prepared.

    Attributes:
        loop: loop over the training data, once they are known
        prepares_for_all_nodes: whether accelerate prepares a loader now as in a run with all nodes
    """

    def __init__(self) -> None:
        self.loop: TrainingLoop | None = None
        self.prepares_for_all_nodes = False
        self._source: DataLoader[Any] | None = None
        self._obstacle: str | None = None  # of all loaders
        self._first_undecided: UndecidedLoader | None = None
        self._left: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # to accelerate, with the reason

    def prepare(
        self, session: StackSession, accelerator: Any, loader: DataLoader[Any], prepare: Callable[[], Any]
    ) -> Any:
        """Return what the script receives for one of its loaders, which accelerate would prepare by a function."""
        divided = functools.cache(prepare)  # prepared once, and only if it is used: it becomes one of accelerate's
        full = functools.cache(functools.partial(self._prepared_for_all_nodes, accelerator, prepare))
        prepared = Prepared(session, accelerator, loader, divided, full)
        reason = self._obstacle or _obstacle(accelerator, loader)
        if reason is None and self._source is not None and _same_data(loader, self._source):
            assert self.loop is not None
            return self.loop.loader  # made anew, for another epoch
        if reason is None and self._trains_another(session):
            reason = _ANOTHER
        if reason is not None:
            return self._leave(divided, reason)
        if prepared.source.shuffle:
            return self._adopt(prepared)
        undecided = UndecidedLoader(self, prepared)
        if self._first_undecided is None:
            self._first_undecided = undecided
        return undecided

    def for_training(self, prepared: Prepared, *, may_train: bool) -> EpochLoader | None:
        """Return the training data in place of a loader whose iteration begins, ``None`` if it has others."""
        if prepared.loader is self._source and self.loop is not None:
            return self.loop.loader
        if may_train and self._obstacle is None and not self._trains_another(prepared.session):
            return self._adopt(prepared)
        untrained = "no model was in training mode when the iteration began"
        self._leave(prepared.divided, self._obstacle or (untrained if self.loop is None else _ANOTHER))
        return None

    def leave_all(self, reason: str) -> None:
        """Leave all data to accelerate, before the script trains them."""
        if self.loop is None or self.loop.leave():
            self.loop, self._obstacle = None, reason

    def has_length_of_training(self, loader: UndecidedLoader) -> bool:
        """Return whether a loader, which no iteration has shown to be an evaluation's, may be the one of training."""
        prepared = loader.prepared
        if self.loop is not None or self._trains_another(prepared.session):
            return self.loop is not None and prepared.loader is self._source
        return loader is self._first_undecided and bool(prepared.accelerator._optimizers)  # noqa: SLF001

    def warn_of_left(self, session: StackSession, accelerator: Any) -> None:
        """Warn once for a loader if the batch that is trained now is one of its, and not of the training data."""
        if self.loop is not None and isinstance(self.loop.loop.state, Training | Repeating):
            return
        active = accelerator.gradient_state.active_dataloader
        key = self if active is None else active  # batches of no prepared loader are warned of once
        reason = self._left.get(key, self._obstacle or "no prepared loader has yielded it")
        self._left[key] = _WARNED
        if reason == _WARNED or not session.is_main:
            return
        if self.loop is None:
            consequence = (
                "The run neither saves nor restores this training: after a change of its nodes the script starts "
                "again, from what it saves and loads by itself."
            )
        elif self.loop.tracks_models_of(accelerator):
            consequence = "Samples of it may repeat or be left out after a change of the world size."
        else:
            consequence = (
                "Its model was prepared after the training had begun, so the run neither saves nor restores it: after "
                "a change of the nodes it begins anew."
            )
        _LOG.warning(
            "The script trains a batch that the session does not divide among the ranks: %s. %s", reason, consequence
        )

    def _trains_another(self, session: StackSession) -> bool:
        return self.loop is not None or session.trains

    def _leave(self, divided: Callable[[], Any], reason: str) -> Any:
        loader = divided()
        self._left.setdefault(loader, reason)
        return loader

    def _prepared_for_all_nodes(self, accelerator: Any, prepare: Callable[[], Any]) -> Any:
        self.prepares_for_all_nodes = True
        try:
            with torch.random.fork_rng(devices=[]):  # accelerate may draw a seed
                loader = prepare()
        finally:
            self.prepares_for_all_nodes = False
        # Nobody iterates over it: it is none of accelerate's.
        accelerator._dataloaders[:] = [each for each in accelerator._dataloaders if each is not loader]  # noqa: SLF001
        return loader

    def _adopt(self, prepared: Prepared) -> EpochLoader:
        self.loop, self._source = TrainingLoop(prepared), prepared.loader
        return self.loop.loader


class UndecidedLoader(ReplacedLoader):
    """A loader in no random order: one of training data, if the script iterates over it to train."""

    _is_accelerate_prepared = True

    def __init__(self, data: TrainingData, prepared: Prepared) -> None:
        super().__init__(self._as_accelerate_has_it)
        self.prepared = prepared
        self._data = data
        self._evaluates = False

    @property
    def _may_train(self) -> bool:
        accelerator = self.prepared.accelerator
        return (
            torch.is_grad_enabled()
            and any(model.training for model in accelerator._models)  # noqa: SLF001
            and bool(accelerator._optimizers)  # noqa: SLF001
        )

    def __len__(self) -> int:
        """Return the number of batches: of training data at the reference world size, as schedules count them."""
        return self.prepared.batches_of_epoch if self._may_be_training_data else len(self.prepared.divided())

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass."""
        found = self._data.for_training(self.prepared, may_train=self._may_train)
        self._evaluates = found is None
        return iter(self.prepared.divided() if found is None else found)

    @property
    def _may_be_training_data(self) -> bool:
        return not self._evaluates and self._data.has_length_of_training(self)

    def _as_accelerate_has_it(self) -> Any:
        return (self.prepared.full if self._may_be_training_data else self.prepared.divided)()


def _obstacle(accelerator: Any, loader: DataLoader[Any]) -> str | None:
    whole = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    reasons = {
        obstacle(accelerator): True,
        "dispatch_batches=True has rank 0 read all data": bool(accelerator.dispatch_batches),
        "its dataset is asked for whole batches, by batch_size=None": loader.batch_sampler is None,
        sources.obstacle(loader): True,
        f"split_batches=True cuts the batches of {type(loader.batch_sampler).__name__}": (
            whole and accelerator.split_batches
        ),
    }
    return first_of(reasons)


def _same_data(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Return whether two loaders differ in the seed of their random order at most."""
    if one.dataset is not other.dataset or one.collate_fn != other.collate_fn:
        return False
    return _same_order(one.batch_sampler, other.batch_sampler)


def _same_order(one: Any, other: Any) -> bool:
    """Return whether two samplers have the same class and settings: those of two parts of a dataset have not."""
    if type(one) is not type(other) or not hasattr(one, "__dict__"):
        return bool(one == other)
    return vars(one).keys() == vars(other).keys() and all(
        _same_setting(value, vars(other)[name]) for name, value in vars(one).items()
    )


def _same_setting(one: Any, other: Any) -> bool:
    if isinstance(one, Sampler):
        return _same_order(one, other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if any(isinstance(each, torch.Generator | random.Random | np.random.Generator) for each in (one, other)):
        return True  # accelerate gives a sampler one that has none
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - arrays, and objects of any kind
        return False
