"""The session of a training process: what ``train.start()`` returns.

The session counts the optimizer steps that the run has completed, and the position in its data. ``run.commit()`` is the
commit point of a step: everything that may interrupt training happens there, between two steps.

This is the interface of scripts alone: what a call does is in the parts that
:class:`~azureml_elastic.train.session.run.Run` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import Self

from azureml_elastic.config import BatchPolicy, CheckpointPolicy, Profile
from azureml_elastic.distributed.device import device_of
from azureml_elastic.ipc.worker_messages import Busy, Free
from azureml_elastic.train.data.loader import ElasticLoader
from azureml_elastic.train.data.map_loader import SizedDataset
from azureml_elastic.train.data.shard_loader import ShardedDataset
from azureml_elastic.train.deepspeed_batches import GLOBAL_BATCH, config_for
from azureml_elastic.train.optim.learning_rate import Schedule
from azureml_elastic.train.session.evaluation import evaluate
from azureml_elastic.train.session.run import RunMember, open_run


def start(
    checkpoint: CheckpointPolicy | None = None,
    *,
    batch: BatchPolicy | None = None,
    profile: Profile | None = None,
    audit: bool | None = None,
) -> Session:
    """Join the run that this process was started for, or start one of a single process.

    Args:
        checkpoint: changes to the job's checkpoint policy: the fields that it was given
        batch: batch and learning rate at changing world sizes, in place of the job's batch policy
        profile: steps and ranks that PyTorch's profiler records, in place of the job's
        audit: whether the samples of each step are recorded, in place of the job's setting

    Returns:
        The session. It ends with a ``with`` block, :meth:`Session.finish`, or the interpreter.

    Raises:
        PlanError: the plan in the environment cannot be read.
        UsageError: the environment is contradictory, or the checkpoint folder is impossible or may not be written to.
        CheckpointError: the checkpoint folder cannot be used for another reason.
        OSError: the node's agent does not answer.
    """
    return Session(open_run(checkpoint, batch=batch, profile=profile, audit=audit))


class Session(RunMember):
    """One process of an elastic run; made by :func:`~azureml_elastic.train.start`."""

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self._lifecycle.world.identity.local_rank

    @property
    def round(self) -> int:
        """Number of the round, 0 without an agent."""
        return self._lifecycle.world.identity.round

    @property
    def accumulating(self) -> bool:
        """Whether the current step has more micro-batches, so that the optimizer must not step yet."""
        return self._steps.accumulating

    @property
    def learning_rate_factor(self) -> float:
        """Factor of the optimizers' learning rates in the current step; 1 under a fixed global batch."""
        return self._run.rate.factor

    def wrap(self, model: nn.Module, *, average_gradients: bool = True, **options: Any) -> nn.Module:
        """Move a model to this process's device, and average its gradients over the ranks.

        Args:
            model: model to train
            average_gradients: ``False`` for a script that averages the gradients by itself: the model is returned as it
                is, and :meth:`track` accepts it at any world size
            options: arguments of ``torch.nn.parallel.DistributedDataParallel``
        """
        model = model.to(self.device)
        if not average_gradients:
            self._run.leave_gradients_to_script(model)
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # torch refuses data parallelism for a model that trains nothing
        options = {"device_ids": [self.device] if device_of(self.device).separate else None, **options}
        return self._lifecycle.parallel(model, **options)

    def track(self, *, partial: Collection[str] = (), **objects: Any) -> int:
        """Register what a checkpoint holds, and restore it if the run has a checkpoint.

        Called once on all ranks, after the model is wrapped and the optimizer made.

        Args:
            partial: names of objects of which a checkpoint may fit a part alone, for instance a model with a new head,
                and its optimizer. What has the same name and shape is restored, and cast to another type; a warning
                names the rest, which begins anew. An optimizer keeps its own settings then.
            objects: modules, optimizers, a DeepSpeed engine in place of both, and objects with ``state_dict`` and
                ``load_state_dict``, which are saved from rank 0; under any names. The gradients of modules must be
                averaged over the ranks if the run has, or may get, more than one: see :meth:`wrap`.

        Returns:
            The number of optimizer steps that the run has completed, where a loop that counts them begins.

        Raises:
            UsageError: called twice, an object has no state, a module's gradients are not averaged, or a checkpoint
                does not fit.
            CheckpointDamaged: there are checkpoints, but none is complete.
            CheckpointError: the newest checkpoint could not be determined.
            Fenced: a newer round has taken over.
        """
        return self._run.track(objects, partial)

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
            options: further arguments of the class: ``num_workers``, ``collate_fn``, ...

        Raises:
            UsageError: the name is taken, the data differ from those of the checkpoint, or the dataset has neither a
                length nor shards.
        """
        batching = replace(self._run.batching, micro_batch_size=micro_batch_size)
        order = {"global_batch_size": global_batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        return self._run.loader(dataset, name, batching, order, options, loader_class)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain of ``count``, the interrupted one first.

        The run never resumes from a checkpoint between the last step of an epoch and the end of the loop's body, so
        what follows the loop over the loader (an evaluation, a scheduler's step) runs once for each epoch.
        """
        return self._steps.epochs(count)

    def backward(self, loss: torch.Tensor, *, count: int | torch.Tensor | None = None) -> None:
        """Compute gradients whose mean over the ranks is the mean over all samples of the step.

        Args:
            loss: mean over the samples of this rank's batch, a tensor of one element
            count: number of elements in this batch if the loss is a mean over elements other than samples, such as the
                tokens of sentences

        Raises:
            UsageError: there is no batch, or the loss has several elements.
        """
        self._steps.backward(loss, count)

    def commit(self) -> None:
        """Commit an optimizer step: count its samples as trained. A collective.

        Called on all ranks, after ``optimizer.step()`` and whatever else the step changes in tracked objects, such as a
        scheduler that counts steps. A checkpoint may be taken in here, and the set of nodes may change. After the last
        step of an epoch both are deferred until the body of :meth:`epochs` has ended.

        Raises:
            UsageError: nothing is tracked, there is no batch, or the session is over.
            CheckpointError: a checkpoint was due and a rank could not write it.
            Fenced: a newer round has taken over.
            SystemExit: another process continues; the state is saved.
        """
        self._steps.commit()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values of a step, such as the loss, to the run's metrics. Only the call on rank 0 has an effect.

        The values belong to the step whose batch is being trained, which the next :meth:`commit` completes; between
        ``run.commit()`` and the next batch, to the step that was completed. A loop without :meth:`loader` logs a step's
        values before its commit. Values of a step that is not committed are dropped. A name is logged once for a step.

        Nothing waits: a value on a GPU is copied by the device's queue, and sent later.

        Args:
            values: up to 100 numbers by name: floats, ints, and tensors or arrays of one element; NaN and infinity are
                allowed. A name has letters, digits, ``_``, ``-``, ``.``, ``:``, ``/`` and spaces

        Raises:
            UsageError: nothing is tracked, the session is over, or, on rank 0, a name or a value is not allowed.
        """
        self._steps.log(values)

    def save(self, *, wait: bool = False) -> None:
        """Take a checkpoint of the last committed step, besides those of the checkpoint policy. A collective.

        Called on all ranks, between ``run.commit()`` and the next batch. It returns when the checkpoint before it is
        written and the state is copied to memory, so that training may continue; writing and committing go on in the
        background. After the last step of an epoch the checkpoint is deferred until the body of :meth:`epochs` has
        ended, or the session.

        Args:
            wait: whether to return only when the checkpoint is written on all ranks and committed

        Raises:
            UsageError: nothing is tracked, the session is over, or a step is incomplete.
            CheckpointError: a checkpoint could not be written, or not committed with ``wait=True``.
            Fenced: a newer round has taken over.
        """
        self._steps.save(wait=wait)

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
                name: numbers, or tensors of one element
            dataset: map-style dataset, the same on all ranks
            batch_size: number of samples of a batch
            options: further arguments of ``DataLoader``

        Returns:
            The sums over all samples, divided by their number, by name.

        Raises:
            UsageError: the dataset is empty, or the session is over.
        """
        agent, tracked = self._run.context.agent, self._run.state.tracked
        modules = [] if tracked is None else tracked.modules
        agent.report(Busy())  # else the agent would take the pause between two steps for a hang
        try:
            return evaluate(self._lifecycle, modules, measure, dataset, batch_size, options)
        finally:
            agent.report(Free())

    def schedule(self, scheduler: LRScheduler) -> Schedule:
        """Return a learning rate scheduler that counts samples, made of one that is stepped each step.

        It then has the same effect at any world size: under a fixed batch per worker, a step trains more samples the
        more ranks there are. Track and step the result.

        Args:
            scheduler: torch's scheduler, in steps of ``global_batch_size`` samples

        Raises:
            UsageError: it follows a metric.
        """
        return Schedule(scheduler, self._steps.steps_of_schedule)

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
        return self._run.mesh(tensor_parallel)

    def deepspeed_config(
        self, config: Mapping[str, Any], *, global_batch_size: int, micro_batch_size: int | None = None
    ) -> dict[str, Any]:
        """Return a copy of a DeepSpeed configuration with the batch sizes of this round.

        Args:
            config: DeepSpeed's configuration; its ``elasticity`` and ``nebula`` blocks are left out
            global_batch_size: global batch size of the loader
            micro_batch_size: micro-batch size of the loader, if any

        Raises:
            UsageError: the configuration has another global batch, or an accumulation that the loader does not have.
        """
        batching = replace(self._run.batching, micro_batch_size=micro_batch_size)
        size = batching.window_size(global_batch_size, self.world_size)
        if config.get(GLOBAL_BATCH) == global_batch_size:  # at the reference world size
            config = {**config, GLOBAL_BATCH: size}
        return config_for(config, size, self.world_size, micro_batch_size)

    def finish(self) -> None:
        """Commit the last checkpoint, so that the same script started again trains nothing twice. A collective.

        ``with`` calls it, and the interpreter's exit if the script has not failed. A script that leaves
        :meth:`epochs` early and is not sure to end on all ranks within seconds calls it itself, on all ranks.

        Raises:
            CheckpointError: the last checkpoint could not be committed; started again, the script resumes before it.
        """
        self._steps.finish()

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish unless the block has failed, and release the process group and the agent."""
        hooks = self._run.exit_hooks
        if error is not None:
            self._lifecycle.on_uncaught(error)  # before the channel is closed, through which the state is handed over
        hooks.failed = hooks.failed or kind is not None
        try:
            if not hooks.failed:
                self.finish()
        finally:
            self._run.close()
