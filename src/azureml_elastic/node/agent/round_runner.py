"""The loop that runs a round: what happens goes into the machine as events, and its actions are carried out."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from azureml_elastic.config import Plan
from azureml_elastic.node.agent.round_observer import RoundObserver
from azureml_elastic.node.agent.round_performer import RoundPerformer
from azureml_elastic.node.core.training import Training
from azureml_elastic.node.core.training_events import TrainingEvent
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.store_process import RoundStore

__all__ = ["RoundRunner"]


class RoundRunner:
    """Runs rounds, one after the other. For the agent's thread.

    Args:
        rendezvous: this node's part in the run.
        observer: what collects the events.
        performer: what carries out the actions.
        plan: configuration of the run.
        opens_session: whether the program uses this library, see :mod:`~azureml_elastic.node.agent.session_detection`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        observer: RoundObserver,
        performer: RoundPerformer,
        plan: Plan,
        *,
        opens_session: bool,
    ) -> None:
        self._rdzv = rendezvous
        self._observer = observer
        self._performer = performer
        self._plan = plan
        self._opens_session = opens_session

    def record(self, kind: type[Any], **fields: Any) -> None:
        """Record an event of the present round in the ledger."""
        self._performer.record(kind, **fields)

    def enter(self, assignment: Assignment) -> None:
        """Prepare for a round, before its workers start."""
        self._performer.begin(assignment, runs_engine=self._plan.distribution.runs_engine)
        self._observer.begin()

    def run(self, store: RoundStore) -> Training:
        """Run the round that this node has entered, once its workers have started, until it is over for this node."""
        membership, now = self._rdzv.membership, time.monotonic()
        training = Training(
            membership.assignment.round,
            self._rdzv.node,
            self._plan,
            opens_session=self._opens_session,
            entered=now - membership.seconds,
            now=now,
        )
        self._performer.workers_started()
        interval = self._plan.distribution.monitor_interval.total_seconds()  # the ends of processes wake nobody
        while not training.over:
            self._rdzv.wake.wait(max(0.0, min(interval, training.deadline - time.monotonic())))
            self._rdzv.wake.clear()
            for event in self._observer.look(training, store):
                if self._pass_on(event, training):
                    break
        return training

    def _pass_on(self, event: TrainingEvent, training: Training) -> bool:
        """Have the machine take an event, and those that answer its actions; return whether the round is over then."""
        events = deque([event])
        while events:
            for action in training.handle(events.popleft(), time.monotonic()):
                answer = self._performer.perform(action)
                if answer is not None:
                    events.append(answer)
        return training.over
