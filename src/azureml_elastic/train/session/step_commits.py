"""What follows a completed step: the agreement with the agent on what is due, checkpoints, and the end of an epoch.

A restart point never lies between an epoch's last step and the end of the epoch's body in ``run.epochs()``: the code in
between (an evaluation, a scheduler's step) runs once for each epoch. What would follow the last step of an epoch is
therefore deferred until the body has ended.
"""

from __future__ import annotations

import contextlib
import logging

from azureml_elastic.errors import CheckpointError, RoundBroken
from azureml_elastic.ipc.agent_interface import Action, Agent
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.profiling import Profiling
from azureml_elastic.train.session.training_state import TrainingState

__all__ = ["StepCommits"]

_LOG = logging.getLogger(__name__)


class StepCommits:
    """Step boundaries and checkpoints of a session.

    Args:
        lifecycle: process group of this process
        state: state of the run
        agent: agent that started the process
        audit: audit of the samples, if any
        profiling: profiler, if any
    """

    def __init__(
        self,
        lifecycle: ProcessGroupLifecycle,
        state: TrainingState,
        agent: Agent,
        audit: Audit | None,
        profiling: Profiling | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._state = state
        self._agent = agent
        self._audit = audit
        self._profiling = profiling
        self._boundary_deferred = False
        self._save_deferred: bool | None = None
        """Whether the deferred ``run.save()`` waits for the commit; ``None`` without one."""
        self._position.when_continued = self._continue_epoch
        self._position.when_repeated = lifecycle.discard_step

    @property
    def _position(self) -> Position:
        return self._lifecycle.position

    def completed(self) -> None:
        """Follow up on a step whose samples are counted. A collective after some steps."""
        if self._lifecycle.discarded:
            self._lifecycle.end_discarded_step()
        else:
            self._state.steps += 1
            self._state.half_step = False
            if self._audit is not None:
                self._audit.done(self._state.steps)
            if self._position.epoch_ending:
                self._boundary_deferred = True
                self._lifecycle.begin_epoch_end()
            else:
                self._step_boundary()
        self._profile()

    def end_epoch(self) -> None:
        """Advance to the next epoch, and do what was deferred until then. A collective after some epochs."""
        self._position.end_epoch()
        self._do_deferred()

    def save(self, *, wait: bool) -> None:
        """Take a checkpoint of the last completed step. A collective.

        Args:
            wait: whether to return only when it is committed

        Raises:
            CheckpointError: it could not be written, or not committed although that was waited for.
        """
        if self._position.epoch_ending:
            self._save_deferred = wait or bool(self._save_deferred)
            return
        with self._lifecycle.guard():
            if not self._state.save(must_commit=wait) and wait:
                raise self._not_committed()

    def finish(self) -> None:
        """Commit the last checkpoint. A collective.

        Raises:
            CheckpointError: it could not be committed.
        """
        if self._lifecycle.discarded:
            self._lifecycle.end_discarded_step()
        if self._position.epoch_ending:
            self._position.end_epoch()  # the script has left the epoch's body
        self._state.settle()
        if self._state.state is None:
            return
        if self._state.half_step:
            _LOG.warning("The optimizer has stepped after the last run.commit(); that step is not saved.")
        else:
            with self._lifecycle.guard(stay=False):
                if self._state.has_unsaved_progress() and not self._state.save(must_commit=True):
                    raise self._not_committed()
        self._agent.finished(self._state.steps)

    def _not_committed(self) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint of step {self._state.steps} was written but could not be committed: the run's table was "
            "not available. Started again, the script resumes from the checkpoint before it."
        )

    def _continue_epoch(self) -> None:
        self._position.epoch_ending = False
        self._do_deferred()

    def _do_deferred(self) -> None:
        boundary, self._boundary_deferred = self._boundary_deferred, False
        wait, self._save_deferred = self._save_deferred, None
        if boundary:
            self._step_boundary()
        if wait is not None:
            self.save(wait=wait)

    def _step_boundary(self) -> None:
        with self._lifecycle.guard():
            self._act(self._agent.completed(self._state.steps))

    def _act(self, action: Action | None) -> None:
        handed_over = action == "rejoin" and self._lifecycle.hand_over()
        if action in ("leave", "rejoin"):
            if not handed_over:
                with contextlib.suppress(RoundBroken):  # the state is handed over, and saved first by the next worker
                    self._state.save(must_commit=True)
            self._lifecycle.give_up(handed_over=handed_over)
            return
        self._state.after_step()
        if self._state.due() or action == "save":
            self._state.save()
        else:
            self._state.take_snapshot()

    def _profile(self) -> None:
        if self._profiling is not None:
            self._profiling.after_step(self._lifecycle.world.identity, self._state.steps)
