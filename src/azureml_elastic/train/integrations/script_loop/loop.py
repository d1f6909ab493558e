"""A loop of the script's own within a run.

A restarted script runs from its beginning, and goes through the steps that are trained once more without training, so
that its counters and sums are right. Each of its *passes*, iterations over the training data, is an epoch if the script
trains the first batch, and moves nothing otherwise. The state is restored by the session in the first forward pass with
gradients: until then the script may look at its data, and prepare further objects. A script that continues from a
folder of its own repeats the steps since then. If it passes over the batches by hand that were trained when the folder
was written, it is given the next batch as often.

What a loop is in the middle of is one of the states in :mod:`.states`.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from azureml_elastic.train.data.loader import to_device
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.data.sampling import Cursor
from azureml_elastic.train.integrations.script_loop import direct_collectives, states
from azureml_elastic.train.integrations.script_loop.batch_layout import PROBED, BatchLayout
from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward
from azureml_elastic.train.integrations.script_loop.epoch_loader import EpochLoader
from azureml_elastic.train.integrations.script_loop.kept_files import keep_files
from azureml_elastic.train.integrations.script_loop.own_schedulers import pause_schedulers
from azureml_elastic.train.integrations.script_loop.repeated_steps import (
    HISTORY,
    FirstForward,
    RepeatedModels,
    RepetitionLog,
)
from azureml_elastic.train.integrations.script_loop.script_steps import ScriptSteps
from azureml_elastic.train.integrations.script_loop.state_folders import ScriptFolders
from azureml_elastic.train.integrations.script_loop.states import Left, Looking, Pass, Repeating, State, Training
from azureml_elastic.train.session.stack_session import StackSession

_LOG = logging.getLogger(__name__)


class Stack(Protocol):
    """A training stack whose script has the loop."""

    unstepped: str = "The optimizer has not stepped at the end of a global batch."
    """Warning for a loop that does not step where the stack expects it."""

    def objects(self) -> Mapping[str, Any]:
        """Return the objects to track."""

    def models(self) -> list[nn.Module]:
        """Return the models as the script calls them."""

    def own_schedulers(self) -> list[Any]:
        """Return the schedulers that the script steps by itself."""

    def plain_batches(self) -> Iterator[Any]:
        """Yield the batches of a pass that trains nothing, as the stack divides them among the ranks."""

    def mark(self, *, last: bool) -> None:
        """Have the stack take the next micro-batch for the last one of a step, or not."""

    @property
    def evaluates(self) -> bool:
        """Whether the script iterates over other data than those that it trains."""
        return False

    def restored(self) -> None:
        """Do what belongs to the beginning, once the state of the run is restored."""
        return


class _Superseded(Exception):
    """The script continues with a pass after it has begun another; its rest is behind this position."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor


class ScriptLoop:
    """The integration's part in a loop of the script's own.

    Args:
        accumulation: batches of a rank in an optimizer step, by which the script counts
        batch_size: samples of a batch at the reference world size

    Attributes:
        training_mode: whether a model was in training mode when the script has trained a batch; ``None`` before
        next_epoch: epoch of the next pass
        first_window: first step that the script counts in it
        skippable: batches that the script may pass over by hand
    """

    def __init__(self, session: StackSession, stack: Stack, *, accumulation: int, batch_size: int) -> None:
        self.stack = stack
        self.accumulation = accumulation
        self.state: State = Looking(FirstForward(self.begin_within))
        self.steps = ScriptSteps(self, session)
        self.folders = ScriptFolders(self, session)
        self.training_mode: bool | None = None
        self.next_epoch = self.first_window = self.skippable = 0
        self._session = session
        self._batch_size = batch_size
        self._batch = CurrentBatch(batch_size, session.device)
        self._loader: WindowLoader | None = None
        self._repetition = RepetitionLog() if session.is_main else None
        self._warned: set[str] = set()
        session.drive(self.steps.complete_step)

    def _to(self, state: State) -> None:
        assert type(state) in states.FOLLOWING[type(self.state)], (self.state, state)
        self.state = state

    @property
    def begun(self) -> bool:
        """Whether the state of the run is restored."""
        return not isinstance(self.state, Looking)

    @property
    def training(self) -> Training | None:
        """What is known of the current batch, where it is trained for the first time."""
        return self.state if isinstance(self.state, Training) else None

    @property
    def repeats(self) -> bool:
        """Whether the script repeats an epoch that is trained, or is behind one."""
        return self.state.pass_ is not None and self.state.pass_.past

    @property
    def repeating(self) -> bool:
        """Whether the current batch belongs to a step that is trained already, and that the script trains again."""
        return isinstance(self.state, Repeating) and self.state.pass_.trains

    @property
    def silent(self) -> bool:
        """Whether what the script prints and logs was printed and logged when its steps were trained."""
        return isinstance(self.state, Repeating) or self.repeats

    @property
    def current_pass(self) -> Pass | None:
        """The pass that the script is in."""
        return None if self.state.pass_ is None or self.state.pass_.over else self.state.pass_

    # --- data --------------------------------------------------------------------------------------------------------

    def loader_of(self, own: Callable[[], Any], windows: WindowLoader) -> EpochLoader:
        """Return the loader in place of the stack's own, which a function returns."""
        self._loader = windows
        return EpochLoader(own, self, windows)

    @property
    def windows(self) -> WindowLoader:
        """The loader of the training data."""
        assert self._loader is not None
        return self._loader

    @property
    def epoch(self) -> int:
        """Epoch of the current pass, or of the next one."""
        return self.next_epoch if self.current_pass is None else self.current_pass.epoch

    @property
    def at_last_batch(self) -> bool:
        """Whether the current batch is the last one of its epoch, or a pass has ended with it."""
        state = self.state
        if isinstance(state, Looking | Left):
            return self.current_pass is None and self.training_mode is not None
        if isinstance(state, Training):
            return state.micro.last and state.micro.window.ends_epoch
        return state.number == (self.windows.steps_per_epoch - state.pass_.window) * self.accumulation

    def expect(self, epoch: int) -> None:
        """Take the epoch of the next pass, where the script says so."""
        self.next_epoch = max(self.next_epoch, epoch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of a pass over the training data.

        That a pass trains shows when the script trains its first batch. It then has the batches of the next epoch,
        after those that are trained already. A pass of another kind, such as one for statistics, moves nothing.
        """
        if not self._may_train():
            yield from self.stack.plain_batches()
            return
        self._leave_pass()
        if self._has_larger_batches and self.windows.collated.layout is None:
            self._learn_layout()
        current = Pass(self.next_epoch)
        try:
            if isinstance(self.state, Looking):
                self._to(replace(self.state, pass_=current))
                yield from self._look(current)
            else:
                self._to(Left(current))
                self._find_place(current)
            if self.begun:
                yield from self._repeat(current)
                while self._session.epoch < current.epoch:  # the script believes to be further than the run
                    yield from self._rest(current)
                    if not current.trains:
                        break
                    self._session.end_epoch()
                if not current.past and (current.trains or not current.behind):
                    yield from self._rest(current)
        except _Superseded as superseded:
            self.warn("The script goes on with an iteration over its training data after it has begun another. The "
                      "older one has the rest of its batches, but training them is not counted.")  # fmt: skip
            yield from (batch for _, batch in self.windows.batches_from(superseded.cursor))
        finally:
            # An error of the script closes this generator before anybody knows of the error. A step in which only some
            # of the models are updated must not be counted then, and so not be handed over. A script that has left
            # the pass by itself has the step counted at its next pass, or at its end.
            if self.current_pass is current and not self.steps.updates.missing:
                self._leave_pass()

    def _may_train(self) -> bool:
        models = self.stack.models()
        return (
            torch.is_grad_enabled()
            and bool(models)
            and self.training_mode in (None, any(model.training for model in models))
        )

    def _leave_pass(self) -> None:
        """End a pass, also one that the script has left and still holds when it begins another."""
        current, state = self.current_pass, self.state
        if current is None:
            return
        if isinstance(state, Repeating):
            self.end_repeating(Left(current), arrived=self._is_newest(current))
        else:
            self.steps.complete_step()
        # In a step, by a collective that has failed.
        broken = isinstance(state, Training) and not state.completed
        current.over, current.opened = True, None
        if self.begun:
            self._to(Left(current))
        self.windows.end_pass(trained=current.trains)
        if self._is_newest(current) and not broken:
            self._session.begin_epoch_end()
        self.stack.mark(last=True)  # what the script trains between passes is not accumulated

    def _look(self, current: Pass) -> Iterator[Any]:
        """Yield batches of the next epoch until a model computes one with gradients.

        The state is restored then, and not before: a script may look at its data first, and prepare a scheduler later.
        """
        assert isinstance(self.state, Looking)
        for model in self.stack.models():
            if self.state.first_forward.replace(model):
                model.register_forward_hook(self.steps.note_output)
        if self.first_window >= self.windows.steps_per_epoch:  # the script's folder was written at the epoch's end
            self.next_epoch, self.first_window = current.epoch + 1, 0
            return
        cursor = self.windows.cursor_at(current.epoch, self.first_window)
        for micro, batch in self.windows.batches_from(cursor):
            current.yielded += 1
            self.stack.mark(last=micro.last)
            self._batch.take(batch, micro)
            yield from self._offered(current, batch, micro.window.after)
            if self.begun:
                return

    def begin_within(self) -> None:
        """Begin to train in the first forward pass, with the batch that it computes."""
        current = self.current_pass
        self._restore()
        if current is None:
            return  # it is not one of these batches
        self._find_place(current)
        if current.behind or self._session.epoch != current.epoch:
            self._set_repeated(self._begin_repeating(current))
            return
        current.opened = iter(self.windows)
        passed = False
        for _ in range(current.yielded):
            if passed:
                self.windows.pass_over()
            next(current.opened)  # it is the same as the one that the script has
            passed = self._take_batch(current).last

    def _restore(self) -> None:
        state, stack = self.state, self.stack
        assert isinstance(state, Looking)
        self._to(Left(state.pass_))
        own = {f"own_scheduler_{index}": each for index, each in enumerate(stack.own_schedulers())}
        tracked = {HISTORY: self.steps.history, "results": self.steps.results}
        self._session.adopt({**stack.objects(), **tracked, **own})
        pause_schedulers(own.values(), lambda: self.repeats or self.repeating)
        direct_collectives.watch(self.steps.call_directly)
        state.first_forward.end()
        if self._has_larger_batches:
            for model in stack.models():
                divide_forward(model, self._batch)
        place = self.folders.restored()
        if place is not None:
            self.steps.history.begin_at(place.epoch, place.windows)
        stack.restored()

    def _find_place(self, current: Pass) -> None:
        session = self._session
        # A script that has trained leaves an epoch whenever it begins the next. One that has not yet, after a restart,
        # may believe to be further than the state: then the rest of the earlier epochs comes first.
        while session.epoch < current.epoch and (self.training_mode is not None or session.epoch_ending):
            session.end_epoch()
        # Before its steps are repeated: what the last one of them is still to do is not left out.
        current.past = session.epoch > current.epoch
        self.steps.history.entered = max(self.steps.history.entered, current.epoch)
        current.window = self.first_window
        current.behind = max(0, self.steps.history.steps(current.epoch) - current.window)

    def _is_newest(self, current: Pass) -> bool:
        """Return whether the former process has begun no later pass, nor run the code at the end of this one's epoch.

        Where it has finished the training, it has, and the position is behind the pass: but no other pass follows.
        """
        return current.trains and (not current.past or self.steps.history.entered == current.epoch)

    def _rest(self, current: Pass) -> Iterator[Any]:
        if self._session.epoch_ending:
            return
        batches, current.opened = current.opened or iter(self.windows), None
        self._end_batch()  # in which the training has begun
        for batch in batches:
            micro = self._take_batch(current)
            self._batch.take(batch, micro)
            yield from self._offered(current, batch, micro.window.after)
            self._end_batch()

    def _take_batch(self, current: Pass) -> MicroBatch:
        micro = self.windows.untrained.popleft()
        self._to(Training(current, micro))
        epoch = micro.window.before.epoch
        self.steps.results.train(epoch, self.steps.history.steps(epoch) * self.accumulation + micro.index)
        self._session.position.stands_at = None
        self.synchronize()
        return micro

    def _end_batch(self) -> None:
        state = self.training
        if state is not None and state.micro.last:
            if state.pass_.trains:
                self.steps.complete_step(ended=True)
            else:
                self.windows.pass_over()

    def _offered(self, current: Pass, batch: Any, after: Cursor) -> Iterator[Any]:
        """Yield a batch, and once more for each that the script passes over.

        Raises:
            _Superseded: the script has begun another pass meanwhile.
        """
        while True:
            current.used = False
            yield batch
            if self.current_pass is not current:
                raise _Superseded(after)
            if current.used or not self.skippable:
                return
            self.skippable -= 1

    @property
    def _has_larger_batches(self) -> bool:
        """Whether there are fewer ranks than the script's batch size is meant for."""
        return self.windows.largest > self._batch_size

    def _learn_layout(self) -> None:
        """Learn what of a larger batch belongs to which samples, and have its parts collated where that is needed."""
        windows, collated = self.windows, self.windows.collated
        layout = BatchLayout.learn(collated.collate, lambda: windows.some_samples(PROBED))
        self._batch.layout = collated.layout = layout
        self._batch.limit = collated.limit = windows.samples_of(self._batch_size, self.next_epoch)

    # --- steps that are trained already ------------------------------------------------------------------------------

    def _repeat(self, current: Pass) -> Iterator[Any]:
        """Yield batches for steps that are trained already: real ones until it is clear that the script trains them."""
        state = self.state
        if not isinstance(state, Repeating):
            if not current.behind:
                return
            state = self._begin_repeating(current)
        cursor = self.windows.cursor_at(current.epoch, current.window)
        # A script that only looks at its data gets the batches that are there. Once it trains, their content is of no
        # use any more, and the same few samples spare it the loading of an epoch.
        real = itertools.islice(self.windows.batches_from(cursor), current.yielded, None)
        for micro, batch in () if current.trains else real:
            current.yielded += 1
            self._set_repeated(state)
            yield from self._offered(current, batch, micro.window.after)
            if current.trains:
                break
        if current.trains:
            state.models.certain = True
            trained = current.window + current.behind
            if self._repetition is not None and trained < self.windows.steps_per_epoch:
                self._repetition.warn_of_outputs(trained)
            # By number: what all ranks count is each sample once, so a batch has as many as the script would have now.
            fillers: dict[int, Any] = {}
            while current.yielded < current.behind * self.accumulation:
                window, micro_batch = divmod(current.yielded, self.accumulation)
                samples = self.windows.sizes(current.epoch, current.window + window)[micro_batch]
                if samples not in fillers:
                    fillers[samples] = to_device(self.windows.filler(samples), self._session.device)
                current.yielded += 1
                self._set_repeated(state)
                # scripts take keys out of batches
                yield from self._offered(current, copy.copy(fillers[samples]), cursor)
        if isinstance(self.state, Repeating):
            self.end_repeating(Left(current), arrived=self._is_newest(current))

    def _begin_repeating(self, current: Pass) -> Repeating:
        if self._repetition is not None:
            self._repetition.begin(self.steps.history.steps_from(current.epoch) - current.window)
        keep_files(self.is_past)
        state = Repeating(current, RepeatedModels(self.stack.models(), self.warn), self.accumulation)
        self._to(state)
        # Before the models answer: the session captures their state and the script's random generators, which the
        # script's own code goes on to use, and gives them back at the end.
        self._session.begin_repeated_steps()
        state.models.begin()
        return state

    def _set_repeated(self, state: Repeating) -> None:
        current = state.pass_
        state.number, state.calls, state.updated = current.yielded, 0, False
        if self._repetition is not None:
            counted = current.window + current.yielded // self.accumulation
            self._repetition.go_on(lambda: self.steps.history.steps_from(current.epoch) - counted)
        batch = current.window * self.accumulation + current.yielded - 1
        state.models.set_loss(self.steps.history.loss(current.epoch, batch))
        self.steps.results.repeat(current.epoch, batch)
        self.synchronize()

    def end_repeating(self, following: State, *, arrived: bool) -> None:
        """End the repetition, see :meth:`StackSession.end_repeated_steps`."""
        state = self.state
        assert isinstance(state, Repeating)
        self._to(following)
        state.models.end()
        self._session.end_repeated_steps(arrived=arrived)

    def repeats_last_step(self) -> bool:
        """Return whether the current batch belongs to the last of the steps that are trained already."""
        state = self.state
        if not isinstance(state, Repeating) or not state.pass_.trains:
            return False
        earlier = (state.pass_.behind - 1) * self.accumulation
        return state.number > earlier and not self.steps.history.steps_from(state.pass_.epoch + 1)

    def is_past(self) -> bool:
        """Return whether steps later than the one that the script is at are trained already."""
        if self.repeating:
            return not self.repeats_last_step()
        return self.repeats and self.steps.history.steps_from(self.next_epoch) > 0

    def synchronize(self) -> bool:
        """Tell the stack whether the current micro-batch completes a step; return whether there is one."""
        state = self.state
        if isinstance(state, Training | Repeating):
            self.stack.mark(last=state.micro.last if isinstance(state, Training) else state.last)
            return True
        return False

    def warn(self, text: str) -> None:
        """Log a warning once, on rank 0."""
        if text not in self._warned and self._session.is_main:
            self._warned.add(text)
            _LOG.warning("%s", text)
