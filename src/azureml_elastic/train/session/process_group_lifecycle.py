"""This process's place in the run, and what becomes of it when the round ends.

A round ends when a node or a worker is lost, or at a step that all have agreed on. This process then either *stays*: it
waits for its place in the next round, joins the new process group, takes the furthest state among the ranks and goes
on; or it *gives way*: it hands its state over to the node's agent and exits, and a new process continues from there.
In both cases the work of completed steps is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

from azureml_elastic.distributed.data_parallel import ElasticDataParallel
from azureml_elastic.distributed.process import pick_device
from azureml_elastic.distributed.process_groups import ProcessGroups, is_peer_error
from azureml_elastic.distributed.stuck_collective import is_stuck
from azureml_elastic.errors import ElasticError, RoundBroken
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, Agent, WorkerIdentity
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.session.audit import Audit
from azureml_elastic.train.session.exit_hooks import leave_quickly
from azureml_elastic.train.session.training_state import TrainingState

__all__ = ["ProcessGroupLifecycle"]

_LOG = logging.getLogger(__name__)

_PEER_SECONDS = 15.0
"""How long the agent has to confirm that a failed collective was a lost peer's fault: silence takes it some time."""

_OTHER_SECONDS = 0.5
"""The same for an error that does not look like one."""


class ProcessGroupLifecycle:
    """The process group of the round, and the way into the next one.

    Args:
        agent: that started the process.
        identity: of this process; not its place yet, where it is to stay over the rounds.
        audit: to be kept by round, if at all.

    Attributes:
        device: of this process.
        world: the ranks of the round.
        position: in the data.
        over: whether the session has ended, so that nothing is to be continued.
    """

    def __init__(self, agent: Agent, identity: WorkerIdentity, audit: Audit | None) -> None:
        self._agent = agent
        self._audit = audit
        self._training_state: TrainingState | None = None
        self._models: list[ElasticDataParallel] = []
        self._discarded: dict[str, Any] | None = None
        self.over = False
        self.device = pick_device(identity)
        self.world = ProcessGroups(agent.park() if agent.stays else identity, self.device)
        self._thread = threading.get_ident()
        agent.when_interrupted(self._on_interrupt)
        self._enter()
        self.position = Position(self.world.identity)
        if audit is not None:
            audit.enter(self.world.identity)

    def keep(self, training_state: TrainingState) -> None:
        """Continue from this state."""
        self._training_state = training_state

    def parallel(self, model: nn.Module, **options: Any) -> nn.Module:
        """Make a model data-parallel, for as long as this process lives."""
        with self.guard(stay=False):
            absorb = self._absorb if self._agent.stays else lambda _: False
            self._models.append(ElasticDataParallel(model, absorb, lambda: self.discarded, **options))
        return self._models[-1]

    def dissolve(self) -> None:
        """Let the last threads of the process group end, which do not survive the end of the interpreter."""
        for model in self._models:
            model.dissolve()

    def share_buffers(self) -> None:
        """Make the buffers of all ranks those of rank 0, as a training step would. A collective."""
        for model in self._models:
            model.share_buffers()

    @property
    def discarded(self) -> bool:
        """Whether the step at hand counts for nothing: its round has ended in the middle of it."""
        return self._discarded is not None

    def end_discarded_step(self) -> None:
        """Undo what the script has done in a step that counts for nothing."""
        assert self._discarded is not None
        self._kept.restore_others(self._discarded)
        self._discarded = None
        self.position.drop()

    def give_up(self, *, handed_over: bool = False) -> None:
        """Let the round end after the step at hand, as all ranks do.

        Args:
            handed_over: whether the agent has the state of this step.

        Raises:
            SystemExit: another process will go on.
        """
        steps = self._state.steps
        if self._can_stay():
            self._agent.stopped(steps)
            self._rejoin()
            return
        if not handed_over:
            self._state.hand_over()
        self._leave_group()
        self.over = True
        self._agent.stopped(steps)
        if self.world.identity.round:
            leave_quickly(self._agent.leave_code)
        raise SystemExit(self._agent.leave_code)

    def hand_over(self) -> bool:
        """Have the state survive this place without storage; return whether it will on *all* ranks. A collective."""
        return self.world.control.all_true(self._can_stay() or self._state.hand_over())

    @contextlib.contextmanager
    def guard(self, *, stay: bool = True) -> Iterator[None]:
        """Do something with the other ranks; where one of them is lost, go on with the next round, here or elsewhere.

        Args:
            stay: whether this process may go on with the next round.
        """
        try:
            yield
        except (RuntimeError, ElasticError) as error:
            if not self._is_interrupted(error):
                raise
            if stay and self._can_stay():
                self._rejoin()
            else:
                self._give_way()

    def on_uncaught(self, error: BaseException) -> None:
        """Look at what ends the script: a lost peer, met by a collective of the script's own, is no failure of it."""
        if is_peer_error(error) and not self.over and self._agent.wait_interrupted(_PEER_SECONDS):
            self._give_way()

    @property
    def _state(self) -> TrainingState:
        assert self._training_state is not None
        return self._training_state

    @property
    def _kept(self) -> Any:
        assert self._state.state is not None
        return self._state.state

    def _is_interrupted(self, error: BaseException) -> bool:
        peer = is_peer_error(error) or isinstance(error, RoundBroken)
        return self._agent.wait_interrupted(_PEER_SECONDS if peer else _OTHER_SECONDS)

    def _can_stay(self) -> bool:
        training_state = self._training_state
        return (
            self._agent.stays
            and training_state is not None
            and training_state.holds_full_state
            and self.world.owns_group
            and self.device.type == "cpu"  # with NCCL nobody can tell which step's kernels have completed
            and not self._kept.scales_gradients
        )

    def _absorb(self, error: RuntimeError) -> bool:
        """Go on with the next round after an error of the forward pass; return whether that was what it said."""
        if not is_peer_error(error) or not self._agent.wait_interrupted(_PEER_SECONDS) or not self._can_stay():
            return False
        self._rejoin()
        return True

    def _rejoin(self) -> None:
        """Take a place in the next round, with the furthest state among its ranks; the step at hand is discarded."""
        self._kept.drop_gradients()
        while True:
            self._leave_group()
            try:
                self.world.reopen(self._agent.park())
                self._agent.connected()
                for model in self._models:
                    model.reform()
                self._state.enter()
                break
            except (RuntimeError, ElasticError) as error:
                if isinstance(error, RoundBroken) or not self._is_interrupted(error) or not self._can_stay():
                    _LOG.warning("This process cannot go on with the next round, a new one will: %s", error)
                    self._give_way()
        self.position.enter(self.world.identity)
        if self._audit is not None:
            self._audit.enter(self.world.identity)
        if self.position.opened:
            self._discarded = self._kept.others()

    def _on_interrupt(self) -> None:
        """Make the collectives fail, those of the training thread too; called on the thread that hears the agent."""
        self.world.abort()
        threading.Thread(target=self._rescue, name="interrupted", daemon=True).start()

    def _rescue(self) -> None:
        """End this process where its training thread waits for what cannot come any more."""
        if is_stuck(self._thread, lambda: self._agent.wait_interrupted(0)):
            _LOG.warning(
                "A collective does not end although its connections have: gloo has forgotten what it was to send. This "
                "process hands its state over, and a new one goes on."
            )
            self._give_way()

    def _leave_group(self) -> None:
        """Have the thread that writes a checkpoint let go of the group."""
        if self._state.saving:
            self.world.abort()
            self._state.abandon_save()

    def _enter(self) -> None:
        while True:
            try:
                self.world.open()
            except RuntimeError as error:
                if not self._is_interrupted(error):
                    raise
                if not self._agent.stays:
                    self._exit()
                self.world.close()
                self.world.identity = self._agent.park()
            else:
                self._agent.connected()
                return

    def _give_way(self) -> NoReturn:
        """End this process: the round is over, and a new process continues from what this one hands over."""
        if self._training_state is not None and self.device.type == "cpu":
            # The kernels of a GPU may be in the middle of a step that looks complete from here.
            self._training_state.hand_over()
        self._exit()

    @staticmethod
    def _exit() -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_AGENT_LOST)
