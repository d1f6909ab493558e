"""What happens in a round, collected as events for :class:`~azureml_elastic.node.core.training.Training`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.hang_watch import HangWatch
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.training import Training
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.store_process import RoundStore

__all__ = ["RoundObserver"]

_SOONER_SECONDS = 0.01
"""By how much a notice's deadline must be earlier than the one before to count as another."""


class RoundObserver:
    """Looks at all that a round depends on, and yields what has changed. Decides nothing. For the agent's thread.

    Args:
        rendezvous: this node's place in the round.
        workers: processes of the workers.
        channel: server for their sessions.
        preemption: watch for notices of this node's preemption.
        hangs: watch for hangs.
        newcomers: watch for what waiting nodes wait for.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        workers: Workers,
        channel: Channel,
        preemption: PreemptionWatcher,
        hangs: HangWatch,
        newcomers: NewcomerWatch,
    ) -> None:
        self._rdzv = rendezvous
        self._workers = workers
        self._channel = channel
        self._preemption = preemption
        self._hangs = hangs
        self._newcomers = newcomers
        self._reported: set[str] = set()
        self._round = ev.RoundSeen()
        self._report = ev.WorkersSeen()
        self._until = float("inf")

    def begin(self) -> None:
        """Forget the round before."""
        self._reported = set()
        self._round, self._report, self._until = ev.RoundSeen(), ev.WorkersSeen(), float("inf")

    def look(self, training: Training, store: RoundStore) -> Iterator[ev.TrainingEvent]:
        """Yield what has happened since the last call, and at the end that time has passed.

        What members have sent comes before what is known of the round: who has stopped may be gone. That comes before
        what this node's workers have done: their end may be a lost node's fault.

        Args:
            training: this node's part in the round.
            store: the round's store.
        """
        seen = self._rdzv.status()
        messages = self._rdzv.inbox.take(self._rdzv.membership.last_round)  # with all that a lost member has sent
        votes = self._channel.workers.take_votes()
        codes = self._workers.exit_codes
        report = self._channel.workers.report(codes)  # after the votes and codes, and just before a step is proposed
        if training.runs_engine and training.are_all(report.finished) and self._is_new("ended"):
            yield ev.ProgramEnded()  # whatever has happened to other nodes since
        for message in messages:
            if isinstance(message, ev.FromMember):
                yield message
        if seen != self._round:
            self._round = seen
            yield seen
        if report != self._report:
            self._report = report
            yield report
        for message in messages:
            if isinstance(message, ev.FromLeader):
                yield message
        for local_rank, vote in votes:
            yield ev.WorkerVoted(local_rank, vote)
        yield from self._look_at_notice()
        if store.ended and self._is_new("store"):
            yield ev.StoreEnded()
        if training.leads and not training.connecting and store.has_keys():
            yield ev.StoreUsed()
        if self._newcomers.take_saved():
            yield ev.ProgramSaved()
        yield from self._hangs.look(leads=training.leads)
        yield ev.TimePassed()

    def _look_at_notice(self) -> Iterator[ev.TrainingEvent]:
        """Yield a notice, which is final from then on: it is about to be announced."""
        if not self._preemption.noticed:
            return
        until = time.monotonic() + self._preemption.seconds_left
        if until < self._until - _SOONER_SECONDS and self._preemption.commit_to_leave():
            self._until = until
            yield ev.Noticed(until, self._preemption.reason)

    def _is_new(self, what: str) -> bool:
        """Return whether this has not been reported in this round, and is reported now."""
        if what in self._reported:
            return False
        self._reported.add(what)
        return True
