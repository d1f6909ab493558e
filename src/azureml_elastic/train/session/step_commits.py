"""What follows a completed step: the agreement with the agent on what is due, checkpoints, and the end of an epoch.

A restart point never lies between an epoch's last step and the end of the epoch's body in ``run.epochs()``: the code in
between (an evaluation, a scheduler's step) runs once for each epoch. What would follow the last step of an epoch is
therefore deferred until the body has ended.
"""

from __future__ import annotations

import logging

from azureml_elastic.errors import CheckpointError
from azureml_elastic.train.session.context import SessionContext
from azureml_elastic.train.session.logged_values import LoggedValues
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.training_state import TrainingState

__all__ = ["StepCommits"]

_LOG = logging.getLogger(__name__)


class StepCommits:
    """Step boundaries and checkpoints of a session."""

    def __init__(
        self, context: SessionContext, lifecycle: ProcessGroupLifecycle, state: TrainingState, values: LoggedValues
    ) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._state = state
        self._values = values
        self._boundary_deferred = False
        self._save_deferred: bool | None = None
        """Whether the deferred ``run.save()`` waits for the commit; ``None`` without one."""
        self._position = lifecycle.position
        self._position.when_continued = self.end_pending_code
        self._position.when_repeated = lifecycle.discard_step

    def completed(self, *, pending: bool = False, changes_state: bool = True) -> None:
        """Count a step, and do what is due after it. A collective after some steps.

        Args:
            pending: whether code of the script follows that belongs to the step, up to :meth:`end_pending_code`
            changes_state: whether that code, or the code at the end of the epoch, may change tracked objects
        """
        if self._lifecycle.discarded:
            self._values.drop()
            self._lifecycle.end_discarded_step()
        else:
            self._lifecycle.complete_update()
            self._values.commit(self._state.steps + 1)
            self._state.complete_step()
            self._lifecycle.updates.end_step()
            self._context.audit.done(self._state.steps)
            self._position.code_pending |= pending
            if self._position.code_pending:
                self._boundary_deferred = True
                self._lifecycle.begin_pending_code(changes_state=changes_state)
            else:
                self._step_boundary()
        if self._context.profiling is not None:
            self._context.profiling.between_steps(self._lifecycle.world.identity, self._state.steps)

    def end_epoch(self) -> None:
        """Advance to the next epoch, and do what was deferred until then. A collective after some epochs."""
        self._position.end_epoch()
        self._do_deferred()

    def end_pending_code(self) -> None:
        """Do what was deferred until the end of the script's code that follows a step. A collective at times."""
        self._position.code_pending = False
        self._do_deferred()

    def save(self, *, wait: bool) -> None:
        """Take a checkpoint of the last completed step, and wait for its commit if asked to. A collective."""
        if self._position.code_pending:
            self._save_deferred = wait or bool(self._save_deferred)
            return
        with self._lifecycle.guard():
            if not self._state.save(must_commit=wait) and wait:
                raise self._not_committed()

    def finish(self) -> None:
        """Commit the last checkpoint. A collective."""
        if self._lifecycle.discarded:
            self._lifecycle.end_discarded_step()
        if self._position.code_pending:
            self._position.end_epoch()  # the script has left the epoch's body
        self._state.settle()
        if self._state.tracked is None:
            return
        if not self._position.loaders:
            self._values.commit(self._state.steps)
        self._values.send(wait=True)
        if self._state.half_step:
            _LOG.warning("The optimizer has stepped after the last run.commit(); that step is not saved.")
        else:
            with self._lifecycle.guard(stay=False):
                if self._state.has_unsaved_progress() and not self._state.save(must_commit=True) and self._state.finite:
                    raise self._not_committed()
        self._state.finish()
        self._context.agent.finished(self._state.steps)

    def _not_committed(self) -> CheckpointError:
        if not self._state.finite:
            return CheckpointError(
                f"No checkpoint is taken of step {self._state.steps}: its weights are NaN or infinite."
            )
        return CheckpointError(
            f"The checkpoint of step {self._state.steps} was written but could not be committed: the run's table was "
            "not available. Started again, the script resumes from the checkpoint before it."
        )

    def _do_deferred(self) -> None:
        boundary, self._boundary_deferred = self._boundary_deferred, False
        wait, self._save_deferred = self._save_deferred, None
        if boundary:
            self._step_boundary()
        if wait is not None:
            self.save(wait=wait)

    def _step_boundary(self) -> None:
        with self._lifecycle.guard():
            action = self._context.agent.completed(self._state.steps, self._position.take_trained())
            if action in ("leave", "rejoin"):
                self._values.send(wait=True)
                self._lifecycle.leave_round(save=action == "leave")
                return
            self._state.after_step(save=action == "save")
