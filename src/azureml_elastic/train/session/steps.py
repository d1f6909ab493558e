"""The steps of a process: what its loaders, its script and a training stack call between two of them.

:class:`~azureml_elastic.train.step_state.StepMachine` decides what a call means; this class does it, with the data, the
gradients, the learning rate, the training state and the agent.

A restart point never lies between an epoch's last step and the end of the epoch's body in ``run.epochs()``: the code in
between (an evaluation, a scheduler's step) runs once for each epoch. What would follow the last step of an epoch is
therefore deferred until the body has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from azureml_elastic.config import FixedPerWorkerBatch
from azureml_elastic.errors import CheckpointError, UsageError
from azureml_elastic.ipc.worker_messages import Expects, Finished
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.data.position import Batching, LoaderState, MicroBatch, Window
from azureml_elastic.train.data.sampling import Cursor, DataSpec
from azureml_elastic.train.optim.gradients import Gradients
from azureml_elastic.train.optim.learning_rate import LearningRate, ScheduleCheck
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.records import LoggedValues
from azureml_elastic.train.session.training_state import SessionContext
from azureml_elastic.train.step_state import StepMachine

_LOG = logging.getLogger(__name__)


class Steps:
    """Steps, step boundaries and checkpoints of a process.

    Attributes:
        complete_loop: function that counts the last step of a loop of the script's own, which a stack's integration
            drives, before the session ends; such a loop says when it trains the samples that it has taken
    """

    def __init__(
        self,
        context: SessionContext,
        machine: StepMachine,
        lifecycle: ProcessGroupLifecycle,
        rate: LearningRate,
        gradients: Gradients,
    ) -> None:
        self._context = context
        self._agent = context.agent
        self._audit = context.audit
        self._machine = machine
        self._lifecycle = lifecycle
        self._position = position = lifecycle.position
        self._state = lifecycle.state
        self._rate = rate
        self._gradients = gradients
        self._batching = Batching(context.batch)
        self._schedule_check = ScheduleCheck(position) if isinstance(context.batch, FixedPerWorkerBatch) else None
        self.values = LoggedValues(context.agent)
        self.complete_loop: Callable[[], None] | None = None
        self._unrecorded: tuple[LoaderState, Window] | None = None
        self._epochs: int | None = None
        self._expected: tuple[int, int] | None = None  # number of steps that was reported last, and the round change

    @property
    def trained_out(self) -> bool:
        """Whether the script has trained all of the epochs that it wanted."""
        return self._epochs is not None and not self._position.in_epochs and self._position.epoch >= self._epochs

    @property
    def accumulating(self) -> bool:
        """Whether the current step has more micro-batches."""
        return self._position.accumulating and not self._machine.discarded

    # --- calls of the loaders -----------------------------------------------------------------------------------------

    def take(self, loader: LoaderState, micro: MicroBatch) -> bool:
        """Begin a micro-batch, after what the step before has deferred; return whether the round is still the same."""
        if self._machine.pending:
            generation = self._position.generation
            self.end_code()
            # A boundary in there may have led to another round: the batch is then a share for a world size of the past.
            if generation != self._position.generation:
                return False
        self._position.take(loader, micro)
        if self._machine.take():
            self._state.note_weights()
            self._lifecycle.begin_step()
        self._gradients.begin(micro)
        if self._schedule_check is not None:
            self._schedule_check.begin_step(self._state.tracked)
        if micro.index == 0 and self.complete_loop is None:
            self._audit.begin(self._state.steps + 1, loader, micro.window)
        elif micro.index == 0:
            self._unrecorded = loader, micro.window
        return True

    def repeat(self, loader: LoaderState) -> None:
        """Begin a step that is discarded, after the last one of the epoch, whose code follows."""
        self._position.repeat(loader)
        self._machine.defer()
        self._lifecycle.discard_step()

    def leave(self, loader: LoaderState) -> None:
        """End a step that the script has left before its commit."""
        self._position.leave(loader)
        if not self._position.opened:
            self._machine.leave()

    def ended(self, loader: LoaderState, cursor: Cursor) -> None:
        """Record the end of an epoch, whose size was unknown before."""
        self._audit.ended(self._state.steps, loader, cursor)

    def add_up(self, numbers: torch.Tensor) -> None:
        """Add a vector over all ranks that train different samples, in place. A collective."""
        if not self._position.counts:
            numbers.zero_()
        with self._lifecycle.guard():
            self._lifecycle.world.control.add_up(numbers)

    # --- the step -----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, count: int | torch.Tensor | None) -> None:
        """Compute gradients, see :meth:`Session.backward`."""
        opened = self._position.opened
        if not opened:
            raise UsageError("run.backward() belongs into the loop over run.loader(): there is no batch.")
        if loss.numel() != 1:
            raise UsageError(
                f"The loss has {loss.numel()} values; run.backward() takes the mean over the batch. Give the loss "
                'function reduction="mean", or call .mean().'
            )
        if self._machine.discarded:
            return  # no other rank computes this step, and its commit undoes it: the optimizer shall find no gradients
        micro = opened[0].open
        assert micro is not None
        if len(opened) > 1:
            self._position.require_same_weight()
        with self._lifecycle.guard():
            self._state.observe(loss)
            self._gradients.backward(loss, micro, None if count is None else int(count))
            if not self.accumulating:
                self._lifecycle.updates.before_scaler()

    def commit(self, *, pending: bool = False, changes_state: bool = True) -> None:
        """Count a step, and do what is due after it. A collective after some steps.

        Args:
            pending: whether code of a stack follows that belongs to the step, up to :meth:`end_code`
            changes_state: whether that code, or the code at the end of the epoch, may change tracked objects
        """
        position, state = self._position, self._state
        self.require_tracked("commit")
        if position.loaders and not position.opened:
            raise UsageError("run.commit() was called without a batch: call it once in each iteration over the loader.")
        if self._machine.discarded:
            self.values.drop()
            self._lifecycle.end_discarded_step()
        else:
            if self._schedule_check is not None:
                self._schedule_check.end_step(state.tracked)
            position.require_whole()
            # An optimizer whose closure has raised left its rate scaled: what is saved below has the script's own.
            self._rate.begin()
            self._rate.commit(position.first_window)  # before the position, which closes the window
            pending = position.commit() or pending
            self._lifecycle.complete_update()
            # Before the step counts, as that raises for weights that are NaN: the values of such a step are sent.
            self.values.commit(state.steps + 1)
            state.complete_step()
            self._lifecycle.updates.end_step()
            self._audit.done(state.steps)  # now, because the process may exit at the boundary
            if self._machine.complete(pending=pending):
                self._boundary()
                state.found.end_commit()
            else:
                self._lifecycle.begin_pending_code(changes_state=changes_state)
        if self._expected is not None and self._expected[1] != position.generation:
            self._report_expected()
        if self._context.profiling is not None:
            self._context.profiling.between_steps(self._lifecycle.world.identity, state.steps)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values, see :meth:`Session.log`."""
        self.require_tracked("log")
        if self._lifecycle.world.identity.rank or self._machine.discarded:
            return
        in_progress = self._machine.in_step or not self._position.loaders
        self.values.add(values, None if in_progress else self._state.steps)

    def save(self, *, wait: bool) -> None:
        """Take a checkpoint, see :meth:`Session.save`."""
        self.require_tracked("save")
        if self._machine.in_step:
            raise UsageError(
                "run.save() was called within a step. Call it after run.commit(), which completes the step."
            )
        if not self._machine.defer_save(wait=wait):
            self._save(wait=wait)

    def steps_of_schedule(self) -> int | None:
        """Return by how many steps a schedule advances with the current step, ``None`` outside of one."""
        if self._machine.discarded:
            return 0
        if self._position.loaders and not self._position.opened:
            return None
        self._position.require_whole()
        self._rate.begin()  # a scheduler may compute a rate from the one before
        return self._rate.steps_of(self._position.first_window)

    def record_samples(self) -> None:
        """Record the samples of the current step, which the script's own loop trains now."""
        if self._unrecorded is not None:
            self._audit.begin(self._state.steps + 1, *self._unrecorded)
            self._unrecorded = None

    # --- what follows it ----------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain, see :meth:`Session.epochs`."""
        position = self._position
        position.in_epochs = True
        self._epochs = count
        if self._state.steps and position.epoch >= count and self._lifecycle.world.identity.rank == 0:
            _LOG.warning(
                "Nothing is left to train: all %d epochs, %d steps, were trained before this start. To train on, give "
                "run.epochs() a larger number; to begin anew, %s.",
                count,
                self._state.steps,
                f"remove {self._context.storage}, or give train.start() a policy with another path"
                if isinstance(self._agent, StandaloneAgent)
                else "start a run with another checkpoint folder and run id",
            )
        try:
            while position.epoch < count:
                self._report_expected()
                yield position.epoch
                self.end_epoch()
        finally:
            position.in_epochs = False

    def end_epoch(self) -> None:
        """Advance to the next epoch, and do what was deferred until then. A collective after some epochs."""
        self._position.end_epoch()
        self._machine.leave()  # in the middle of a step, perhaps
        self.end_code()

    def end_code(self) -> None:
        """Do what was deferred until the end of the script's code that follows a step. A collective at times."""
        due = self._machine.end_code()
        self._lifecycle.end_pending_code()
        if due.boundary:
            self._state.note_weights()
            self._boundary()
        if due.save is not None:
            self._save(wait=due.save)

    def advance_code(self, *, changes_state: bool) -> None:
        """Note how far the code has got that belongs to the last step: if it is interrupted, it continues from here."""
        self._machine.defer()
        self._state.note_weights()
        self._lifecycle.begin_pending_code(changes_state=changes_state)

    def finish(self) -> None:
        """Commit the last checkpoint, and end. A collective."""
        if self._machine.over:
            return
        if self.complete_loop is not None:
            self.complete_loop()
        if self._context.profiling is not None:
            self._context.profiling.finish(self._state.steps)
        if self._machine.discarded:
            self._lifecycle.end_discarded_step()
        if self._machine.pending:  # the script has left the epoch's body
            self._position.end_epoch()
            self._machine.end_code()  # the last save takes the place of what was deferred
        self._state.settle()
        if self._state.tracked is not None:
            self._save_last()
            self._state.finish()
            self._agent.report(Finished(self._state.steps))
        self._machine.finish()

    def require_tracked(self, method: str) -> None:
        """Raise ``UsageError`` for a method that was called too early, or too late."""
        if self._state.tracked is None:
            raise UsageError(f"run.{method}() was called before run.track(): a restart would begin from scratch.")
        if self._machine.over:
            raise UsageError(f"run.{method}() was called after run.finish().")

    def _save(self, *, wait: bool) -> None:
        self._machine.begin_boundary()
        try:
            with self._lifecycle.guard():
                if not self._state.save(must_commit=wait) and wait:
                    raise self._not_committed()
        finally:
            self._machine.end_boundary()

    def _save_last(self) -> None:
        if not self._position.loaders:
            self.values.commit(self._state.steps)  # logged after the last commit, and no step of them will follow
        self.values.send(wait=True)
        if not self._machine.whole:
            _LOG.warning("The optimizer has stepped after the last run.commit(); that step is not saved.")
            return
        with self._lifecycle.guard(stay=False):
            if self._state.has_unsaved_progress() and not self._state.save(must_commit=True) and self._state.finite:
                raise self._not_committed()

    def _not_committed(self) -> CheckpointError:
        if not self._state.finite:
            return CheckpointError(
                f"No checkpoint is taken of step {self._state.steps}: its weights are NaN or infinite."
            )
        return CheckpointError(
            f"The checkpoint of step {self._state.steps} was written but could not be committed: the run's table was "
            "not available. Started again, the script resumes from the checkpoint before it."
        )

    def _boundary(self) -> None:
        """Report the step to the agent, and do what all ranks have agreed on, or what the policy has due."""
        self._machine.begin_boundary()
        try:
            with self._lifecycle.guard():
                action = self._agent.completed(self._state.steps, self._position.take_trained())
                if action in ("leave", "rejoin"):
                    self.values.send(wait=True)  # the process may exit in the next call
                    self._lifecycle.leave_round(save=action == "leave")
                    return
                self._state.after_step(save=action == "save")
        finally:
            self._machine.end_boundary()

    def _report_expected(self) -> None:
        """Report the steps that the whole run will have, when the epochs begin and whenever the number changes."""
        position, first = self._position, self._position.first
        if self._epochs is None or not position.in_epochs or first is None or not isinstance(first.spec, DataSpec):
            return
        cursor, spec = first.cursor, first.spec
        size = self._batching.window_size(spec.global_batch_size, position.identity.world_size)
        remaining = (self._epochs - position.epoch) * spec.windows - -(-cursor.consumed // spec.global_batch_size)
        expected = self._state.steps + max(0, -(-remaining * spec.global_batch_size // size))
        if self._expected is None or expected != self._expected[0]:
            self._agent.report(Expects(expected))
        self._expected = expected, position.generation
