"""The session of a training process: what ``train.start()`` returns.

The session counts the optimizer steps that the run has completed, and the position in its data. ``run.commit()`` is the
commit point of a step: everything that may interrupt training happens there, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn
from typing_extensions import Self

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.config import FixedPerWorkerBatch
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations.deepspeed.session_config import config_for
from azureml_elastic.train.optim.gradient_averaging import require_averaging
from azureml_elastic.train.optim.schedule import Schedule
from azureml_elastic.train.session.context import SessionContext
from azureml_elastic.train.session.exit_hooks import ExitHooks, all_arrive
from azureml_elastic.train.session.training import Training

__all__ = ["Session"]

_LOG = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0
"""Time that a script which has failed waits for the checkpoint that is being written."""

_LEAVING_SECONDS = 15.0
"""Time that a script which ends before its last epoch waits for all ranks to do the same."""


class Session(Training):
    """One process of an elastic run; made by :func:`~azureml_elastic.train.start`."""

    def __init__(self, context: SessionContext) -> None:
        super().__init__(context)
        self._not_averaged: list[nn.Module] = []
        self._exit_hooks = ExitHooks(self._finish_at_exit, self._close_at_exit, self._lifecycle.on_uncaught)

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self._lifecycle.over

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
            self._not_averaged.append(model)
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options = {"device_ids": [self.device] if device_of(self.device).separate else None, **options}
        return self._lifecycle.parallel(model, **options)

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
        batching = replace(self._batching, micro_batch_size=micro_batch_size)
        size = batching.window_size(global_batch_size, self.world_size)
        if config.get("train_batch_size") == global_batch_size:  # at the reference world size
            config = {**config, "train_batch_size": size}
        return config_for(config, size, self.world_size, micro_batch_size)

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
        if self._state.tracked is not None:
            names = self._state.tracked.names
            raise UsageError(f"run.track() was called before, with {names}. Give all objects in one call.")
        if (self.world_size > 1 or self._context.can_grow) and not self._batching.exact:
            require_averaging(objects, self._not_averaged, self.world_size)
        if unknown := sorted(set(partial) - objects.keys()):
            raise UsageError(f"partial={unknown} is not among the tracked objects {sorted(objects)}. Give their names.")
        state = TrackedState(objects, self._on_optimizer_step, partial)
        if isinstance(self._context.batch, FixedPerWorkerBatch) and any(
            not isinstance(scheduler, Schedule) for scheduler in state.schedulers_of_engines
        ):
            raise UsageError(
                "The DeepSpeed engine has a scheduler that counts steps, but the samples of a step depend on the world "
                "size. Leave it out of the configuration: deepspeed.initialize(lr_scheduler=run.schedule(scheduler))."
            )
        self._gradients.attach(state)
        self._lifecycle.guard_updates(state)  # before the hooks that scale learning rates: a state handed over has none
        self._rate.attach(state.optimizers)
        with self._lifecycle.guard(stay=False):
            self._state.track(state)
            self._lifecycle.settle_weights()
        if self._context.profiling is not None:
            self._context.profiling.between_steps(self._lifecycle.world.identity, self.steps)
        if self._replica is not None and not state.replicated:
            # The last of the hooks: a rank knows by the others that its own gradients are complete before it says so.
            for optimizer in state.optimizers:
                optimizer.register_step_pre_hook(self._before_update)
        return self.steps

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
        self._commit()

    def _commit(self, **pending: bool) -> None:
        """Commit a step; for the arguments see :meth:`StepCommits.completed`."""
        self._require_tracked("commit")
        if self._position.loaders and not self._position.opened:
            raise UsageError("run.commit() was called without a batch: call it once in each iteration over the loader.")
        if not self._lifecycle.discarded:
            if self._schedule_check is not None:
                self._schedule_check.end_step(self._state.tracked)
            self._position.require_whole()
            self._rate.begin()
            self._rate.commit(self._position.first_window)
            self._position.commit()
        self._commits.completed(**pending)

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
        self._require_tracked("log")
        if self._lifecycle.world.identity.rank or self._lifecycle.discarded:
            return
        position = self._position
        in_progress = self._state.half_step or not position.loaders or bool(position.opened)
        self._values.add(values, None if in_progress else self._state.steps)

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
        self._require_tracked("save")
        if self._state.half_step or (self._position.opened and not self._lifecycle.discarded):
            raise UsageError(
                "run.save() was called within a step. Call it after run.commit(), which completes the step."
            )
        self._commits.save(wait=wait)

    def finish(self) -> None:
        """Commit the last checkpoint, so that the same script started again trains nothing twice. A collective.

        ``with`` calls it, and the interpreter's exit if the script has not failed. A script that leaves
        :meth:`epochs` early and is not sure to end on all ranks within seconds calls it itself, on all ranks.

        Raises:
            CheckpointError: the last checkpoint could not be committed; started again, the script resumes before it.
        """
        if self._lifecycle.over:
            return
        if self._context.profiling is not None:
            self._context.profiling.finish(self.steps)
        self._commits.finish()
        self._lifecycle.over = True

    def _require_tracked(self, method: str) -> None:
        if self._state.tracked is None:
            raise UsageError(f"run.{method}() was called before run.track(): a restart would begin from scratch.")
        if self._lifecycle.over:
            raise UsageError(f"run.{method}() was called after run.finish().")

    def _finish_at_exit(self) -> None:
        """Finish a script that has ended; one that ends before its last epoch may be failing on this rank alone."""
        if self._lifecycle.over or not (self._trained_out or self._state.tracked is not None):
            return
        key = f"azureml_elastic/left/{self.round}/{self.steps}/{self._state.half_step}"
        if self._trained_out or all_arrive(key, self.world_size, _LEAVING_SECONDS):
            self.finish()
        elif self._state.has_unsaved_progress():
            _LOG.warning(
                "The script ends after step %d, before its last epoch, and not all ranks ended within %g s: its "
                "last steps are not saved. Call run.finish() on all ranks before a script ends early.",
                self.steps,
                _LEAVING_SECONDS,
            )

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish unless the block has failed, and release the process group and the agent."""
        if error is not None:
            self._lifecycle.on_uncaught(error)  # before the channel is closed, through which the state is handed over
        self._exit_hooks.failed = self._exit_hooks.failed or kind is not None
        try:
            if not self._exit_hooks.failed:
                self.finish()
        finally:
            self._close()

    def _on_optimizer_step(self) -> None:
        if not self._lifecycle.discarded:
            self._state.half_step = True

    def _close_at_exit(self) -> None:
        self._close()
        if not self._lifecycle.exits_quickly:
            for model in self._lifecycle.models:
                model.dissolve()  # its threads must not outlive the interpreter

    def _close(self) -> None:
        self._exit_hooks.cancel()
        if self._context.profiling is not None:
            self._context.profiling.close()
        if not self._lifecycle.over:
            self._values.send(wait=False)
            self._state.settle(_CLOSING_SECONDS)
        self._context.agent.close()
        self._context.audit.close()
        world = self._lifecycle.world
        # Closing a group with a dead peer could block, and of a process that only makes room others wait for the end.
        if world.owns_group and not (self._exit_hooks.failed or self._lifecycle.exits_quickly):
            world.close()
