"""The training process's side of an elastic run: what ``train.start()`` returns.

The session knows how many optimizer steps the run has completed and where its data stand. ``run.commit()`` is the commit
point of a step: everything that could interrupt training happens there, between two steps, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.config import BatchPolicy, CheckpointPolicy
from azureml_elastic.errors import CheckpointError, RoundBroken, UsageError
from azureml_elastic.ipc.agent_interface import Action, Agent, WorkerIdentity
from azureml_elastic.train.data.loader import Batching
from azureml_elastic.train.integrations.deepspeed import config_for
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.exit_hooks import ExitHooks
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.profiling import Profiling
from azureml_elastic.train.session.training import Training
from azureml_elastic.train.session.training_state import TrainingState

__all__ = ["Session"]

_LOG = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0
"""How long a script that ends early waits for the checkpoint that is being written."""


class Session(Training):
    """One process of an elastic run.

    Args:
        identity: of this process; one that is to wait for its place in a round is of round 0.
        policy: of the checkpoints.
        storage: of them.
        agent: that started the process.
        audit: writes down the samples of each step, if at all.
        batch: what becomes of the batch when the world size changes.
        profiling: records steps, if at all.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        policy: CheckpointPolicy,
        storage: Storage,
        agent: Agent,
        audit: Audit | None,
        batch: BatchPolicy,
        profiling: Profiling | None = None,
    ) -> None:
        lifecycle = ProcessGroupLifecycle(agent, identity, audit)
        super().__init__(lifecycle, agent, audit, batch)
        self._training_state = TrainingState(policy, storage, agent, lifecycle.world, self._position, self._rate)
        self._lifecycle.keep(self._training_state)
        self._profiling = profiling
        self._exit_hooks = ExitHooks(self._finish_at_exit, self._close_at_exit, self._lifecycle.on_uncaught)

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self._lifecycle.device

    @property
    def steps(self) -> int:
        """Optimizer steps that the run has completed, over all its rounds."""
        return self._training_state.steps

    @property
    def rank(self) -> int:
        """Among all processes of the round."""
        return self._lifecycle.world.identity.rank

    @property
    def local_rank(self) -> int:
        """Among the processes of this node."""
        return self._lifecycle.world.identity.local_rank

    @property
    def world_size(self) -> int:
        """Processes of the round; another round may have another number."""
        return self._lifecycle.world.identity.world_size

    @property
    def round(self) -> int:
        """The round's number, 0 without an agent."""
        return self._lifecycle.world.identity.round

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._lifecycle.world.identity.rank == 0

    @property
    def epoch(self) -> int:
        """The epoch at hand, counted from 0."""
        return max(self._position.epochs)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Move a model to this process's device and make it data-parallel.

        Args:
            model: to train.
            options: of ``torch.nn.parallel.DistributedDataParallel``.
        """
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options = {"device_ids": [self.device] if self.device.type == "cuda" else None, **options}
        return self._lifecycle.parallel(model, **options)

    def deepspeed_config(
        self, config: Mapping[str, Any], *, global_batch_size: int, micro_batch_size: int | None = None
    ) -> dict[str, Any]:
        """Return a copy of a DeepSpeed configuration with batch sizes for the ranks of this round.

        Args:
            config: DeepSpeed's; its ``elasticity`` and ``nebula`` blocks are left out.
            global_batch_size: that of the loader.
            micro_batch_size: that of the loader, where it has one.

        Raises:
            UsageError: it names another global batch, or an accumulation that the loader does not have.
        """
        size = Batching(self._batch, micro_batch_size).window_size(global_batch_size, self.world_size)
        if config.get("train_batch_size") == global_batch_size:  # at the reference world size
            config = {**config, "train_batch_size": size}
        return config_for(config, size, self.world_size, micro_batch_size)

    def track(self, **objects: Any) -> None:
        """Say what a checkpoint holds, and restore it where the run has one.

        To be called once, after the model is wrapped and the optimizer made, by all ranks.

        Args:
            objects: modules, optimizers, a DeepSpeed engine in place of both, and objects with ``state_dict`` and
                ``load_state_dict``, which are saved from rank 0; by any names.

        Raises:
            UsageError: called twice, an object has no state, or a checkpoint does not fit.
            CheckpointDamaged: there is a checkpoint, but none is whole.
            CheckpointError: whether there is one could not be learnt.
            Fenced: a newer round has taken over.
        """
        if self._training_state.state is not None:
            names = self._training_state.state.names
            raise UsageError(f"run.track() was called before, with {names}. Give all objects in one call.")
        state = TrackedState(objects, self._on_optimizer_step)
        self._attach(state)
        with self._lifecycle.guard(stay=False):
            self._training_state.track(state)
        if self._profiling is not None:
            self._profiling.enter(self._lifecycle.world.identity, self.steps)

    def commit(self) -> None:
        """Commit an optimizer step: its samples are trained, and a checkpoint or a change of nodes may follow.

        To be called by all ranks, after ``optimizer.step()`` and after whatever else the step changes in what is
        tracked, such as a scheduler that counts steps: a checkpoint is taken in here.

        Raises:
            UsageError: nothing is tracked, or the session is over.
            CheckpointError: a checkpoint was due and a rank could not write.
            Fenced: a newer round has taken over.
            SystemExit: the agent wants this process to leave; all is saved.
        """
        if self._training_state.state is None:
            raise UsageError("run.commit() was called before run.track(): a restart would begin from scratch.")
        if self._lifecycle.over:
            raise UsageError("run.commit() was called after run.finish().")
        if self._position.loaders and not self._position.opened:
            raise UsageError("run.commit() was called without a batch: call it once in each iteration over the loader.")
        if self._lifecycle.discarded:
            self._lifecycle.end_discarded_step()
            if self._profiling is not None:
                self._profiling.after_step(self._lifecycle.world.identity, self.steps)
            return
        self._commit()
        self._training_state.steps += 1
        self._training_state.half_step = False
        if self._audit is not None:
            self._audit.done(self.steps)
        with self._lifecycle.guard():
            self._between_steps(self._agent.completed(self.steps))
        if self._profiling is not None:
            self._profiling.after_step(self._lifecycle.world.identity, self.steps)

    def finish(self) -> None:
        """Take the last checkpoint, so that the same script started again trains nothing again. Only once.

        Called by ``with``, and at the interpreter's exit where ``run.epochs()`` has come to its end. A script that
        stops earlier on its own calls it itself, on all ranks.

        Raises:
            CheckpointError: the last checkpoint could not be committed; started again, the script resumes before it.
        """
        if self._lifecycle.over:
            return
        if self._profiling is not None:
            self._profiling.finish(self.steps)
        self._training_state.settle()
        if self._training_state.state is not None:
            if self._training_state.half_step:
                _LOG.warning("The optimizer has stepped after the last run.commit(); that step is not saved.")
            else:
                with self._lifecycle.guard(stay=False):
                    if self._training_state.has_unsaved_progress() and not self._training_state.save(must_commit=True):
                        raise CheckpointError(
                            f"The last checkpoint, of step {self.steps}, was written but could not be committed: the "
                            "run's table stayed away. Started again, the script resumes from the checkpoint before it."
                        )
            self._agent.finished(self.steps)
        self._lifecycle.over = True

    def _finish_at_exit(self) -> None:
        """Finish a script that has trained all its epochs; one that ends earlier may be failing, on one rank alone."""
        if self._trained_out:
            self.finish()

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish, unless the block has failed, and let go of everything."""
        self._exit_hooks.failed = self._exit_hooks.failed or kind is not None
        try:
            if not self._exit_hooks.failed:
                self.finish()
        finally:
            self._close()

    def _on_optimizer_step(self) -> None:
        if not self._lifecycle.discarded:
            self._training_state.half_step = True

    def _between_steps(self, action: Action | None) -> None:
        handed_over = action == "rejoin" and self._lifecycle.hand_over()
        if action in ("leave", "rejoin"):
            if not handed_over:
                with contextlib.suppress(RoundBroken):  # the state goes on in memory, and is saved first thing there
                    self._training_state.save(must_commit=True)
            self._lifecycle.give_up(handed_over=handed_over)
            return
        self._training_state.after_step()
        if self._training_state.due() or action == "save":
            self._training_state.save()
        else:
            self._training_state.take_snapshot()

    def _close_at_exit(self) -> None:
        self._close()
        self._lifecycle.dissolve()

    def _close(self) -> None:
        self._exit_hooks.cancel()
        if self._profiling is not None:
            self._profiling.close()
        if not self._lifecycle.over:
            self._training_state.settle(_CLOSING_SECONDS)
        self._agent.close()
        if self._audit is not None:
            self._audit.close()
        world = self._lifecycle.world
        if (
            world.owns_group and not self._exit_hooks.failed
        ):  # leaving a group of which a peer has died could wait for it
            world.close()
