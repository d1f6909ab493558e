"""A loop of the script's own within a run.

A restarted script runs from its beginning, and goes through the steps that are trained once more without training, so
that its counters and sums are right; its iterations over the training data count the epochs. The state is restored by
the session when the first iteration begins. A script that continues from a folder of its own repeats the steps since
then. If it passes over the batches by hand that were trained when the folder was written, it is given the next batch as
often.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from azureml_elastic.train.data.loader import to_device
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.integrations.script_loop import state_folders
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.script_loop.progress import Progress
from azureml_elastic.train.integrations.script_loop.repeated_steps import LossHistory, RepeatedModels, own_loss
from azureml_elastic.train.integrations.script_loop.state_folders import Place
from azureml_elastic.train.integrations.stack_session import StackSession
from azureml_elastic.train.integrations.window_loader import WindowLoader

__all__ = ["ScriptLoop"]

_LOG = logging.getLogger(__name__)

_PROGRESS = "progress"
_LOSSES = "losses"

_ANNOUNCED_STEPS = 1000
"""Repeated steps of which the log tells."""


class ScriptLoop(ABC):
    """The integration's part in a loop.

    Args:
        session: session
        accumulation: batches of a rank in an optimizer step, by which the script counts
        batch_size: samples of a batch at the reference world size

    Attributes:
        repeats: whether the script repeats an epoch that is trained, without training
    """

    unstepped = "The optimizer has not stepped at the end of a global batch."
    """Warning for a loop that does not step where the stack expects it."""

    def __init__(self, session: StackSession, accumulation: int, batch_size: int) -> None:
        self._session = session
        session.loop = self
        self._accumulation = accumulation
        self._batch_size = batch_size
        self._windows: WindowLoader | None = None
        self._steps_per_epoch = 0
        self.repeats = False
        self._begun = False
        self._next_epoch = 0
        self._found: Mapping[str, Any] | None = None
        self._searched = False
        self._place: Place | None = None  # of the folder that the script has loaded
        self._reload: Callable[[], Any] | None = None
        self._behind = 0  # steps that are trained already, and that the script is about to count
        self._first_window = 0
        self._repeated: int | None = None  # batches of those that were yielded
        self._repeats_last_step = False  # of those that are trained
        self._repeated_models: RepeatedModels | None = None
        self._losses = LossHistory()
        self._own_loss: torch.Tensor | None = None  # that the model has returned for the current batch
        self._noted = False  # whether the loss of the current batch is in the history
        self._skippable = 0  # batches that the script may pass over
        self._used = False  # whether it has trained the current one
        self._micro: MicroBatch | None = None
        self._stepped = False
        self._completed = False
        self._warned: set[str] = set()

    @abstractmethod
    def _objects(self) -> Mapping[str, Any]:
        """Return the objects to track."""

    @abstractmethod
    def _models(self) -> list[nn.Module]:
        """Return the models as the script calls them."""

    @abstractmethod
    def _mark(self, *, last: bool) -> None:
        """Have the stack take the next micro-batch for the last one of a step, or not."""

    # --- data --------------------------------------------------------------------------------------------------------

    def _loader_of(self, source: Any, windows: WindowLoader) -> EpochLoader:
        """Return the loader in place of the script's."""
        self._windows = windows
        self._steps_per_epoch = len(windows) // windows.micro_batches
        return EpochLoader(source, self._steps_per_epoch * self._accumulation, self._epoch, self._expect)

    def _expect(self, epoch: int) -> None:
        self._next_epoch = max(self._next_epoch, epoch)

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of the script's next epoch that are not trained yet."""
        session, first = self._session, not self._begun
        if first:
            self._begin()
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        while session.epoch < epoch:
            if first:  # the script believes to be further than the state of the run
                yield from self._rest()
            session.end_epoch()
        if first and self._place is None:
            self._behind = max(0, session.steps - epoch * self._steps_per_epoch)
            if self._behind >= _ANNOUNCED_STEPS and session.is_main:
                _LOG.info("The script counts %d steps that are trained already.", self._behind)
        count = min(self._behind, self._steps_per_epoch - self._first_window)
        begin, self._behind, self._first_window = self._first_window, self._behind - count, 0
        if count:
            yield from self._repeat(epoch * self._steps_per_epoch + begin, count)
        self.repeats = session.epoch > epoch
        if not self.repeats:
            yield from self._rest()

    def _repeat(self, begin: int, count: int) -> Iterator[Any]:
        """Yield batches for steps that are trained already."""
        assert self._windows is not None
        session = self._session
        models = self._repeated_models = self._repeated_models or RepeatedModels(self._models())
        filler = to_device(self._windows.filler(), session.device)
        session.begin_repeated_steps()
        models.begin()
        try:
            for index in range(count * self._accumulation):
                self._repeated = index + 1
                self._repeats_last_step = not self._behind and index >= (count - 1) * self._accumulation
                models.set_loss(self._losses[begin * self._accumulation + index])
                self.synchronize()
                yield from self._offered(copy.copy(filler))  # scripts take keys out of batches
        finally:
            self._repeated = None
            models.end()
            session.end_repeated_steps()
            self._mark(last=True)

    def _rest(self) -> Iterator[Any]:
        """Yield the rest of the session's epoch."""
        assert self._windows is not None
        if self._session.epoch_ending:
            return
        try:
            for batch in self._windows:
                self._micro, self._completed = self._windows.untrained.popleft(), False
                self._own_loss, self._noted = None, False
                self.synchronize()
                try:
                    yield from self._offered(batch)
                except GeneratorExit:  # the script has left the loop
                    if self._stepped:
                        self._complete()
                    raise
                if self._micro.last:
                    self._complete()
        finally:
            self._micro = None
            self._mark(last=True)

    def _offered(self, batch: Any) -> Iterator[Any]:
        """Yield a batch, and once more for each that the script passes over."""
        while True:
            self._used = False
            yield batch
            if self._used or not self._skippable:
                return
            self._skippable -= 1

    def _begin(self) -> None:
        """Restore the state of the run."""
        self._begun = True
        assert self._windows is not None
        self._session.adopt(self._tracked())
        for model in self._models():
            model.register_forward_hook(self._note_output)
            if self._windows.largest > self._batch_size:
                divide_forward(model, self._batch_size)
        self._skippable = 0 if self._place is None else self._place.windows * self._accumulation
        if self._reload is None:
            self._behind = 0 if self._place is None else max(0, self._session.steps - self._place.steps)
            self._first_window = 0 if self._place is None else self._place.windows
            return
        place, load = self._place, self._reload
        if self._found is not None:
            load()  # the folder has more steps than the state that the session has restored
        if place is not None:
            self._session.begin_at(place.steps, place.epoch, place.windows)

    def _tracked(self) -> dict[str, Any]:
        return {**self._objects(), _PROGRESS: Progress(self._session), _LOSSES: self._losses}

    def _note_output(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._micro is not None and model.training and torch.is_grad_enabled():
            self._own_loss = own_loss(output)

    def _note_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of the current batch into account."""
        self._session.observe(loss)
        if not self._noted:
            self._noted = True
            self._losses.add(loss if self._own_loss is None else self._own_loss)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def repeating(self) -> bool:
        """Whether the current batch belongs to a step that is trained already."""
        return self._repeated is not None

    def synchronize(self) -> bool:
        """Tell the stack whether the current micro-batch completes a step; return whether there is one."""
        if self._repeated is not None:
            self._mark(last=self._repeated % self._accumulation == 0)
            return True
        if self._micro is None:
            return False
        self._mark(last=self._micro.last)
        return True

    def complete_step(self) -> None:
        """Count the step if the optimizer has stepped: what follows may fail because a peer is lost."""
        if self._stepped:
            self._complete()

    def _complete(self) -> None:
        if self._completed or self._micro is None:
            return
        if not self._stepped:
            self._warn(self.unstepped)
        self._completed, self._stepped = True, False
        self._losses.complete_step(self._accumulation)
        self._session.complete_step(changes_state=self._micro.window.ends_epoch)

    def _warn(self, text: str) -> None:
        if text not in self._warned and self._session.is_main:
            self._warned.add(text)
            _LOG.warning("%s", text)

    # --- folders -----------------------------------------------------------------------------------------------------

    @property
    def _here(self) -> Place:
        """The position in the data after the last step."""
        return Place(self._session.steps, *self._session.place)

    def _save(self, folder: Path, place: Place, write: Callable[[], Any], *, make: bool = False) -> Any:
        """Have a folder written with a position in the data, unless the state is that of a later step.

        The round may have ended between a step and the script's saving of it: the last repeated step is saved then.
        """
        saved = state_folders.read(folder)
        whole = saved is not None and saved.complete
        if (self.repeating and (whole or not self._repeats_last_step)) or (self.repeats and whole):
            return None
        return state_folders.save(folder, place, write, is_main=self._session.is_main, make=make)

    def _load(self, folder: Path | None, load: Callable[[], Any]) -> Any:
        """Have a folder loaded where it is further than the state of the run, and take over its position.

        Raises:
            ValueError: the folder is not complete, and further than the state of the run.
        """
        if self._begun:
            return load()
        if not self._searched:
            self._found, self._searched = self._session.find(_PROGRESS), True
        place = None if folder is None else state_folders.read(folder)
        self._place = place
        if place is not None:
            self._next_epoch = place.epoch
        if self._found is not None and (place is None or place.steps <= self._found["steps"]):
            return None
        if folder is not None and place is not None and not place.complete:
            aside = state_folders.set_aside(folder, is_main=self._session.is_main)
            raise ValueError(
                f"{folder} is not complete: the process that wrote it ended meanwhile. It is {aside} now, so that the "
                "script finds the folder before it when it starts again."
            )
        self._reload = load
        return load()
