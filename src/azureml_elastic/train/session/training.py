"""The part of a session that concerns data, gradients and learning rates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from azureml_elastic.config import FixedPerWorkerBatch
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.replica_group import ReplicaGroup
from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.batching import Batching
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader, SizedDataset
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Window
from azureml_elastic.train.data.sampling import DataSpec
from azureml_elastic.train.data.shard_loader import ShardLoader
from azureml_elastic.train.data.shard_streams import ShardedDataset, ShardSpec
from azureml_elastic.train.optim.gradients import Gradients
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.optim.schedule import Schedule, ScheduleCheck
from azureml_elastic.train.session.context import SessionContext
from azureml_elastic.train.session.evaluation import Evaluation
from azureml_elastic.train.session.logged_values import LoggedValues
from azureml_elastic.train.session.mesh import MeshShape
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.step_commits import StepCommits
from azureml_elastic.train.session.training_state import TrainingState

__all__ = ["Training"]

_LOG = logging.getLogger(__name__)


class Training:
    """Rank, loaders, epochs, gradients and evaluation of a process: the part of a session that concerns data."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._batching = Batching(context.batch)
        self._lifecycle = lifecycle = ProcessGroupLifecycle(context)
        self._position = position = lifecycle.position
        self._rate = LearningRate(context.batch, position, lambda: lifecycle.discarded)
        self._gradients = Gradients(lifecycle.world, position, self._rate, exact=self._batching.exact)
        self._state = TrainingState(context, lifecycle.world, position, self._rate)
        lifecycle.training_state = self._state
        self._values = LoggedValues(context.agent.logged)
        self._commits = StepCommits(context, lifecycle, self._state, self._values)
        self._schedule_check = ScheduleCheck(position) if isinstance(context.batch, FixedPerWorkerBatch) else None
        self._mesh: DeviceMesh | None = None
        self._replica: ReplicaGroup | None = None
        self._trained_out = False
        self._epochs: int | None = None
        self._expected_steps: int | None = None
        position.when_opened = self._opened
        position.when_entered = self._report_expected_steps
        position.when_ended = lambda loader, cursor: context.audit.ended(self.steps, loader, cursor)

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the run has completed, over all rounds."""
        return self._state.steps

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._lifecycle.device

    @property
    def rank(self) -> int:
        """Rank among all processes of the round."""
        return self._lifecycle.world.identity.rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self._lifecycle.world.identity.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the round."""
        return self._lifecycle.world.identity.world_size

    @property
    def round(self) -> int:
        """Number of the round, 0 without an agent."""
        return self._lifecycle.world.identity.round

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return max(self._position.epochs)

    @property
    def accumulating(self) -> bool:
        """Whether the current step has more micro-batches, so that the optimizer must not step yet."""
        return self._position.accumulating and not self._lifecycle.discarded

    @property
    def learning_rate_factor(self) -> float:
        """Factor of the optimizers' learning rates in the current step; 1 under a fixed global batch."""
        return self._rate.factor

    def mesh(self, *, tensor_parallel: int = 1) -> DeviceMesh:
        """Return the device mesh of the round, to shard a model on with ``fully_shard(model, mesh=run.mesh())``.

        Its dimensions are ``"replicate"`` and ``"shard"``: the model is sharded over the workers of
        ``ElasticDistribution.nodes_per_replica`` nodes, one by default, and replicated between these. With
        ``tensor_parallel`` there is a third one, ``"tensor"``, for ``parallelize_module``; ``fully_shard`` then takes
        ``mesh["replicate", "shard"]``. The ranks along ``"tensor"`` train the same samples.

        Called once on all ranks, before :meth:`loader` and :meth:`track`. A collective.

        Args:
            tensor_parallel: number of workers of a node that compute a layer together

        Raises:
            UsageError: called twice or too late, or the workers cannot be divided so.
        """
        if self._mesh is not None or self._position.loaders or self._state.tracked is not None:
            raise UsageError("run.mesh() is called once, before run.loader() and run.track(): they depend on it.")
        lifecycle, identity = self._lifecycle, self._lifecycle.world.identity
        with lifecycle.guard(stay=False):
            firsts = lifecycle.world.control.gather(identity.rank - identity.local_rank)
            shape = MeshShape.of([*Counter(firsts).values()], self._context.nodes_per_replica, tensor_parallel)
            sizes = shape.dimensions
            kind = device_of(self.device).kind
            self._mesh = init_device_mesh(kind, (*sizes.values(),), mesh_dim_names=(*sizes,))
            if shape.replicas > 1 and len(shape.rows[0]) > 1:
                self._replica = ReplicaGroup(lifecycle.world, shape.rows)
        if tensor_parallel > 1:
            rank, world_size = identity.rank // tensor_parallel, identity.world_size // tensor_parallel
            self._position.identity = replace(identity, rank=rank, world_size=world_size)
            self._position.counts = identity.rank % tensor_parallel == 0
            if not self._position.counts:
                self._context.audit.close()  # the first of these ranks records the samples of all
        return self._mesh

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
        micro_batches: int | None = None,
        equal_counts: bool = False,
        **options: Any,
    ) -> ElasticLoader:
        """Make a training loader; for evaluation see :meth:`evaluate`.

        ``len(loader)`` is the number of batches that an iteration which begins now yields on this rank, so the rest of
        the epoch after a resume; loaders of shards have none. Schedules count ``loader.steps_per_epoch``.

        Args:
            dataset: map-style dataset, or one in shards; the same on all ranks and over all restarts
            global_batch_size: number of samples of one optimizer step over all ranks, at any world size; under
                :class:`~azureml_elastic.FixedPerWorkerBatch` at the reference world size
            micro_batch_size: limit on the samples of one forward and backward pass of a rank, for loops that check
                ``run.accumulating``; ``None`` for no limit
            seed: random seed of the order
            shuffle: whether the order is random; for a dataset in shards, the order of the shards
            drop_last: whether the incomplete batch at the end of an epoch is left out
            name: name of the loader, for scripts with several
            loader_class: ``DataLoader``, or a class of the same arguments such as torchdata's ``StatefulDataLoader``
            micro_batches: number of micro-batches of each rank in each step, whatever their size, in place of a
                limit; ``None`` for as many as that requires
            equal_counts: whether all ranks have the same number of micro-batches in each step, where loops count them;
                those without samples have a weight of 0
            options: further arguments of the class: ``num_workers``, ``collate_fn``, ...

        Raises:
            UsageError: the name is taken, the data differ from those of the checkpoint, or the dataset has neither a
                length nor shards.
        """
        batching = replace(
            self._batching,
            micro_batch_size=micro_batch_size,
            micro_batches=micro_batches,
            equal_counts=equal_counts,
        )
        batching.require_fitting(global_batch_size)
        if batching.exact and self._position.loaders:
            raise UsageError('reduce="exact" works with one training loader; take reduce="allreduce" for several.')
        order: dict[str, Any] = {
            "global_batch_size": global_batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        context = LoaderContext(self._position, self.device, batching, loader_class, options)
        if not isinstance(dataset, IterableDataset) and isinstance(dataset, SizedDataset):
            spec = DataSpec(len(dataset), **order)
            return MapLoader(dataset, self._position.add(name, spec), context)
        if not isinstance(dataset, ShardedDataset):
            raise UsageError(
                f"{type(dataset).__name__} has neither a length and samples by index, nor num_shards and shard(), so "
                "it cannot be divided among ranks. Wrap its items: train.Shards(paths, read_one)."
            )
        if micro_batch_size is not None or micro_batches is not None:
            raise UsageError(
                "micro_batch_size and micro_batches do not go with shards; give the policy logical_workers for smaller "
                "batches."
            )
        smallest = batching.window_size(global_batch_size, 1)
        shards = ShardSpec.make(dataset.num_shards, batching.logical_workers, smallest_window=smallest, **order)
        return ShardLoader(dataset, self._position.add(name, shards), context, self._exchange)

    def evaluate(
        self,
        measure: Callable[[Any], Mapping[str, torch.Tensor | float]],
        dataset: SizedDataset,
        *,
        batch_size: int,
        **options: Any,
    ) -> dict[str, float]:
        """Measure the model on a dataset, each sample once, together with all ranks. A collective.

        Tracked modules are in evaluation mode meanwhile, and no gradients are computed. The result does not depend on
        the world size. All ranks call ``measure`` equally often: some repeat a batch, whose result is dropped.

        Args:
            measure: function that takes a batch of ``DataLoader`` on the device, and returns sums over its samples by
                name
            dataset: map-style dataset, the same on all ranks
            batch_size: number of samples of a batch
            options: further arguments of ``DataLoader``

        Returns:
            The sums over all samples, divided by their number, by name.

        Raises:
            UsageError: the dataset is empty, or the session is over.
        """
        evaluation = Evaluation(measure, dataset, batch_size, options)
        self._context.agent.busy()
        try:
            return evaluation.run(self._lifecycle, [] if self._state.tracked is None else self._state.tracked.modules)
        finally:
            self._context.agent.free()

    def schedule(self, scheduler: LRScheduler) -> Schedule:
        """Return a learning rate scheduler that counts samples, made of one that is stepped each step.

        It then has the same effect at any world size: under a fixed batch per worker, a step trains more samples the
        more ranks there are. Track and step the result.

        Args:
            scheduler: torch's scheduler, in steps of ``global_batch_size`` samples

        Raises:
            UsageError: it follows a metric.
        """
        return Schedule(scheduler, self._steps_of_schedule)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain of ``count``, the interrupted one first.

        The run never resumes from a checkpoint between the last step of an epoch and the end of the loop's body, so
        what follows the loop over the loader (an evaluation, a scheduler's step) runs once for each epoch.
        """
        position = self._position
        position.in_epochs = True
        self._epochs = count
        if self.steps and position.epoch >= count and self.is_main:
            _LOG.warning(
                "Nothing is left to train: all %d epochs, %d steps, were trained before this start. To train on, give "
                "run.epochs() a larger number; to begin anew, submit with another checkpoint folder and run id.",
                count,
                self.steps,
            )
        try:
            while position.epoch < count:
                self._report_expected_steps()
                yield position.epoch
                self._commits.end_epoch()
            self._trained_out = True
        finally:
            position.in_epochs = False
            self._epochs = None

    def backward(self, loss: torch.Tensor, *, count: int | torch.Tensor | None = None) -> None:
        """Compute gradients whose mean over the ranks is the mean over all samples of the step.

        Args:
            loss: mean over the samples of this rank's batch, a tensor of one element
            count: number of elements in this batch if the loss is a mean over elements other than samples, such as the
                tokens of sentences

        Raises:
            UsageError: there is no batch, or the loss has several elements.
        """
        opened = self._position.opened
        if not opened:
            raise UsageError("run.backward() belongs into the loop over run.loader(): there is no batch.")
        if loss.numel() != 1:
            raise UsageError(
                f"The loss has {loss.numel()} values; run.backward() takes the mean over the batch. Give the loss "
                'function reduction="mean", or call .mean().'
            )
        if self._lifecycle.discarded:
            return
        micro = opened[0].open
        assert micro is not None
        if len(opened) > 1:
            self._position.require_same_weight()
        with self._lifecycle.guard():
            self._state.observe(loss)
            self._gradients.backward(loss, micro, None if count is None else int(count))
            if not self.accumulating:
                self._lifecycle.updates.before_scaler()

    def _opened(self, loader: LoaderState, micro: MicroBatch) -> None:
        self._lifecycle.updates.begin_step()
        self._gradients.begin(micro)
        if self._schedule_check is not None:
            self._schedule_check.begin_step(self._state.tracked)
        if micro.index == 0:
            self._record(loader, micro.window)

    def _record(self, loader: LoaderState, window: Window) -> None:
        self._context.audit.begin(self.steps + 1, loader, window)

    def _exchange(self, numbers: torch.Tensor) -> None:
        if not self._position.counts:
            numbers.zero_()
        with self._lifecycle.guard():
            self._lifecycle.world.control.add_up(numbers)

    def _before_update(self, *_: object) -> None:
        """Update a sharded model only where the whole replica does, so that what is left of it is of one step."""
        steps = bool(self._position.opened) or not self._position.loaders
        if self._replica is None or not steps or self._state.half_step or self._state.reading:
            return
        if self._state.tracked is not None and not self._lifecycle.discarded:
            self._replica.agree()

    def _report_expected_steps(self) -> None:
        """Report the steps that the whole run will have, when the epochs begin and whenever the number changes."""
        position, first = self._position, self._position.first
        if self._epochs is None or first is None or not isinstance(first.spec, DataSpec):
            return
        cursor, spec = first.cursor, first.spec
        size = self._batching.window_size(spec.global_batch_size, position.identity.world_size)
        remaining = (self._epochs - position.epoch) * spec.windows - -(-cursor.consumed // spec.global_batch_size)
        expected = self.steps + max(0, -(-remaining * spec.global_batch_size // size))
        if expected != self._expected_steps:
            self._expected_steps = expected
            self._context.agent.expects(expected)

    def _steps_of_schedule(self) -> int | None:
        if self._lifecycle.discarded:
            return 0
        if self._position.loaders and not self._position.opened:
            return None
        self._position.require_whole()
        self._rate.begin()  # a scheduler may compute a rate from the one before
        return self._rate.steps_of(self._position.first_window)
