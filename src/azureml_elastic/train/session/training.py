"""What a session knows of data, gradients and learning rates; the checkpoints and rounds are the session's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.config import BatchPolicy, FixedPerWorkerBatch
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.train.data.loader import Batching, ElasticLoader, MapLoader, SizedDataset
from azureml_elastic.train.data.position import LoaderState, MicroBatch
from azureml_elastic.train.data.sampling import DataSpec
from azureml_elastic.train.data.shard_loader import ShardLoader
from azureml_elastic.train.data.shard_streams import ShardedDataset, ShardSpec
from azureml_elastic.train.optim.gradients import Gradients
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.optim.schedule import Schedule, steps_of
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.evaluation import Evaluation
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle

__all__ = ["Training"]


class Training(ABC):
    """Batches in, gradients out.

    Args:
        lifecycle: of this process in the run.
        agent: that started the process.
        audit: writes down the samples of each step, if at all.
        batch: what becomes of the batch when the world size changes.
    """

    def __init__(self, lifecycle: ProcessGroupLifecycle, agent: Agent, audit: Audit | None, batch: BatchPolicy) -> None:
        self._lifecycle = lifecycle
        self._agent = agent
        self._audit = audit
        self._batch = batch
        self._position = lifecycle.position
        self._rate = LearningRate(batch, self._position, lambda: lifecycle.discarded)
        self._gradients = Gradients(batch, lifecycle.world, self._position, self._rate)
        self._trained: TrackedState | None = None
        self._trained_out = False
        self._counted: tuple[Any, list[int]] | None = None
        self._position.when_opened = self._opened
        if audit is not None:
            self._position.when_ended = lambda stream, cursor: audit.ended(self.steps, stream, cursor)

    @property
    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps that the run has completed, over all its rounds."""

    @property
    def accumulating(self) -> bool:
        """Whether more micro-batches of this step are to come, so that the optimizer must not step yet."""
        return self._position.accumulating and not self._lifecycle.discarded

    @property
    def learning_rate_factor(self) -> float:
        """By which the optimizers' learning rates are multiplied in the step at hand; 1 under a fixed global batch."""
        return self._rate.factor

    def loader(
        self,
        dataset: SizedDataset | ShardedDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        name: str = "train",
        loader_class: type[DataLoader[Any]] = DataLoader,
        **options: Any,
    ) -> ElasticLoader:
        """Make a training loader; for evaluation see :meth:`evaluate`.

        Args:
            dataset: map-style, or in shards; the same on all ranks and over all restarts.
            global_batch_size: samples of one optimizer step over all ranks, at any world size; under
                :class:`~azureml_elastic.FixedPerWorkerBatch` at the reference world size.
            micro_batch_size: samples of one forward and backward pass on a rank, at most; the loop then asks
                ``run.accumulating``. ``None`` for any number.
            seed: of the order.
            shuffle: whether the order is random; of a data set in shards, that of the shards.
            drop_last: whether the incomplete batch at the end of an epoch is left out.
            name: of the loader, where there are several.
            loader_class: ``DataLoader``, or a class of the same arguments such as torchdata's ``StatefulDataLoader``.
            options: of the class: ``num_workers``, ``collate_fn``, ...

        Raises:
            UsageError: there is one of that name already, the data differ from those of the checkpoint, or they have
                neither a length nor shards.
        """
        batching = Batching(self._batch, micro_batch_size)
        batching.require_fitting(global_batch_size)
        if self._gradients.exact and self._position.loaders:
            raise UsageError('reduce="exact" works with one training loader; take reduce="allreduce" for several.')
        order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        made: dict[str, Any] = {"kind": loader_class, "options": options}
        made |= {"position": self._position, "device": self._lifecycle.device}
        if not isinstance(dataset, IterableDataset) and isinstance(dataset, SizedDataset):
            spec = DataSpec(len(dataset), global_batch_size, **order)
            return MapLoader(dataset, spec, batching, stream=self._position.add(name, spec), **made)
        if not isinstance(dataset, ShardedDataset):
            raise UsageError(
                f"{type(dataset).__name__} has neither a length and samples by index, nor num_shards and shard(), so "
                "it cannot be dealt out. Wrap what it reads: train.Shards(paths, read_one)."
            )
        if micro_batch_size is not None:
            raise UsageError(
                "micro_batch_size does not go with shards; give the policy logical_workers for smaller batches."
            )
        shards = ShardSpec.make(
            dataset.num_shards, batching.logical_workers, global_batch_size=global_batch_size, **order
        )
        stream = self._position.add(name, shards)
        return ShardLoader(dataset, shards, batching, stream=stream, exchange=self._exchange, **made)

    def evaluate(
        self,
        measure: Callable[[Any], Mapping[str, torch.Tensor | float]],
        dataset: SizedDataset,
        *,
        batch_size: int,
        **options: Any,
    ) -> dict[str, float]:
        """Measure the model on a data set, each sample once, together with all ranks. A collective.

        What is tracked is in evaluation mode meanwhile, and no gradients are computed. Another world size gives the
        same numbers, as far as the model does.

        Args:
            measure: takes a batch, as ``DataLoader`` makes it, on the device; returns sums over its samples by name.
            dataset: map-style, the same on all ranks.
            batch_size: samples of a batch.
            options: of ``DataLoader``.

        Returns:
            The sums over all samples, divided by their number, by name.

        Raises:
            UsageError: the data set is empty, or the session is over.
        """
        evaluation = Evaluation(measure, dataset, batch_size, options)
        self._agent.busy()
        try:
            return evaluation.run(self._lifecycle, [] if self._trained is None else self._trained.modules)
        finally:
            self._agent.free()

    def schedule(self, scheduler: LRScheduler) -> Schedule:
        """Make a learning rate scheduler that is stepped each step count samples instead.

        It then means the same at any world size: under a fixed batch per worker, steps train more samples the more
        ranks there are. Track and step what this returns.

        Args:
            scheduler: of torch, in steps of ``global_batch_size`` samples.

        Raises:
            UsageError: it follows a metric.
        """
        return Schedule(scheduler, self._steps_of_schedule)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain of ``count``, the interrupted one first.

        An epoch that a checkpoint found trained to its last sample, but not left, is yielded once more: its loader
        is empty and what follows the loop over it (an evaluation, say) runs.
        """
        position = self._position
        position.in_epochs = True
        spec = position.first_spec
        if isinstance(spec, DataSpec):
            cursor = next(iter(position.loaders.values())).cursor
            remaining = (count - position.epoch) * spec.windows - -(-cursor.consumed // spec.global_batch_size)
            size = Batching(self._batch, None).window_size(spec.global_batch_size, position.identity.world_size)
            self._agent.expects(self.steps + max(0, -(-remaining * spec.global_batch_size // size)))
        try:
            while position.epoch < count:
                yield position.epoch
                position.end_epoch()
            self._trained_out = True
        finally:
            position.in_epochs = False

    def backward(self, loss: torch.Tensor, *, count: int | torch.Tensor | None = None) -> None:
        """Compute the gradients such that their mean over the ranks is that over the whole window.

        Args:
            loss: the mean over the samples of this rank's batch.
            count: where the loss is a mean over something else, such as the tokens of sentences: how many of them
                there are in this batch.

        Raises:
            UsageError: there is no batch, or the loss is no mean but one value a sample.
        """
        opened = self._position.opened
        if not opened:
            raise UsageError("run.backward() belongs into the loop over run.loader(): there is no batch to weigh.")
        if loss.numel() != 1:
            raise UsageError(
                f"The loss has {loss.numel()} values; run.backward() takes the mean over the batch. Give the loss "
                'function reduction="mean", or call .mean().'
            )
        if self._lifecycle.discarded:
            return  # the step was given up in the forward pass
        micro = opened[0].open
        assert micro is not None
        if len(opened) > 1:
            _require_same_weight(opened)
        with self._lifecycle.guard():
            self._gradients.backward(loss, micro, None if count is None else int(count))

    def _opened(self, stream: LoaderState, micro: MicroBatch) -> None:
        self._gradients.begin(micro)
        self._count_schedules()
        if micro.index == 0 and self._audit is not None:
            self._audit.begin(self.steps + 1, stream, micro.window)

    def _exchange(self, numbers: torch.Tensor) -> None:
        with self._lifecycle.guard():
            self._lifecycle.world.control.add_up(numbers)

    def _attach(self, state: TrackedState) -> None:
        if isinstance(self._batch, FixedPerWorkerBatch) and any(
            not isinstance(scheduler, Schedule) for scheduler in state.schedulers_of_engines
        ):
            raise UsageError(
                "The DeepSpeed engine has a scheduler that counts steps, but the samples of a step depend on the world "
                "size. Leave it out of the configuration: deepspeed.initialize(lr_scheduler=run.schedule(scheduler))."
            )
        self._gradients.attach(state)
        self._rate.attach(state.optimizers)
        self._trained = state

    def _commit(self) -> None:
        """Count the step at hand as trained."""
        self._require_scaled_schedules()
        self._position.require_whole()
        self._rate.begin()
        self._rate.commit(self._position.first_window)
        self._position.commit()

    def _steps_of_schedule(self) -> int | None:
        if self._lifecycle.discarded:
            return 0
        if self._position.loaders and not self._position.opened:
            return None
        self._position.require_whole()
        self._rate.begin()  # a scheduler may compute a rate from the one before
        return self._rate.steps_of(self._position.first_window)

    def _require_scaled_schedules(self) -> None:
        """Check that no scheduler counts steps of which each may train another number of samples.

        Raises:
            UsageError: one was stepped between two steps of an epoch, and not by us.
        """
        before = self._counted
        self._count_schedules(anew=True)
        if before is None or self._counted is None or before[0] != self._counted[0] or self._trained is None:
            return
        for scheduler, old, new in zip(self._trained.schedulers, before[1], self._counted[1], strict=True):
            if old != new:
                raise UsageError(
                    f"{type(scheduler).__name__} was stepped with the optimizer, but the samples of a step depend "
                    "on the world size. Wrap it: scheduler = run.schedule(scheduler), and track that."
                )

    def _count_schedules(self, *, anew: bool = False) -> None:
        """Note down how often the schedulers were stepped, at an epoch's first step at least."""
        if isinstance(self._batch, FixedPerWorkerBatch) and self._trained is not None:
            within = (self._position.epochs, self._position.generation)
            if anew or self._counted is None or self._counted[0] != within:
                self._counted = (within, [steps_of(scheduler) for scheduler in self._trained.schedulers])


def _require_same_weight(opened: list[LoaderState]) -> None:
    """Check that one weight suits the batches of several loaders.

    Raises:
        UsageError: it does not.
    """
    micros = {stream.name: stream.open for stream in opened if stream.open is not None}
    if len({(micro.weight, micro.samples) for micro in micros.values()}) > 1:
        shares = {name: micro.samples for name, micro in micros.items()}
        raise UsageError(
            f"The batches at hand have different numbers of samples ({shares}), so the loss has no one weight. "
            "Give the loaders the same global_batch_size and lengths, or drop_last=True."
        )
