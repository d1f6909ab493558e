"""A loop of the script's own within a run.

A restarted script runs from its beginning, and goes through the steps that are trained once more without training, so
that its counters and sums are right. Each of its *passes*, iterations over the training data, is an epoch if the script
trains the first batch, and moves nothing otherwise. The state is restored by the session in the first forward pass with
gradients: until then the script may look at its data, and prepare further objects. A script that continues from a
folder of its own repeats the steps since then. If it passes over the batches by hand that were trained when the folder
was written, it is given the next batch as often.
"""

from __future__ import annotations

import copy
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from azureml_elastic.train.data.loader import to_device
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.data.sampling import Cursor
from azureml_elastic.train.integrations.script_loop import direct_collectives, state_folders
from azureml_elastic.train.integrations.script_loop.batch_layout import PROBED, BatchLayout
from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch
from azureml_elastic.train.integrations.script_loop.collective_results import CollectiveResults
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.script_loop.kept_files import keep_files
from azureml_elastic.train.integrations.script_loop.own_schedulers import pause_schedulers
from azureml_elastic.train.integrations.script_loop.repeated_steps import (
    FirstForward,
    Progress,
    RepeatedModels,
    RepetitionLog,
    StepHistory,
    own_loss,
)
from azureml_elastic.train.integrations.script_loop.state_folders import Place
from azureml_elastic.train.integrations.script_loop.step_updates import StepUpdates
from azureml_elastic.train.session.stack_session import StackSession

_LOG = logging.getLogger(__name__)

_PROGRESS = "progress"
_HISTORY = "history"
_RESULTS = "results"


@dataclass
class _Pass:
    """A pass of the script over its training data.

    Args:
        epoch: epoch of its batches, if it trains
        window: first step of the epoch that the script counts in it
        behind: steps that it counts and that are trained already
        yielded: batches that the script has taken before those that it trains for the first time
    """

    epoch: int
    window: int = 0
    behind: int = 0
    trains: bool = False
    yielded: int = 0


class _Superseded(Exception):
    """The script continues with a pass after it has begun another; its rest is behind this position."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor


class ScriptLoop(ABC):
    """The integration's part in a loop.

    Args:
        accumulation: batches of a rank in an optimizer step, by which the script counts
        batch_size: samples of a batch at the reference world size

    Attributes:
        repeats: whether the script repeats an epoch that is trained, without training
    """

    unstepped = "The optimizer has not stepped at the end of a global batch."
    """Warning for a loop that does not step where the stack expects it."""

    def __init__(self, session: StackSession, accumulation: int, batch_size: int) -> None:
        self._session = session
        session.drive(self.complete_step)
        self._accumulation = accumulation
        self._batch_size = batch_size
        self._current = CurrentBatch(batch_size, session.device)
        self._windows: WindowLoader | None = None
        self._steps_per_epoch = 0
        self.repeats = False
        self._begun = False
        self._first_forward: FirstForward | None = None
        self._opened: Iterator[Any] | None = None  # iteration over the training data whose first batch is in use
        self._pass: _Pass | None = None
        self._has_trained = False  # whether the script has trained a batch, or repeated that
        self._training_mode: bool | None = None  # whether its models were in training mode then
        self._next_epoch = 0
        self._place: Place | None = None  # of the folder that the script has loaded
        self._reload: Callable[[], Any] | None = None
        self._first_window = 0
        self._repeated: int | None = None  # batches of those that were yielded
        self._repeated_models: RepeatedModels | None = None
        self._fillers: dict[int, Any] = {}  # batches of repeated steps, by their number of samples
        self._repetition = RepetitionLog() if session.is_main else None
        self._history = StepHistory(accumulation)
        self._results = CollectiveResults()
        self._calls = 0  # of the script in the current batch that wait for other ranks
        self._in_call = False  # whether what is called are parts of a call of the stack's
        self._finishing = False  # whether the script does for a repeated step what the former process has not done
        self._own_loss: torch.Tensor | None = None  # that the model has returned for the current batch
        self._noted = False  # whether the loss of the current batch is in the history
        self._skippable = 0  # batches that the script may pass over
        self._used = False  # whether it has trained the current one
        self._micro: MicroBatch | None = None
        self._stepped = False
        self._repeated_update = False  # whether the script has come to the update of a repeated step
        self._updates = StepUpdates()
        self._completed = False
        self._warned: set[str] = set()

    @abstractmethod
    def _objects(self) -> Mapping[str, Any]:
        """Return the objects to track."""

    @abstractmethod
    def _models(self) -> list[nn.Module]:
        """Return the models as the script calls them."""

    @abstractmethod
    def _own_schedulers(self) -> list[Any]:
        """Return the schedulers that the script steps by itself."""

    @abstractmethod
    def _plain_batches(self) -> Iterator[Any]:
        """Yield the batches of a pass that trains nothing, as the stack divides them among the ranks."""

    @abstractmethod
    def _mark(self, *, last: bool) -> None:
        """Have the stack take the next micro-batch for the last one of a step, or not."""

    # --- data --------------------------------------------------------------------------------------------------------

    def _loader_of(self, own: Callable[[], Any], windows: WindowLoader) -> EpochLoader:
        """Return the loader in place of the stack's own, which a function returns."""
        self._windows = windows
        self._steps_per_epoch = len(windows) // windows.micro_batches
        return EpochLoader(own, self)

    @property
    def has_drawn_order(self) -> bool:
        """Whether a sampler of the script's own draws the order of the samples."""
        return self._windows is not None and self._windows.is_drawn

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch at the reference world size."""
        return self._steps_per_epoch * self._accumulation

    @property
    def epoch(self) -> int:
        """Epoch of the current pass, or of the next one."""
        return self._next_epoch if self._pass is None else self._pass.epoch

    @property
    def at_last_batch(self) -> bool:
        """Whether the current batch is the last one of its epoch, or a pass has ended with it."""
        current = self._pass
        if current is None:
            return self._has_trained
        if self._repeated is not None:
            return current.window * self._accumulation + self._repeated == self.batches_per_epoch
        return self._micro is not None and self._micro.last and self._micro.window.ends_epoch

    def expect(self, epoch: int) -> None:
        """Take the epoch of the next pass, where the script says so."""
        self._next_epoch = max(self._next_epoch, epoch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of a pass over the training data.

        That a pass trains shows when the script trains its first batch. It then has the batches of the next epoch,
        after those that are trained already. A pass of another kind, such as one for statistics, moves nothing.
        """
        if not self._may_train():
            yield from self._plain_batches()
            return
        self._leave_pass()
        assert self._windows is not None
        if self._has_larger_batches and self._windows.collated.layout is None:
            self._learn_layout()
        current = self._pass = _Pass(self._next_epoch)
        try:
            if self._begun:
                self._enter(current)
            else:
                yield from self._before_training(current)
            if self._begun:
                yield from self._repeat(current)
                yield from self._earlier_epochs(current)
                if not self.repeats and (current.trains or not current.behind):
                    yield from self._rest(current)
        except _Superseded as superseded:
            self._warn("The script goes on with an iteration over its training data after it has begun another. The "
                       "older one has the rest of its batches, but training them is not counted.")  # fmt: skip
            yield from (batch for _, batch in self._windows.batches_from(superseded.cursor))
        finally:
            # An error of the script closes this generator before anybody knows of the error. A step in which only some
            # of the models are updated must not be counted then, and so not be handed over. A script that has left
            # the pass by itself has the step counted at its next pass, or at its end.
            if self._pass is current and not self._updates.missing:
                self._leave_pass()

    def _may_train(self) -> bool:
        """Return whether the pass that begins may be one that trains."""
        models = self._models()
        return (
            torch.is_grad_enabled()
            and bool(models)
            and self._training_mode in (None, any(model.training for model in models))
        )

    def _leave_pass(self) -> None:
        """End a pass, also one that the script has left and still holds when it begins another."""
        current, self._pass = self._pass, None
        if current is None:
            return
        assert self._windows is not None
        if self._repeated is not None:
            self._end_repeating(arrived=self._is_newest(current))
        self.complete_step()
        broken = self._micro is not None and not self._completed  # in a step, by a collective that has failed
        self._micro = self._opened = None
        self._finishing = False
        self._windows.end_pass(trained=current.trains)
        if self._is_newest(current) and not broken:
            self._session.begin_epoch_end()
        self._mark(last=True)  # what the script trains between passes is not accumulated

    def _before_training(self, current: _Pass) -> Iterator[Any]:
        """Yield batches of the next epoch until a model computes one with gradients.

        The state is restored then, and not before: a script may look at its data first, and prepare a scheduler later.
        """
        assert self._windows is not None
        if self._first_forward is None:
            self._first_forward = FirstForward(self._begin_within)
        for model in self._models():
            if self._first_forward.watch(model):
                model.register_forward_hook(self._note_output)
        if self._first_window >= self._steps_per_epoch:  # the script's folder was written at the end of the epoch
            self._next_epoch, self._first_window = current.epoch + 1, 0
            return
        cursor = self._windows.cursor_at(current.epoch, self._first_window)
        for micro, batch in self._windows.batches_from(cursor):
            current.yielded += 1
            self._mark(last=micro.last)
            self._current.take(batch, micro)
            yield from self._offered(current, batch, micro.window.after)
            if self._begun:
                return

    def _begin_within(self) -> None:
        """Begin to train in the first forward pass, with the batch that it computes."""
        self._begin()
        current, windows = self._pass, self._windows
        assert windows is not None
        if current is None:
            return  # it is not one of these batches
        self._enter(current)
        if current.behind or self._session.epoch != current.epoch:
            self._begin_repeating(current)
            self._set_repeated(current)
            return
        self._opened = iter(windows)
        passed = False
        for _ in range(current.yielded):
            if passed:
                windows.pass_over()
            next(self._opened)  # it is the same as the one that the script has
            passed = self._take_batch().last

    def _enter(self, current: _Pass) -> None:
        """Take the position of a pass that may train."""
        session = self._session
        # A script that has trained leaves an epoch whenever it begins the next. One that has not yet, after a restart,
        # may believe to be further than the state: then the rest of the earlier epochs comes first.
        while session.epoch < current.epoch and (self._has_trained or session.epoch_ending):
            session.end_epoch()
        # Before its steps are repeated: what the last one of them is still to do is not left out.
        self.repeats = session.epoch > current.epoch
        self._history.entered = max(self._history.entered, current.epoch)
        current.window = self._first_window
        current.behind = max(0, self._history.steps(current.epoch) - current.window)

    def _is_newest(self, current: _Pass) -> bool:
        """Return whether the former process has begun no later pass, nor run the code at the end of this one's epoch.

        Where it has finished the training, it has, and the position is behind the pass: but no other pass follows.
        """
        return current.trains and (not self.repeats or self._history.entered == current.epoch)

    def _earlier_epochs(self, current: _Pass) -> Iterator[Any]:
        """Yield what is left of earlier epochs, where the script believes to be further than the state of the run."""
        while self._session.epoch < current.epoch:
            yield from self._rest(current)
            if not current.trains:
                return
            self._session.end_epoch()

    def _repeat(self, current: _Pass) -> Iterator[Any]:
        """Yield batches for steps that are trained already: real ones until it is clear that the script trains them."""
        assert self._windows is not None
        if self._repeated is None:
            if not current.behind:
                return
            self._begin_repeating(current)
        assert self._repeated_models is not None
        cursor = self._windows.cursor_at(current.epoch, current.window)
        # A script that only looks at its data gets the batches that are there. Once it trains, their content is of no
        # use any more, and the same few samples spare it the loading of an epoch.
        real = itertools.islice(self._windows.batches_from(cursor), current.yielded, None)
        for micro, batch in () if current.trains else real:
            current.yielded += 1
            self._set_repeated(current)
            yield from self._offered(current, batch, micro.window.after)
            if current.trains:
                break
        if current.trains:
            self._repeated_models.certain = True
            if self._repetition is not None and current.window + current.behind < self._steps_per_epoch:
                self._repetition.warn_of_outputs(current.window + current.behind)
            while current.yielded < current.behind * self._accumulation:
                window, micro_batch = divmod(current.yielded, self._accumulation)
                filler = self._filler(self._windows.sizes(current.epoch, current.window + window)[micro_batch])
                current.yielded += 1
                self._set_repeated(current)
                # scripts take keys out of batches
                yield from self._offered(current, copy.copy(filler), cursor)
            self._fillers.clear()
        self._end_repeating(arrived=self._is_newest(current))

    def _filler(self, samples: int) -> Any:
        """Return a batch of as many samples as the script would have now: what all ranks count is each sample once."""
        if samples not in self._fillers:
            assert self._windows is not None
            self._fillers[samples] = to_device(self._windows.filler(samples), self._session.device)
        return self._fillers[samples]

    def _begin_repeating(self, current: _Pass) -> None:
        if self._repetition is not None:
            self._repetition.begin(self._history.steps_from(current.epoch) - current.window)
        keep_files(self._is_past)
        self._repeated_models = self._repeated_models or RepeatedModels(self._models(), self._warn)
        # Before the models answer: the session captures their state and the script's random generators, which the
        # script's own code goes on to use, and gives them back at the end.
        self._session.begin_repeated_steps()
        self._repeated_models.begin()

    def _set_repeated(self, current: _Pass) -> None:
        """Set which batch of the trained steps is the current one."""
        assert self._repeated_models is not None
        self._repeated = current.yielded
        if self._repetition is not None:
            self._repetition.go_on(lambda: self._uncounted(current))
        batch = current.window * self._accumulation + current.yielded - 1
        self._repeated_models.set_loss(self._history.loss(current.epoch, batch))
        self._results.repeat(current.epoch, batch)
        self._calls, self._repeated_update = 0, False
        self.synchronize()

    def _uncounted(self, current: _Pass) -> int:
        """Return the number of trained steps that the script has not counted yet."""
        return self._history.steps_from(current.epoch) - current.window - current.yielded // self._accumulation

    def _come_to_call(self, *, counts: bool) -> None:
        """Note a call of the script that waits for other ranks.

        Where such a call of the last step has failed, the step is repeated up to it, and the script goes on from there.

        Args:
            counts: whether it is one of a fixed number in each step, other than those of evaluations
        """
        if self._repeats_last_step and self._session.stands_at == self._calls:
            self._end_repeating(arrived=True)
            self._finishing = True
        if self._finishing or self._updated:
            self._session.stands_at = self._calls
        self._calls += counts

    @property
    def _updated(self) -> bool:
        """Whether the updates of the current step, which is trained for the first time, are complete."""
        last = self._micro is not None and self._micro.last
        return last and not self._updates.missing and (self._stepped or self._completed)

    @property
    def _evaluates(self) -> bool:
        """Whether the script iterates over other data than those that it trains."""
        return False

    def _call_directly(self, call: Callable[[], Any]) -> Any:
        """Make a collective of torch that the script calls by itself.

        One before a step's update counts for nothing: the step does not count either if it fails.
        """
        if self._in_call or not (self._finishing or self._updated or self._repeated_update):
            return call()
        self._come_to_call(counts=not self._evaluates)
        result = call()  # repeated steps make it together, too
        if self._repeated is None:
            self._session.stands_at = None  # not where the call has failed
        return result

    def _end_repeating(self, *, arrived: bool) -> None:
        if self._repeated is None:
            return
        assert self._repeated_models is not None
        self._repeated = None
        self._repeated_models.end()
        self._session.end_repeated_steps(arrived=arrived)

    def _rest(self, current: _Pass) -> Iterator[Any]:
        """Yield the rest of the session's epoch."""
        windows = self._windows
        assert windows is not None
        if self._session.epoch_ending:
            return
        batches, self._opened = self._opened or iter(windows), None
        if self._micro is not None:  # in which the training has begun
            self._end_batch(current)
        for batch in batches:
            micro = self._take_batch()
            self._current.take(batch, micro)
            yield from self._offered(current, batch, micro.window.after)
            self._end_batch(current)

    def _take_batch(self) -> MicroBatch:
        assert self._windows is not None
        self._micro = micro = self._windows.untrained.popleft()
        self._completed, self._own_loss, self._noted = False, None, False
        epoch = micro.window.before.epoch
        self._results.train(epoch, self._history.steps(epoch) * self._accumulation + micro.index)
        self._calls, self._finishing, self._session.stands_at = 0, False, None
        self.synchronize()
        return micro

    def _end_batch(self, current: _Pass) -> None:
        assert self._windows is not None
        assert self._micro is not None
        if self._micro.last and current.trains:
            self._complete()
        elif self._micro.last:
            self._windows.pass_over()

    def _offered(self, current: _Pass, batch: Any, after: Cursor) -> Iterator[Any]:
        """Yield a batch, and once more for each that the script passes over.

        Raises:
            _Superseded: the script has begun another pass meanwhile.
        """
        while True:
            self._used = False
            yield batch
            if self._pass is not current:
                raise _Superseded(after)
            if self._used or not self._skippable:
                return
            self._skippable -= 1

    def _train_batch(self) -> None:
        """Note that the script trains the current batch, and so the whole pass."""
        self._used, current = True, self._pass
        if current is None:
            return
        if not self._begun:  # the script has called no prepared model
            self._begin_within()
        if not current.trains:
            current.trains = self._has_trained = True
            self._training_mode = any(model.training for model in self._models())
            self._next_epoch = current.epoch + 1
            self._first_window = 0
        if self._micro is not None:
            self._session.record_samples()

    def _begin(self) -> None:
        """Restore the state of the run."""
        self._begun = True
        assert self._windows is not None
        own = self._own_schedulers()
        self._session.adopt({**self._tracked(), **{f"own_scheduler_{index}": each for index, each in enumerate(own)}})
        pause_schedulers(own, lambda: self.repeats or self.repeating)
        direct_collectives.watch(self._call_directly)
        if self._first_forward is not None:
            self._first_forward.end()
        if self._has_larger_batches:
            for model in self._models():
                divide_forward(model, self._current)
        if self._reload is None:
            return
        place, load = self._place, self._reload
        if self._session.find(_PROGRESS) is not None:
            load()  # the folder has more steps than the state that the session has restored
        if place is not None:
            self._session.begin_at(place.steps, place.epoch, place.windows)
            self._history.begin_at(place.epoch, place.windows)

    @property
    def _has_larger_batches(self) -> bool:
        """Whether there are fewer ranks than the script's batch size is meant for."""
        assert self._windows is not None
        return self._windows.largest > self._batch_size

    def _learn_layout(self) -> None:
        """Learn what of a larger batch belongs to which samples, and have its parts collated where that is needed."""
        windows = self._windows
        assert windows is not None
        collated = windows.collated
        layout = BatchLayout.learn(collated.collate, lambda: windows.some_samples(PROBED))
        self._current.layout = collated.layout = layout
        self._current.limit = collated.limit = windows.samples_of(self._batch_size, self._next_epoch)

    def _tracked(self) -> dict[str, Any]:
        return {**self._objects(), _PROGRESS: Progress(self._session), _HISTORY: self._history, _RESULTS: self._results}

    def _note_output(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if (self.repeats or self.repeating) and not torch.is_grad_enabled():
            self._warn("The script evaluates in steps and epochs that it repeats: with the present weights, not with "
                       "those of that time. What it keeps of that, such as the best result, a history or a count for "
                       "early stopping, may come out otherwise than without the change of nodes.")  # fmt: skip
        if self._micro is not None and model.training and torch.is_grad_enabled():
            self._own_loss = own_loss(output)

    def _note_result(self, result: torch.Tensor) -> None:
        """Keep what a collective has returned in the current batch, for the time when its step is repeated."""
        if self._micro is not None:
            self._results.note(result)
        elif self._repeated is not None:
            self._results.next()  # a pass that may train what is trained already: the call is counted

    def _note_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of the current batch into account."""
        self._session.observe(loss)
        if not self._noted:
            self._noted = True
            self._history.add(loss if self._own_loss is None else self._own_loss)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def repeating(self) -> bool:
        """Whether the current batch belongs to a step that is trained already, and that the script trains again."""
        return self._repeated is not None and self._pass is not None and self._pass.trains

    @property
    def _repeats_last_step(self) -> bool:
        """Whether the current batch belongs to the last of the steps that are trained already."""
        current = self._pass
        if self._repeated is None or current is None or not current.trains:
            return False
        later = self._history.steps_from(current.epoch + 1)
        return not later and self._repeated > (current.behind - 1) * self._accumulation

    def _repeat_update(self) -> None:
        """Note that the script has come to an update that is made already."""
        assert self._repeated is not None
        self._repeated_update = self._repeated % self._accumulation == 0

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
        self._updates.end_step()
        # Before the commit: the history is a part of the state that it captures.
        self._history.complete_step(self._micro.window.before.epoch)
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

    def _save(self, folder: Path, place: Place, write: Callable[[], Any], **options: bool) -> Any:
        """Have a folder written with a position in the data, unless the state is that of a later step.

        Args:
            options: further arguments of ``state_folders.save``
        """
        if self._is_saved(folder):
            return None
        return state_folders.save(folder, place, write, rank=self._session.rank, **options)

    def _is_saved(self, folder: Path) -> bool:
        """Return whether a folder that the script saves again, in a step that is trained, is left as it is.

        The round may have ended between a step and the script's saving of it: that of the last step is saved then.
        """
        if not (self.repeating or self.repeats):
            return False
        saved = state_folders.read(folder)
        return self._is_past() or (saved is not None and saved.complete)

    def _is_past(self) -> bool:
        """Return whether steps later than the one that the script is at are trained already."""
        if self.repeating:
            return not self._repeats_last_step
        return self.repeats and self._history.steps_from(self._next_epoch) > 0

    def _load(self, folder: Path | None, load: Callable[[], Any], *, holds_more: bool = False) -> Any:
        """Have a folder loaded where it is further than the state of the run, and take over its position.

        Args:
            holds_more: whether it is loaded in any case, as it holds what the state does not: the steps since then are
                repeated, and change that once more

        Raises:
            ValueError: the folder is not complete, and needed.
        """
        if self._begun:
            return load()
        found = self._session.find(_PROGRESS)
        # What rank 0 has read: it alone writes these files, perhaps to a disk of its own.
        place = self._session.from_main(None if folder is None else state_folders.read(folder))
        self._place = place
        if place is not None:
            self._next_epoch, self._first_window = place.epoch, place.windows
            self._skippable = place.windows * self._accumulation
        further = found is None or (place is not None and place.steps > found["steps"])
        if not further and (place is None or not holds_more):
            return None
        if folder is not None and place is not None and not place.complete:
            if further:
                done = f"{state_folders.set_aside(folder, is_main=self._session.is_main)} now"
            else:  # nothing of it is needed: the state of the run is as far
                state_folders.remove(folder, is_main=self._session.is_main)
                done = "removed"
            raise ValueError(
                f"{folder} is not complete: the process that wrote it ended meanwhile. It is {done}, so that the "
                "script finds the folder before it when it starts again."
            )
        if further:
            self._reload = load
        return load()
