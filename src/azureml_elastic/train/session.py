"""The training process's side of an elastic run: what ``train.start()`` returns.

The session knows how many optimizer steps the run has completed and where its data stand. ``run.step()`` is the commit
point of a step: everything that could interrupt training happens there, between two steps, and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from azureml_elastic.errors import CheckpointError, UsageError
from azureml_elastic.spec import CheckpointPolicy
from azureml_elastic.train.agent import Agent
from azureml_elastic.train.audit import Audit
from azureml_elastic.train.cadence import Cadence
from azureml_elastic.train.checkpoint import Checkpoints
from azureml_elastic.train.control import Control
from azureml_elastic.train.ending import Ending
from azureml_elastic.train.loader import ElasticLoader, Position, SizedDataset
from azureml_elastic.train.process import Environment, close_group, open_group, pick_device
from azureml_elastic.train.sampling import Cursor, DataSpec
from azureml_elastic.train.state import TrackedState

__all__ = ["Session"]

_LOG = logging.getLogger(__name__)


class Session:
    """One process of an elastic run.

    Args:
        environment: of the process.
        policy: of the checkpoints, with a path.
        agent: that started the process.
        audit: where the samples of each step are written down, if at all.

    Attributes:
        device: of this process.
        steps: optimizer steps that the run has completed, over all its rounds.
    """

    def __init__(self, environment: Environment, policy: CheckpointPolicy, agent: Agent, audit: Audit | None) -> None:
        assert policy.path is not None
        self._identity = environment.identity
        self._policy = policy
        self._agent = agent
        self._audit = audit
        self.device = pick_device(self._identity)
        self._owns_group = open_group(self._identity, self.device)
        self._control = Control()
        self._checkpoints = Checkpoints(Path(policy.path), policy.keep, self._identity, self._control, agent)
        self._cadence = Cadence(policy, self._control, clock=time.monotonic)
        self._state: TrackedState | None = None
        self._position = Position()
        self._spec: DataSpec | None = None
        self._saved_spec: DataSpec | None = None
        self._saved_at: tuple[int, Cursor] | None = None
        self.steps = 0
        self._over = False
        self._trained_out = False
        self._half_step = False
        self._ending = Ending(self._finish_at_exit, self._close)

    @property
    def rank(self) -> int:
        """Among all processes of the round."""
        return self._identity.rank

    @property
    def local_rank(self) -> int:
        """Among the processes of this node."""
        return self._identity.local_rank

    @property
    def world_size(self) -> int:
        """Processes of the round; another round may have another number."""
        return self._identity.world_size

    @property
    def round(self) -> int:
        """The round's number, 0 without an agent."""
        return self._identity.round

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._identity.rank == 0

    @property
    def epoch(self) -> int:
        """The epoch at hand, counted from 0."""
        return self._position.cursor.epoch

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Move a model to this process's device and make it data-parallel.

        Args:
            model: to train.
            options: of ``torch.nn.parallel.DistributedDataParallel``.
        """
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, **options)

    def track(self, **objects: Any) -> None:
        """Say what a checkpoint holds, and restore it where the run has one.

        To be called once, after the model is wrapped and the optimizer made, by all ranks.

        Args:
            objects: modules, optimizers, and objects with ``state_dict`` and ``load_state_dict``, which are saved
                from rank 0; by any names.

        Raises:
            UsageError: called twice, an object has no state, or a checkpoint does not fit.
            CheckpointDamaged: there is a checkpoint, but none is whole.
            CheckpointError: whether there is one could not be learnt.
            Fenced: a newer round has taken over.
        """
        if self._state is not None:
            raise UsageError(f"run.track() was called before, with {self._state.names}. Give all objects in one call.")
        state = TrackedState(objects, self._on_optimizer_step)
        restored = self._checkpoints.restore(state)
        self._state = state
        if restored is not None:
            self.steps = restored.reference.step
            if restored.data is not None:
                self._saved_spec = DataSpec.from_json(restored.data["spec"])
                if self._spec is not None:
                    self._spec.require_same(self._saved_spec)
                self._position.cursor = Cursor(int(restored.data["epoch"]), int(restored.data["consumed"]))
            self._saved_at = (self.steps, self._position.cursor)
        self._agent.restored(self.steps, None if restored is None else restored.reference.directory)
        self._cadence.begin(self.steps)
        self._half_step = False  # restoring an optimizer makes it step, by nothing

    def loader(
        self,
        dataset: SizedDataset,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> ElasticLoader:
        """Make the run's training loader; for evaluation take torch's own.

        Args:
            dataset: map-style, the same on all ranks and over all restarts.
            global_batch_size: samples of one optimizer step over all ranks, at any world size.
            seed: of the order.
            shuffle: whether the order is random.
            drop_last: whether the incomplete batch at the end of an epoch is left out.
            options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ...

        Raises:
            UsageError: there is one already, or the data differ from those of the checkpoint.
        """
        if self._spec is not None:
            raise UsageError(
                "run.loader() was called before; a run has one position in its data. Use torch's DataLoader for "
                "evaluation."
            )
        spec = DataSpec(len(dataset), global_batch_size, seed, shuffle, drop_last)
        if self._saved_spec is not None:
            spec.require_same(self._saved_spec)
        self._spec = spec
        return ElasticLoader(
            dataset, spec, self._identity, position=self._position, device=self.device, options=options
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain of ``count``, the interrupted one first.

        An epoch that a checkpoint found trained to its last sample, but not left, is yielded once more: its loader
        is empty and what follows the loop over it (an evaluation, say) runs.
        """
        self._position.in_epochs = True
        try:
            while self._position.cursor.epoch < count:
                epoch = self._position.cursor.epoch
                yield epoch
                self._position.open = None
                self._position.cursor = Cursor(epoch + 1)
            self._trained_out = True
        finally:
            self._position.in_epochs = False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients such that their mean over the ranks is that over the whole window.

        Args:
            loss: the mean over the samples of this rank's batch.

        Raises:
            UsageError: there is no batch, or the loss is no mean but one value a sample.
        """
        window = self._position.open
        if window is None:
            raise UsageError("run.backward() belongs into the loop over run.loader(): there is no batch to weigh.")
        if loss.numel() != 1:
            raise UsageError(
                f"The loss has {loss.numel()} values; run.backward() takes the mean over the batch. Give the loss "
                'function reduction="mean", or call .mean().'
            )
        (loss * window.weight).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Commit an optimizer step: its samples are trained, and a checkpoint or a change of nodes may follow.

        To be called by all ranks, after ``optimizer.step()`` and after whatever else the step changes in what is
        tracked, such as a scheduler that counts steps: a checkpoint is taken in here.

        Raises:
            UsageError: nothing is tracked, or the session is over.
            CheckpointError: a checkpoint was due and a rank could not write.
            Fenced: a newer round has taken over.
            SystemExit: the agent wants this process to leave; all is saved.
        """
        if self._state is None:
            raise UsageError("run.step() was called before run.track(): a restart would begin from scratch.")
        if self._over:
            raise UsageError("run.step() was called after run.finish().")
        if self._spec is not None and self._position.open is None:
            raise UsageError("run.step() was called without a batch: call it once in each iteration over the loader.")
        self.steps += 1
        self._half_step = False
        window = self._position.commit()
        if self._audit is not None and window is not None:
            self._audit.write(self.steps, window)
        action = self._agent.completed(self.steps)
        if action == "leave":
            self._save(must_commit=True)
            self._leave()
        elif self._cadence.due(self.steps) or action == "save":
            self._save()

    def finish(self) -> None:
        """Take the last checkpoint, so that the same script started again trains nothing again. Only once.

        Called by ``with``, and at the interpreter's exit where ``run.epochs()`` has come to its end. A script that
        stops earlier on its own calls it itself, on all ranks.

        Raises:
            CheckpointError: the last checkpoint could not be committed; started again, the script resumes before it.
        """
        if self._over:
            return
        if self._state is not None:
            if self._half_step:
                _LOG.warning("The optimizer has stepped after the last run.step(); that step is not saved.")
            elif self._has_news() and not self._save(must_commit=True):
                raise CheckpointError(
                    f"The last checkpoint, of step {self.steps}, was written but could not be committed: the run's "
                    "table stayed away. Started again, the script resumes from the checkpoint before it."
                )
            self._agent.finished(self.steps)
        self._over = True

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
        self._ending.failed = self._ending.failed or kind is not None
        try:
            if not self._ending.failed:
                self.finish()
        finally:
            self._close()

    def _on_optimizer_step(self) -> None:
        self._half_step = True

    def _has_news(self) -> bool:
        """Return whether a checkpoint now would hold more than the last one, beyond the turn of an epoch."""
        if self._saved_at is None:
            return self.steps > 0
        steps, cursor = self._saved_at
        if self._spec is not None and cursor.consumed >= self._spec.usable:
            cursor = Cursor(cursor.epoch + 1)
        return self.steps != steps or self._position.cursor not in {cursor, self._saved_at[1]}

    def _save(self, *, must_commit: bool = False) -> bool:
        """Take a checkpoint and return whether it is committed."""
        assert self._state is not None
        cursor = self._position.cursor
        data = None
        spec = self._spec or self._saved_spec
        if spec is not None:
            data = {"spec": spec.to_json(), "epoch": cursor.epoch, "consumed": cursor.consumed}
        committed = self._checkpoints.save(self.steps, self._state, data, must_commit=must_commit)
        if committed:
            self._saved_at = (self.steps, cursor)
        self._half_step = False  # the first look at an optimizer's state makes it step, by nothing
        self._cadence.saved()
        return committed

    def _leave(self) -> None:
        self._over = True
        self._agent.stopped(self.steps)
        raise SystemExit(self._agent.leave_code)

    def _close(self) -> None:
        self._ending.cancel()
        self._agent.close()
        if self._audit is not None:
            self._audit.close()
        if self._owns_group and not self._ending.failed:  # leaving a group of which a peer has died could wait for it
            close_group()
