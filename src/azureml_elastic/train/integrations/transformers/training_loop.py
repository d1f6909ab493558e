"""One call of ``Trainer.train`` within a run.

The trainer counts its position in an epoch by the number of its steps. So it gets a loader with the same number of
windows at any world size, and a ``trainer_state.json`` with the step at which the run continues; weights, optimizer,
scheduler and random generators are restored by the session.

Subclasses override what they like, and may call nothing of ``Trainer``. So the methods here take the place of those
that the trainer itself calls, not of those of its base class.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from azureml_elastic.errors import UsageError
from azureml_elastic.train.integrations import sources
from azureml_elastic.train.integrations.accelerate import training_data
from azureml_elastic.train.integrations.transformers.progress import (
    IGNORED_LABEL,
    LabelCount,
    Progress,
    Stage,
    count_labels,
)
from azureml_elastic.train.integrations.transformers.training_data import DATA_METHODS, TrainingData
from azureml_elastic.train.integrations.wrapping import Wrapped, first_of, replaced
from azureml_elastic.train.session.stack_session import StackSession

_LOG = logging.getLogger(__name__)

_LOOP = "_inner_training_loop"
_PROGRESS = "trainer"
_STATE_FOLDER = "trainer-state-"

_EVENTS = ("on_train_begin", "on_epoch_begin", "on_optimizer_step", "on_step_end", "on_epoch_end", "on_log")
"""Methods of the handler that calls all callbacks. A callback could not be the first one and the last one, and the
trainer appends those whose state it restores."""

METHODS = {
    **{
        name: name.lstrip("_")
        for name in (
            "training_step",
            "set_initial_training_values",
            "_get_num_items_in_batch",
            "_maybe_log_save_evaluate",
            "_determine_best_metric",
        )
    },
    **dict.fromkeys(
        ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"), "load"
    ),
}
"""Methods of a trainer, and those of :class:`TrainingLoop` in their place."""


def obstacle(session: StackSession, trainer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call of ``Trainer.train`` is left to the stack alone, and log it; ``None`` if it is not.

    Raises:
        UsageError: the stack does not work with the ranks of the run.
    """
    arguments = trainer.args
    trial = args[1] if len(args) > 1 else kwargs.get("trial")
    reasons: dict[str | None, bool] = {
        "another training of this process has used the session": session.trains,
        training_data.obstacle(trainer.accelerator): True,
        "transformers has sharded the model when it was loaded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "auto_find_batch_size changes the batch size": arguments.auto_find_batch_size,
        "a process has several GPUs": arguments.n_gpu > 1,
        "a search of hyperparameters trains several times": trial is not None,
        f"{sources.calls_its_own(trainer, _LOOP)} has a training loop of its own": (
            sources.calls_its_own(trainer, _LOOP) is not None
        ),
    }
    if arguments.world_size != session.world_size:
        raise UsageError(
            f"The run has {session.world_size} ranks, but transformers works with {arguments.world_size}, so that each "
            "would train a model of its own. Make the TrainingArguments in the script that the workers run, or set "
            "AZUREML_ELASTIC_INTEGRATIONS=off."
        )
    reason = first_of(reasons)
    if reason is not None and session.is_main:
        _LOG.warning("Trainer.train() does not use the elastic session: %s.", reason)
    return reason


class TrainingLoop:
    """The integration's part in a training.

    The methods that take ``wrapped`` are called in place of the trainer's, and those of :data:`_EVENTS` in place of its
    calls of all callbacks with an event.
    """

    def __init__(self, session: StackSession, trainer: Any) -> None:
        self._session = session
        self._trainer = trainer
        self._data = TrainingData(session, trainer)
        self._progress = Progress(trainer, self._data)
        self._stage_after = Stage.DONE
        self._epochs: int | None = None
        self._steps_of_epoch = 1
        self._carried = 0.0
        self._log_due = self._in_after_step = self._continuing = self._over = False
        self._ignored_keys: Any = None
        self._labels: Any = None
        self._counts: deque[torch.Tensor] = deque()
        self._last_factor: float | torch.Tensor = 1.0
        self._step_loss = torch.tensor(0.0)
        self._folder = ""  # that stands for the state of the run, if it has one
        self._skipped: set[str] = set()  # events that are not for the callbacks when they come next

    def train(self, wrapped: Wrapped, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the state of the run, if it has one."""
        trainer, arguments = self._trainer, self._trainer.args
        self._ignored_keys = args[1] if len(args) > 1 else kwargs.get("ignore_keys_for_eval")
        found = self._session.find(_PROGRESS)
        before = {
            "gradient_accumulation_steps": self._data.accumulation,
            "restore_callback_states_from_checkpoint": arguments.restore_callback_states_from_checkpoint,
            "average_tokens_across_devices": arguments.average_tokens_across_devices,
            "eval_on_start": arguments.eval_on_start,
        }
        # A loss that is a sum over labels is divided by those of all ranks' micro-batches, so that it does not depend
        # on how the samples of the step are divided.
        arguments.average_tokens_across_devices = arguments.world_size > 1
        _remove_checkpoints_on_signals(trainer)
        evaluates = sources.calls_its_own(trainer, "evaluation_loop")
        if evaluates is not None and arguments.do_eval and self._session.is_main:
            _LOG.warning(
                "%s.evaluation_loop() does not call that of Trainer: its results may depend on the number of nodes.",
                evaluates,
            )
        # Trainer.training_step calls the accelerator after a subclass's compute_loss and its own division.
        gradients: dict[str, Wrapped] = {"backward": self._backward, "clip_grad_norm_": self._recorded_clip}
        events = {event: getattr(self, event) for event in _EVENTS}
        methods = {name: getattr(self, own) for name, own in METHODS.items()}
        methods |= {name: getattr(self._data, own) for name, own in DATA_METHODS.items()}
        try:
            with (
                replaced(trainer, methods),
                replaced(trainer.accelerator, gradients),
                replaced(trainer.callback_handler, events),
                # Where this process is killed, its node removes the folder.
                tempfile.TemporaryDirectory(prefix=_STATE_FOLDER, dir=self._session.folder) as folder,
            ):
                if found:
                    self._folder = folder
                    arguments.restore_callback_states_from_checkpoint = True
                    arguments.eval_on_start = False  # it was run when the training began
                    # A checkpoint of this file alone: the trainer takes its position from it, and `load` the rest.
                    text = json.dumps(found["state"])
                    Path(folder, "trainer_state.json").write_text(text, encoding="utf-8")
                    resume_from_checkpoint = folder
                result = wrapped(resume_from_checkpoint, *args, **kwargs)
            # What the script does with its model from here on, to export it for example, is not the run's state.
            self._session.save_last()
            return result
        finally:
            for name, value in before.items():
                setattr(arguments, name, value)

    @staticmethod
    def restores(checkpoint: Any) -> bool:
        """Return whether a checkpoint folder stands for what the session restores."""
        return Path(str(checkpoint)).name.startswith(_STATE_FOLDER)

    def get_num_items_in_batch(self, wrapped: Wrapped, batches: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Count the labels of all ranks' micro-batches, without those that have no samples of their own."""
        if self._data.loader is None or not self._data.loader.untrained:  # a batch of an evaluation
            return wrapped(batches, *args, **kwargs)
        micros = self._data.loader.untrained  # of one step: get_batch_samples() fetches all before any is trained
        batches = [
            batch if micro.samples else _without_labels(batch) for batch, micro in zip(batches, micros, strict=True)
        ]
        self._labels = wrapped(batches, *args, **kwargs)
        if isinstance(self._labels, torch.Tensor) and not self._trainer.args.torch_compile:
            self._counts = deque(count_labels(self._trainer, batch) for batch in batches)
            self._labels = LabelCount.of(self._labels)
        return self._labels

    def training_step(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Train a micro-batch, and return its loss, (), so that the mean over the ranks is the mean over the samples.

        The losses of a step add up to that mean on each rank: a rank that is lost leaves nothing that others lack.
        """
        self._last_factor = 1.0  # of a subclass that does not call accelerator.backward
        loss = wrapped(*args, **kwargs)
        if self._data.loader is not None:
            loss = loss * self._last_factor
            self._data.loader.untrained.popleft()
            if self._counts:
                self._counts.popleft()
        if self._data.left is not None:
            self._data.left.count()
        self._step_loss = self._step_loss.to(loss.device) + loss
        if self._trainer.accelerator.sync_gradients:
            mean = self._session.mean(self._step_loss)
            loss = loss + (mean - self._step_loss)
            self._step_loss = torch.zeros_like(loss)
            self._add_loss(mean)
        return loss

    def _add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a step, (), to those that are not logged, as the trainer does."""
        progress, trainer = self._progress, self._trainer
        if trainer.args.logging_nan_inf_filter:
            steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged  # noqa: SLF001
            loss = torch.where(torch.isfinite(loss), loss, torch.as_tensor(progress.unlogged / steps).to(loss))
        progress.unlogged = progress.unlogged + loss

    def _recorded_clip(self, clip: Wrapped, *args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        if isinstance(norm, DTensor):  # some releases of torch add up its parts, with all ranks, once it is read
            norm = norm.full_tensor()
        self._progress.line["grad_norm"] = norm
        return norm

    def _factor(self) -> float | torch.Tensor:
        assert self._data.loader is not None
        trainer, micro = self._trainer, self._data.loader.untrained[0]
        # As Trainer.training_step decides whether it divides the loss by the number of micro-batches.
        own = getattr(trainer, "loss_is_scaled_for_ga", None)
        by_labels = trainer.model_accepts_loss_kwargs and self._labels is not None
        if own if own is not None else (by_labels or trainer.compute_loss_func is not None):
            if isinstance(self._labels, LabelCount) and not self._labels.used[0]:
                # The trainer has multiplied a mean over the micro-batch by the number of ranks.
                labels = self._labels.as_subclass(torch.Tensor)
                return self._counts[0].to(labels.device) / labels.clamp(min=1)
            return 1.0 if micro.samples else 0.0  # a sum, divided by the labels of all ranks
        return micro.weight * int(trainer.current_gradient_accumulation_steps)  # by which the trainer has divided

    def _backward(self, backward: Wrapped, loss: torch.Tensor, **kwargs: Any) -> Any:
        self._session.observe(loss)
        if self._data.loader is not None:
            self._last_factor = self._factor()
        return backward(loss * self._last_factor, **kwargs)

    def load(self, wrapped: Wrapped, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a part of a checkpoint of the trainer's own; the session restores what the run continues from."""
        return None if checkpoint == self._folder else wrapped(checkpoint, *args, **kwargs)

    def set_initial_training_values(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Return no further epochs where the training is complete, and so is what follows its last epoch.

        The trainer begins with the epoch of its number of steps, which is one that the training's end has cut short.
        """
        values = wrapped(*args, **kwargs)  # epochs, steps of an epoch, ..., steps of the training
        found = self._session.find(_PROGRESS) if self._folder else None
        self._steps_of_epoch = values[1]
        values = self._data.full_values(values, found)
        if found and Stage(found["stage"]) in (Stage.EPOCH_CALLBACKS, Stage.EPOCH):
            self._epochs, steps = values[0], found["state"]["global_step"]
            if steps >= values[-1] or found["flags"]["should_training_stop"]:
                return (min(values[0], steps // values[1]), *values[1:])
        return values

    def on_train_begin(self, wrapped: Wrapped, args: Any, state: Any, control: Any) -> Any:
        """Restore the state of the run, and do what followed its last step and was interrupted."""
        trainer, session, progress = self._trainer, self._session, self._progress
        trainer.control = wrapped(args, state, control)
        objects = {"model": trainer.model_wrapped, "optimizer": trainer.optimizer, _PROGRESS: progress}
        if trainer.lr_scheduler is not None:
            objects["scheduler"] = trainer.lr_scheduler
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        # Here model, optimizer and scheduler are wrapped, and the sums are set that the former process's replace below;
        # the trainer's next call begins an epoch. adopt() captures a state, and restores the run's if it has one.
        progress.capture(Stage.DONE)
        session.adopt(objects)
        session.expects(state.max_steps)
        restored = progress.restored
        if restored is not None:
            trainer._total_loss_scalar = restored["loss"]  # noqa: SLF001 - see Progress
            trainer._initial_global_step = 0  # noqa: SLF001 - of the whole training, in transformers 5
            trainer._globalstep_last_logged = restored["last_logged"]  # noqa: SLF001
            self._carried = restored["unlogged"]
            if self._epochs is not None:
                state.num_train_epochs = self._epochs
            left = self._data.left
            if left is not None and restored["left"]:
                left.begin_at(*restored["left"])
            self._continue(restored)
            ended = state.global_step >= state.max_steps or trainer.control.should_training_stop
            self._over = ended and progress.stage is Stage.EPOCH
            if self._over:
                self._skipped |= {"on_epoch_begin", "on_epoch_end"}
            elif session.place[1] if left is None else left.trained:
                self._skipped.add("on_epoch_begin")  # the former process has begun the epoch
            if ended:
                trainer._total_loss_scalar += self._carried  # noqa: SLF001 - no further step adds it
                self._carried = 0.0
        elif state.global_step:  # the script has resumed from a checkpoint of another run
            self._begin_at(state.global_step)
        loader = self._data.left if self._data.loader is None else self._data.loader
        assert loader is not None
        loader.closed = state.global_step >= state.max_steps or trainer.control.should_training_stop
        return trainer.control

    def _begin_at(self, steps: int) -> None:
        left, epoch, windows = self._data.left, *divmod(steps, self._steps_of_epoch)
        if left is None:
            self._session.begin_at(steps, epoch, windows)
        else:
            left.begin_at(epoch, windows * left.accumulation * self._session.world_size)

    @property
    def _epoch_ending(self) -> bool:
        left = self._data.left
        return self._session.epoch_ending if left is None else left.ended

    def _continue(self, restored: dict[str, Any]) -> None:
        """Do what belongs to the last step of the former process, as far as that has not done it."""
        trainer, session, progress = self._trainer, self._session, self._progress
        handler, args, state = trainer.callback_handler, trainer.args, trainer.state
        stage, progress.line = progress.stage, dict(restored["line"])
        pending = stage in (Stage.STEP, Stage.CALLBACKS, Stage.EPOCH_CALLBACKS)
        if pending:
            session.advance_pending(changes_state=True)
            for name, value in restored["flags"].items():  # what the step has requested, and has not had
                setattr(trainer.control, name, value)
            self._stage_after = Stage.EPOCH if stage is Stage.EPOCH_CALLBACKS else Stage.DONE
            if stage is Stage.STEP:
                self._continuing = True
                trainer.control = handler.on_step_end(args, state, trainer.control)
                self._continuing = False
            self._after_step()
        if stage is not Stage.EPOCH_CALLBACKS and self._epoch_ending:
            if stage is not Stage.EPOCH:
                trainer.control = handler.on_epoch_end(args, state, trainer.control)
                self._after_step()
            else:
                self._end_epoch()
        trainer.control.should_training_stop |= restored["flags"]["should_training_stop"]

    def on_epoch_begin(self, wrapped: Wrapped, args: Any, state: Any, control: Any) -> Any:
        """Begin an epoch, once in the run."""
        return control if self._skips("on_epoch_begin") else wrapped(args, state, control)

    def _skips(self, event: str) -> bool:
        skips = event in self._skipped
        self._skipped.discard(event)  # it is left out once
        return skips

    def on_optimizer_step(self, wrapped: Wrapped, args: Any, state: Any, control: Any) -> Any:
        """Note the learning rate of the step, before the scheduler's."""
        control = wrapped(args, state, control)
        self._progress.line["learning_rate"] = self._trainer._get_learning_rate()  # noqa: SLF001
        return control

    def on_step_end(self, wrapped: Wrapped, args: Any, state: Any, control: Any) -> Any:
        """Complete a step before the callbacks, which may lose a peer; then note that they have run on all ranks."""
        if not self._continuing:
            self._progress.capture(Stage.STEP)
            self._session.complete_step(changes_state=False)
        return self._advance(Stage.CALLBACKS, wrapped(args, state, control))

    def on_epoch_end(self, wrapped: Wrapped, args: Any, state: Any, control: Any) -> Any:
        """Note that the code which follows belongs to the epoch."""
        if self._skips("on_epoch_end"):
            return control
        control = wrapped(args, state, control)
        self._stage_after = Stage.EPOCH
        return self._advance(Stage.EPOCH_CALLBACKS, control)

    def on_log(self, wrapped: Wrapped, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        """Note that the step is logged; evaluations and scripts log by the same event."""
        control = wrapped(args, state, control, logs, **kwargs)
        if self._log_due:
            self._log_due, self._progress.unlogged = False, 0.0
            self._advance(self._progress.stage, control)
        return control

    def determine_best_metric(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Note that an evaluation is complete, and so are the steps of a scheduler that follows its results."""
        result, control = wrapped(*args, **kwargs), self._trainer.control
        if self._in_after_step:
            if getattr(self._trainer.args.save_strategy, "value", "") == "best":
                # As the trainer does once this has returned: it has to be in the state that is captured now.
                control.should_save = result
            self._advance(self._progress.stage, control)
        return result

    def _advance(self, stage: Stage, control: Any) -> Any:
        """Note that all ranks have got as far as a stage, or within it as the trainer's state and control say."""
        self._trainer.control = control  # a callback may have made another one
        # Most callbacks do something on rank 0 alone. Were another rank to go on before, and rank 0 lost within them,
        # the next process would leave out the rest.
        self._session.all_have_arrived()
        self._progress.capture(stage)
        self._session.advance_pending(changes_state=bool(control.should_evaluate or control.should_save))
        return control

    def maybe_log_save_evaluate(self, wrapped: Wrapped, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Log, evaluate and save if the step or epoch is due to, then end it."""
        if self._over:  # what a former process has begun was the end of the training, before the trainer knew it
            return None
        trainer, session = self._trainer, self._session
        tr_loss += self._carried  # in place: it is the tensor in which the trainer adds up the losses
        self._carried = 0.0
        unlogged = trainer.state.global_step > trainer._globalstep_last_logged  # noqa: SLF001
        self._log_due, self._in_after_step = trainer.control.should_log and unlogged, True
        try:
            result = wrapped(tr_loss, *args, **kwargs)
        finally:
            self._in_after_step = False
        stage, self._stage_after = self._stage_after, Stage.DONE
        if stage is Stage.EPOCH:
            session.all_have_arrived()
            self._progress.capture(stage)
            self._end_epoch()
        elif self._epoch_ending:
            self._advance(stage, trainer.control)  # the epoch's end follows, which is not another step
        else:
            self._progress.capture(stage)
            session.end_step()
        return result

    def _end_epoch(self) -> None:
        if self._data.left is not None:
            self._data.left.end_epoch()
        self._session.end_epoch()

    def _after_step(self) -> None:
        trainer, line = self._trainer, self._progress.line
        loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._maybe_log_save_evaluate(  # noqa: SLF001
            loss,
            line.get("grad_norm"),
            trainer.model_wrapped,
            None,
            trainer.state.epoch,
            self._ignored_keys,
            time.time(),
            learning_rate=line.get("learning_rate"),
        )
        self._carried = float(loss)  # what is not logged is added to the losses of the steps that follow


def _without_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        return batch
    names = [name for name in ("labels", "shift_labels") if name in batch]
    return {**batch, **{name: torch.full_like(batch[name], IGNORED_LABEL) for name in names}}


def _remove_checkpoints_on_signals(trainer: Any) -> None:
    """Remove the callback that saves on SIGTERM on each rank's own timer: the ranks would diverge."""
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "JITCheckpointCallback":
            trainer.remove_callback(callback)
            _LOG.info("enable_jit_checkpoint is not used: notices of preemption reach all ranks at a step boundary.")
