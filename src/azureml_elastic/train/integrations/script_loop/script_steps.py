"""What a script does with its batches: it trains them, updates its models, and waits for other ranks in calls.

A step counts before such calls, as they fail where a peer is lost. What the script does behind one is then left to the
next process: it repeats the step silently up to the call that has failed, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from azureml_elastic.train.integrations.script_loop.collective_results import CollectiveResults
from azureml_elastic.train.integrations.script_loop.repeated_steps import StepHistory, own_loss
from azureml_elastic.train.integrations.script_loop.states import Finishing, Looking, Repeating, Training
from azureml_elastic.train.session.stack_session import StackSession

if TYPE_CHECKING:
    from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop


_REMEMBERED = 64
"""Steps after which an optimizer that has not stepped in them is no longer expected to."""


class StepUpdates:
    """The optimizers that have stepped in the current step, and those that usually do."""

    def __init__(self) -> None:
        self._now: set[int] = set()
        self._absent: dict[int, int] = {}  # steps since each optimizer has stepped last
        self._prepared = 0

    def note(self, optimizer: object, prepared: int) -> None:
        """Note that an optimizer has stepped.

        Args:
            prepared: number of the script's optimizers, all of which are expected in the first step
        """
        self._now.add(id(optimizer))
        self._prepared = prepared

    def expect(self, optimizer: object) -> None:
        """Note that an optimizer has stepped in a step that is trained already."""
        self._absent[id(optimizer)] = 0

    @property
    def missing(self) -> bool:
        """Whether an optimizer has stepped, and another one that usually steps has not."""
        if not self._absent:
            return 0 < len(self._now) < self._prepared
        expected = {optimizer for optimizer, absent in self._absent.items() if absent < _REMEMBERED}
        return bool(self._now and expected - self._now)

    def end_step(self) -> None:
        """Learn from a complete step."""
        for optimizer in self._absent.keys() | self._now:
            self._absent[optimizer] = 0 if optimizer in self._now else self._absent[optimizer] + 1
        self._now.clear()


class ScriptSteps:
    """The steps of a loop.

    Attributes:
        within_call: whether what is called are parts of a call of the stack's
    """

    def __init__(self, loop: ScriptLoop, session: StackSession) -> None:
        self.history = StepHistory(loop.accumulation, lambda: session.steps)
        self.results = CollectiveResults()
        self.updates = StepUpdates()
        self.within_call = False
        self._loop = loop
        self._session = session

    def train_batch(self, loss: torch.Tensor | None = None) -> Training | None:
        """Note that the script trains the current batch, and so the whole pass, by its loss of shape ().

        Returns:
            What is known of the batch, if it is trained for the first time.
        """
        loop = self._loop
        current = loop.current_pass
        if current is None:
            return None
        current.used = True
        if isinstance(loop.state, Looking):  # the script has called no prepared model
            loop.begin_within()
        if not current.trains:
            current.trains = True
            loop.training_mode = any(model.training for model in loop.stack.models())
            loop.next_epoch, loop.first_window = current.epoch + 1, 0
        batch = loop.training
        if batch is not None:
            self._session.record_samples()
        if batch is not None and loss is not None:
            self._session.observe(loss)
            if not batch.noted:
                batch.noted = True
                self.history.add(loss if batch.own_loss is None else batch.own_loss)
        return batch

    def note_output(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Take the loss that a model has computed; a hook of its forward pass."""
        loop = self._loop
        if (loop.repeats or loop.repeating) and not torch.is_grad_enabled():
            loop.warn("The script evaluates in steps and epochs that it repeats: with the present weights, not with "
                      "those of that time. What it keeps of that, such as the best result, a history or a count for "
                      "early stopping, may come out otherwise than without the change of nodes.")  # fmt: skip
        if loop.training is not None and model.training and torch.is_grad_enabled():
            loop.training.own_loss = own_loss(output)

    def repeat_update(self, optimizer: object) -> bool:
        """Return whether an update is made already, and note that the script has come to it."""
        state = self._loop.state
        if not isinstance(state, Repeating) or not state.pass_.trains:
            return False
        self.updates.expect(optimizer)
        state.updated = state.last
        return True

    def note_update(self, optimizer: object, prepared: int = 1) -> None:
        """Note that one of the script's optimizers has stepped."""
        batch = self._loop.training
        if batch is not None and batch.micro.last:
            batch.stepped = True
            self.updates.note(optimizer, prepared)

    @property
    def _updated(self) -> bool:
        batch = self._loop.training
        if batch is None or not batch.micro.last or self.updates.missing:
            return False
        return batch.stepped or batch.completed

    def complete_updates(self) -> None:
        """Count the step if the optimizers have stepped, unless another one of them is still to step in it."""
        if not self.updates.missing:
            self.complete_step()

    def complete_step(self, *, ended: bool = False) -> None:
        """Count the step if the optimizer has stepped: what follows may fail because a peer is lost.

        Args:
            ended: whether it has to have stepped, as the next batch begins another step
        """
        batch = self._loop.training
        if batch is None or batch.completed or not (batch.stepped or ended):
            return
        if not batch.stepped:
            self._loop.warn(self._loop.stack.unstepped)
        batch.completed, batch.stepped = True, False
        self.updates.end_step()
        # Before the commit: the history is a part of the state that it captures.
        self.history.complete_step(batch.micro.window.before.epoch)
        self._session.complete_step(changes_state=batch.micro.window.ends_epoch)

    @property
    def answers_alone(self) -> bool:
        """Whether no rank waits for another: in repeated steps, but not in an evaluation between two of them."""
        loop = self._loop
        return (loop.repeating or isinstance(loop.state, Finishing)) and not loop.stack.evaluates

    def call(self, call: Callable[[], Any], alone: Callable[[], Any]) -> Any:
        """Make a call of the stack's that waits for other ranks, or answer it alone."""
        if self.within_call:  # accelerate gathers metrics by its own gather(), and saves folders with barriers
            return call()
        self._come_to_call()
        if self.answers_alone:
            return alone()
        self.complete_updates()
        result = self.within(call)
        self._session.position.stands_at = None  # not where the call has failed
        return result

    def within(self, call: Callable[[], Any]) -> Any:
        """Make a call whose own calls are the stack's alone."""
        self.within_call = True
        try:
            return call()
        finally:
            self.within_call = False

    def call_directly(self, call: Callable[[], Any]) -> Any:
        """Make a collective of torch that the script calls by itself.

        One before a step's update counts for nothing: the step does not count either if it fails.
        """
        state = self._loop.state
        behind = state.updated if isinstance(state, Repeating) else isinstance(state, Finishing) or self._updated
        if self.within_call or not behind:
            return call()
        self._come_to_call()
        result = call()  # repeated steps make it together, too
        if not isinstance(self._loop.state, Repeating):
            self._session.position.stands_at = None  # not where the call has failed
        return result

    def _come_to_call(self) -> None:
        loop, session = self._loop, self._session
        state = loop.state
        # In a step's last batch: only behind its update does a call say where it stands.
        if (
            isinstance(state, Repeating)
            and state.last
            and loop.repeats_last_step()
            and session.position.stands_at == state.calls
        ):
            state = Finishing(state.pass_, state.number, state.calls)
            loop.end_repeating(state, arrived=True)
        if isinstance(state, Repeating | Finishing | Training):
            if isinstance(state, Finishing) or self._updated:
                session.position.stands_at = state.calls
            state.calls += not loop.stack.evaluates  # a script may not evaluate in each step

    def note_result(self, result: torch.Tensor) -> None:
        """Keep what a collective has returned in the current batch, for the time when its step is repeated."""
        if isinstance(self._loop.state, Training):
            self.results.note(result)
        elif isinstance(self._loop.state, Repeating):
            self.results.next()  # a pass that may train what is trained already: the call is counted
