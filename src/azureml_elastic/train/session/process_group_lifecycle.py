"""The process group of this process over the rounds of a run.

A round ends when a node or a worker is lost, or at a step boundary that all ranks have agreed on. This process then
either *stays*: it waits for its assignment to the next round, joins the new process group, takes the furthest state
among the ranks and continues; or it *exits*: it hands its state over to the node's agent, and a new process continues
from there. Both keep the work of completed steps.

Between the last step of an epoch and the end of the epoch's body in ``run.epochs()``, the script's own code may have
run on some ranks and not on others. A round that ends there is always left by exiting: the state of the last step is
handed over as it was when that step completed, and the new processes run the code again from its beginning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.data_parallel import ElasticDataParallel
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process import pick_device
from azureml_elastic.distributed.process_groups import ProcessGroups, is_peer_error
from azureml_elastic.distributed.stuck_collective import is_stuck
from azureml_elastic.errors import CheckpointError, ElasticError, RoundBroken
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, WorkerIdentity
from azureml_elastic.ipc.worker_messages import GaveWay, Stopped
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.session.exit_hooks import leave_quickly
from azureml_elastic.train.session.step_checks import OptimizerCopy, UpdateGuard
from azureml_elastic.train.session.training_state import SessionContext, TrainingState
from azureml_elastic.train.step_state import StepMachine

_LOG = logging.getLogger(__name__)

_PEER_SECONDS = 15.0
"""Time for the agent to confirm that a collective failed because of a lost peer; a silent peer is detected late."""

_OTHER_SECONDS = 0.5
"""Time for the same where the error does not look like a peer's."""

_DRAIN_SECONDS = 15.0
"""Time for a GPU to complete what is queued once its collectives are aborted: less than a step, unless it hangs."""


class ProcessGroupLifecycle:
    """The process group of the round, and the transition to the next one.

    Attributes:
        exits_quickly: whether this process ends without the interpreter's teardown, so that the kernel releases what it
            holds
    """

    def __init__(self, context: SessionContext, steps: StepMachine, position: Position, rate: LearningRate) -> None:
        self._agent = context.agent
        self._audit = context.audit
        self._steps = steps
        self._training_state: TrainingState | None = None  # none before the first round is entered
        self.models: list[ElasticDataParallel] = []
        self._made_before_track: list[ElasticDataParallel] = []
        self._undo: Callable[[], None] | None = None
        self.exits_quickly = False
        self.device = pick_device(context.identity)
        self._device = device_of(self.device)
        self.updates = UpdateGuard(self._device, self._agent)
        self.world = ProcessGroups(self._first_place() if self._agent.stays else context.identity, self.device)
        self._thread = threading.get_ident()
        # Before the groups are opened: where a rank is lost meanwhile, the others would wait for it for half an hour.
        self._agent.when_interrupted(self._on_interrupt)
        self._open()
        self.updates.enter(self.world.identity.world_size)
        self.position = position
        position.identity = self.world.identity
        self._audit.enter(self.world.identity)
        self._training_state = TrainingState(context, self.world, position, rate, steps)

    @property
    def state(self) -> TrainingState:
        """The training state, which is restored, saved and handed over."""
        assert self._training_state is not None
        return self._training_state

    def parallel(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return a module that averages the gradients of a model over the ranks of every round. A collective."""
        with self.guard(stay=False):  # which does not run its block again: there would be no model
            absorb = self._absorb if self._agent.stays else lambda _: False
            before_track = self.state.tracked is None
            awaits = before_track and self._state_follows()
            made = ElasticDataParallel(model, absorb, lambda: self._steps.discarded, awaits_state=awaits, **options)
            self.models.append(made)
            if before_track:  # a new process makes these in the same order, see _rejoin()
                self._made_before_track.append(made)
        return made

    def settle_weights(self) -> None:
        """Make the weights of models that have awaited a state equal on all ranks. A collective, after a restore."""
        modules = self._tracked.modules if self.state.weights_restored else []
        restored = {id(parameter) for module in modules for parameter in module.parameters()}
        for model in self.models:
            model.settle(restored)

    def guard_updates(self, tracked: TrackedState) -> None:
        """Have no update of a tracked optimizer follow a collective that a lost peer has broken."""
        self.updates.attach(tracked)
        for optimizer in tracked.optimizers:
            optimizer.register_step_pre_hook(self._before_update)

    def follow_updates(self, tracked: TrackedState) -> None:
        """Know from when to when an update changes the weights. After all other hooks: those may discard the step."""
        for optimizer in tracked.optimizers:
            optimizer.register_step_pre_hook(self._begin_update)
            optimizer.register_step_post_hook(self._end_update)

    def begin_step(self) -> None:
        """Keep what a step may change before its update, as it is at the step's beginning."""
        self.updates.begin_step()
        self.state.found.begin_step(undone=self.world.identity.world_size > 1)

    def complete_update(self) -> None:
        """Wait for a step whose update was not guarded, or has collectives behind it, before it is counted."""
        if not self.updates.step_is_covered():
            # What has changed the state is not known here, so it is that of no step until everything is complete.
            self._steps.update()
            with self.guard(stay=False):
                self.updates.wait()

    def discard_step(self) -> None:
        """Discard the current step: :meth:`end_discarded_step` undoes its changes."""
        self._undo = _capture(self.state, self.device, self._tracked.untrained_weights())
        self._steps.discard()

    def end_discarded_step(self) -> None:
        """Undo the changes of a step that was discarded."""
        assert self._undo is not None
        self._undo()
        self.position.drop()
        self._steps.undone()

    def begin_pending_code(self, *, changes_state: bool) -> None:
        """Prepare for the script's code that follows a step; if it changes the state, capture what it may change."""
        tracked, found = self._tracked, self.state.found
        several = self.world.identity.world_size > 1
        if not changes_state:
            if several and not (tracked.replicated and self.world.identity.local_rank):
                found.begin_code()
            self._undo = found.undo_code
        elif not self._hands_over or (tracked.replicated and self.world.identity.local_rank):
            self._undo = None  # local rank 0 alone hands a whole state over
        else:
            # The code may evaluate with other weights in their place, by an optimizer with modes of its own, too.
            with_modes = [each for each in tracked.optimizers if several and callable(getattr(each, "eval", None))]
            optimizers = [OptimizerCopy(each, torch.device("cpu")) for each in with_modes]
            found.end_code()  # whose copies those below replace
            undo = _capture(self.state, self.device, tracked.weights() if several else [])
            stands_at = self.position.stands_at

            def undo_all() -> None:
                undo()
                self.position.stands_at = stands_at
                for each in optimizers:
                    each.restore()

            self._undo = undo_all

    def end_pending_code(self) -> None:
        """Release what was captured for the script's code that follows a step."""
        self.state.found.end_code()
        if not self._steps.discarded:
            self._undo = None

    def leave_round(self, *, save: bool) -> None:
        """Leave the round at a step boundary, after a checkpoint if ``save`` or if a rank cannot keep its state.

        A collective. The process continues in the next round, or exits.
        """
        state = self.state
        # All ranks take the same branch, as a save is a collective.
        handed_over = not save and self.world.control.all_true(self._can_stay() or state.hand_over())
        if not handed_over:
            self._save_at_end()
        if self._can_stay():
            self._agent.report(Stopped(state.steps))
            self._rejoin()
            return
        if not handed_over:
            state.hand_over()
        state.abandon_save()
        self._steps.finish()  # so that no hook of the exit hands over or saves once more
        # Last: the round ends when all have reported this, and what an agent or a storage has not by then is lost.
        self._agent.report(Stopped(state.steps))
        if self.world.identity.round:
            self.exits_quickly = True
            leave_quickly(self._agent.leave_code)
        raise SystemExit(self._agent.leave_code)

    def _save_at_end(self) -> None:
        try:
            self.state.save(must_commit=True)
        except RoundBroken:
            pass  # the state is handed over, and saved first by the next worker
        except CheckpointError as error:
            # A disk that is full while a node leaves: those that do not have the state in memory, and save it next.
            if not self._can_stay():
                self.state.hand_over()
                raise
            _LOG.warning("Training goes on with the state of step %d in memory. %s", self.state.steps, error)

    @contextlib.contextmanager
    def guard(self, *, stay: bool = True) -> Iterator[None]:
        """Run a block with collectives; if a peer is lost meanwhile, enter the next round (``stay``) or exit."""
        try:
            yield
        # A collective that fails raises RuntimeError, a request to the agent ElasticError. Whether a lost peer is the
        # cause is the agent's to say: the text of an error does not tell it from one of the script.
        except (RuntimeError, ElasticError) as error:
            if not self._is_interrupted(error):
                raise
            if not (stay and self._can_stay()):
                self._give_way()
            self._rejoin()

    def on_uncaught(self, error: BaseException) -> None:
        """Exit with the state handed over if the script ends because one of its own collectives has lost a peer."""
        if is_peer_error(error) and not self._steps.over and self._agent.wait_interrupted(_PEER_SECONDS):
            self.state.found.error = error
            self._give_way()

    @property
    def _tracked(self) -> TrackedState:
        assert self.state.tracked is not None
        return self.state.tracked

    @property
    def _hands_over(self) -> bool:
        """Whether the run could continue from this process's memory, or from it and others', if the round ended now."""
        return (
            self._training_state is not None
            and self._training_state.hands_over
            and not (self._steps.pending and self._tracked.scales_gradients)
        )

    def _state_follows(self) -> bool:
        """Return whether a rank's memory has a state, which overwrites the weights of all. A collective.

        Sending the weights of rank 0 to all before, as data parallelism does, takes as long as sending the state.
        """
        whole = self.state.holds_full_state or any(each.part is None for each in self._agent.held().states)
        return not self.world.control.all_true(not whole)

    def _is_interrupted(self, error: BaseException) -> bool:
        peer = is_peer_error(error) or isinstance(error, RoundBroken)
        return self._agent.wait_interrupted(_PEER_SECONDS if peer else _OTHER_SECONDS)

    def _can_stay(self) -> bool:
        return (
            self._agent.stays
            and self._device.may_stay
            and self._hands_over
            and self.state.holds_full_state
            and self.world.owns_group
            and not self._steps.pending
            and not self._tracked.scales_gradients
        )

    def _before_update(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._steps.discarded or self._steps.reading:
            return  # a compiled step would wait when it is compiled, and never again: complete_update() does
        self.state.found.begin_update()
        with self.guard():
            self.state.before_update()
            self.updates.before_update()

    def _begin_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note that an optimizer changes the weights from now on, or once its closure has computed gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or torch.compiler.is_compiling():
            self._steps.update()
            return None
        if self._steps.whole and not self._steps.discarded:
            self.updates.begin_update(optimizer)
        calls = 0

        def compute_gradients(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                self.updates.expect_repetition(optimizer)
            result = closure(*given, **named)
            self._steps.update()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": compute_gradients}
        return (args[0], compute_gradients, *args[2:]), kwargs

    def _end_update(self, *_: Any) -> None:
        self.updates.end_update()
        self._steps.update()

    def _absorb(self, error: RuntimeError) -> bool:
        """Enter the next round after an error of the forward pass; return whether a lost peer was its cause."""
        if not is_peer_error(error) or not self._agent.wait_interrupted(_PEER_SECONDS) or not self._can_stay():
            return False
        self._rejoin()
        return True

    def _rejoin(self) -> None:
        """Enter the next round with the furthest state among its ranks, and discard the current step."""
        # First: a kernel that is still queued would write to what is dropped, undone or sent to others below.
        if not self._settle_device():
            self._exit()
        self._tracked.drop_gradients()  # some are averaged, some are not
        if self._steps.discarded:
            # The second loss in one step. What the script has changed in it belongs to no step, and must not be sent to
            # others, nor be taken for the beginning of the step that is discarded next.
            assert self._undo is not None
            self._undo()
        while True:
            self.state.abandon_save()  # its thread uses the groups that are closed below
            try:
                self._agent.park()
                self.world.close(self.models)  # which takes a while; the agents form the next round meanwhile
                self.world.identity = self._agent.wait_for_place()
                self.world.open()
                # From here on the same collectives in the same order as in a new process, which makes its models one by
                # one, and then tracks them; otherwise the ranks would wait for each other in different ones.
                for model in self.models:
                    model.reform(awaits_state=model in self._made_before_track and self._state_follows())
                self.state.enter()
                self.settle_weights()
                break
            except (RuntimeError, ElasticError) as error:
                if isinstance(error, RoundBroken) or not self._is_interrupted(error) or not self._can_stay():
                    _LOG.warning("This process cannot enter the next round and exits; a new one continues: %s", error)
                    self._give_way()
        self.updates.enter(self.world.identity.world_size)
        self.position.enter(self.world.identity)
        self._audit.enter(self.world.identity)
        if self.position.opened:
            self.discard_step()

    def _on_interrupt(self) -> None:
        """Make all collectives fail; called on the thread that receives the agent's messages."""
        self.world.abort()
        # On a thread of its own: this one receives the agent's messages, the assignment to the next round among them.
        threading.Thread(target=self._exit_if_stuck, name="interrupted", daemon=True).start()

    def _exit_if_stuck(self) -> None:
        """Exit if the training thread stays blocked in a collective."""
        if self._training_state is None and not self._agent.stays:
            self._exit()  # with nothing to hand over: torch tries for half an hour to reach a store that is gone
        if is_stuck(self._thread, lambda: self._agent.wait_interrupted(0)):
            _LOG.warning(
                "A collective does not end although its connections are closed (a defect of gloo). This process hands "
                "its state over and exits; a new one continues."
            )
            self._give_way()  # from this thread: the state does not change while the training thread is blocked

    def _open(self) -> None:
        # A round may end while its groups are being formed. There is no state yet: what is lost is the place alone.
        while True:
            try:
                self.world.open()
            except RuntimeError as error:
                if not self._is_interrupted(error):
                    raise
                if not self._agent.stays:
                    self._exit()
                self.world.close()
                self.world.identity = self._first_place()
            else:
                return

    def _first_place(self) -> WorkerIdentity:
        """Wait for a place before there is a state to hand over."""
        try:
            self._agent.park()
            return self._agent.wait_for_place()
        except RoundBroken:
            self._exit()

    def _give_way(self) -> NoReturn:
        """Exit, so that a new process continues from the state that this one hands over."""
        undo = self._undo if self._steps.discarded or self._steps.pending else lambda: None
        # Without an undo the script's code may have changed the state halfway: it is the state of no step.
        if self._training_state is not None and self._settle_device() and undo is not None:
            undo()
            if self._hands_over:
                self.state.hand_over()
        self._exit()

    def _settle_device(self) -> bool:
        """Let the device complete what is queued, and restore what a step has changed; return whether it is idle."""
        if not self._device.drain(_DRAIN_SECONDS):
            _LOG.warning(
                "%s has failed, or has not completed its work within %g s after its collectives were aborted. The "
                "state of this process is not handed over; another one's is taken, or the last snapshot.",
                self.device,
                _DRAIN_SECONDS,
            )
            return False
        self.state.found.undo_step()
        if self.updates.undo_step():
            self._steps.revert_update()
        return True

    def _exit(self) -> NoReturn:
        self._agent.report(GaveWay())  # the exit code means nothing to the agent: a script may end with any
        # Not by SystemExit: the script's own handlers might wait for ranks that are gone, and on a thread other than
        # the main one it would end that alone. What the script has printed is not flushed by os._exit().
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_AGENT_LOST)


def _capture(
    training_state: TrainingState, device: torch.device, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Copy everything that the script's code changes; return a function that restores it.

    The copy has schedulers, other tracked objects, optimizer settings, buffers, random number generators, and what the
    script keeps beside them.

    Args:
        weights: weights that it may change, with copies
    """
    state = training_state.tracked
    assert state is not None
    undo_found = training_state.found.capture()
    others = state.others()
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    settings = [(group, key, _copy(value)) for group in groups for key, value in group.items() if key != "params"]
    buffers = [(buffer, _copy(buffer)) for module in state.modules for buffer in module.buffers()]
    random = random_state.capture(device)

    def restore() -> None:
        state.drop_gradients()
        state.restore_others(others)
        for group, key, value in settings:
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
        with torch.no_grad():
            for target, value in (*buffers, *weights):
                target.copy_(value)
        random_state.restore(random, device)
        undo_found()

    return restore


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
