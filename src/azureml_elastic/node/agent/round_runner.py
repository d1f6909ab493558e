"""The loop that runs a round: what happens goes into the machine as events, and its actions are carried out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from azureml_elastic.config import Plan
from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.forks.optimizer_steps import read_training
from azureml_elastic.ipc.worker_messages import Leave
from azureml_elastic.ledger.events import HangDetected, HostStruck, RoundReopened, RunEnded, WorkerFailed
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.event_logs import ObservationLog
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.session_watch import SessionWatch
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Hang, Hung, Learned, StacksWritten, TrainingEvent
from azureml_elastic.node.core.messages import Done, Report
from azureml_elastic.node.core.training import Training
from azureml_elastic.node.failures.classification import describe_ending, hang_failure, root_cause, store_failure
from azureml_elastic.node.failures.host_faults import worker_fault
from azureml_elastic.node.failures.host_strikes import HostStrikes, incident_id
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.stack_dump import StackReporter, Worker
from azureml_elastic.node.hangs.waiting import waited_lines
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.store_process import RoundStore


class HangWatch:
    """Reports verdicts as events, and carries out what follows. For the agent's thread."""

    def __init__(self, detector: HangDetector, reporter: StackReporter) -> None:
        self.detector = detector
        self._reporter = reporter
        self._number = 0
        self._rank = 0
        self._writing = False

    def begin(self, number: int, rank: int) -> None:
        """A round begins.

        Args:
            rank: rank of this node's first worker in it.
        """
        self._number, self._rank, self._writing = number, rank, False
        self.detector.begin()

    def look(self, *, leads: bool) -> Iterator[TrainingEvent]:
        """Yield what has happened; to be called several times a second while workers run.

        Args:
            leads: whether this is rank 0's node.
        """
        if leads and (lesson := self.detector.lesson()) is not None:
            yield Learned(lesson)
        if (hang := self.detector.verdict(leads=leads)) is not None:
            yield Hung(hang, hang_failure(self._rank, FAILED, hang.reason))
        if self._writing and self._reporter.done:
            self._writing = False
            yield StacksWritten()

    def write(self, hang: Hang, workers: Sequence[Worker]) -> None:
        """Begin to collect the stacks of the workers."""
        self._writing = True
        self._reporter.start(hang.reason, self._number, workers, self.detector.steps)


_SOONER_SECONDS = 0.01
"""By how much a notice's deadline must be earlier than the one before to count as another."""


class RoundObserver:
    """Looks at all that a round depends on, and yields what has changed. Decides nothing. For the agent's thread."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        workers: Workers,
        channel: Channel,
        preemption: PreemptionWatcher,
        hangs: HangWatch,
        newcomers: NewcomerWatch,
        session: SessionWatch,
    ) -> None:
        self._rdzv = rendezvous
        self._workers = workers
        self._channel = channel
        self._preemption = preemption
        self._hangs = hangs
        self._newcomers = newcomers
        self._session = session
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

        What members have sent, and what rank 0 has decided, comes before what is known of the round: who has stopped,
        or leaves as decided, may be gone. That comes before what this node's workers have done: their end may be a lost
        node's fault.
        """
        seen = self._rdzv.status()
        messages = self._rdzv.inbox.take(self._rdzv.membership.last_round)  # with all that a lost member has sent
        # The report comes after the exit codes: a worker says that it is done before it ends, and an end of which the
        # report does not say so is a failure.
        votes = self._channel.workers.take_votes()
        codes = self._workers.exit_codes
        report = self._channel.workers.report(codes)  # after the votes and codes, and just before a step is proposed
        report = replace(report, importing=self._workers.importing)
        if training.runs_engine and training.are_all(report.finished) and self._is_new("ended"):
            yield ev.ProgramEnded()  # whatever has happened to other nodes since
        early, others = ev.in_order(messages)
        yield from early
        if seen != self._round:
            self._round = seen
            yield seen
        if report != self._report:
            self._report = report
            yield report
        yield from others
        for local_rank, vote in votes:
            yield ev.WorkerVoted(local_rank, vote)
        yield from self._look_at_notice()
        if (end := store.end) is not None and self._is_new("store"):
            first = self._rdzv.membership.assignment.global_ranks[0]
            yield ev.StoreEnded(store_failure(first, end.exit_code, end.error))
        if training.leads and not training.connecting and store.has_keys():
            yield ev.StoreUsed()
        if self._newcomers.take_saved():
            yield ev.ProgramSaved()
        if report.pace is not None:
            self._session.session_has_begun()
        elif training.leads and not training.runs_engine:
            opened = report.in_session or bool(report.present)
            self._session.look(self._workers.pids, connecting=training.connecting, opened=opened)
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


_LOG = logging.getLogger(__name__)


class RoundPerformer:
    """Carries out what a member of a round decides, and returns what comes of it. For the agent's thread."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        workers: Workers,
        channel: Channel,
        recorder: Recorder,
        strikes: HostStrikes,
        hangs: HangWatch,
        newcomers: NewcomerWatch,
        observations: ObservationLog,
    ) -> None:
        self._rdzv = rendezvous
        self._workers = workers
        self._channel = channel
        self._recorder = recorder
        self._strikes = strikes
        self._hangs = hangs
        self._newcomers = newcomers
        self._observations = observations
        self._pids: tuple[int, ...] = ()

    def begin(self, assignment: Assignment, *, runs_engine: bool) -> None:
        """Prepare for a round, and look back at the one before.

        Args:
            runs_engine: whether the worker is the process of an engine.
        """
        round_ = assignment.round
        if assignment.rank == 0 and not (self._channel.workers.in_session or runs_engine):
            self._workers.finish_stopping()
            saves = [read_training(self._channel.folder, pid).saved_at for pid in self._pids]
            self._observations.left(max(saves, default=0.0))
        self._observations.entered(round_.number, round_.world_size)
        self._newcomers.rest()
        self._hangs.begin(round_.number, assignment.global_ranks[0])

    def workers_started(self) -> None:
        """The workers of the round have been started, or have received their assignments."""
        self._pids = self._workers.pids

    def perform(self, action: do.TrainingAction) -> ev.TrainingEvent | None:
        """Carry out one action, and return the event that answers it, where one does."""
        match action:
            case do.ToLeader() | do.ToMembers() | do.ReportDone() | do.Disconnect() | do.AwaitEnd():
                self._send(action)
            case do.Reopen() | do.Close():
                return self._change_row(action)
            case do.ReadFailures(gave_way):
                return self._read_failures(gave_way)
            case do.FindPair():
                pair = self._rdzv.take_unreachable_pair()
                return None if pair is None else ev.PairFound(str(pair))
            case do.AwaitSave() | do.ForgetSaves() | do.HoldWorkers():
                return self._await_save(action)
            case do.AdoptVerdict() | do.LearnLesson() | do.WriteStacks():
                self._respond_to_hang(action)
            case do.Strike() | do.RecordFailure() | do.RecordHang() | do.NoteConnecting() | do.Log():
                self._enter(action)
            case _:
                self._tell_workers(action)
        return None

    def record(self, kind: type[Any], **fields: Any) -> None:
        """Record an event of the present round in the ledger."""
        self._recorder.record(kind, self._rdzv.membership.last_round, **fields)

    def _send(self, action: do.Sending) -> None:
        match action:
            case do.ToLeader(body):
                self._rdzv.membership.send_to_leader(Report(body))
            case do.ToMembers(body):
                self._rdzv.hub.broadcast(body)
            case do.ReportDone():
                self._rdzv.membership.send_to_leader(Done())
            case do.Disconnect():
                self._rdzv.membership.disconnect()
            case do.AwaitEnd():
                self._rdzv.round_end.await_other(action)

    def _tell_workers(self, action: do.WorkersAction) -> None:
        workers = self._channel.workers
        match action:
            case do.AskWorkers(proposal):
                workers.send(proposal)
            case do.TellWorkers(decision):
                workers.send(decision)
            case do.MoveEngine():
                workers.send(Leave())
            case do.InterruptWorkers():
                workers.interrupt()
            case do.StopWorkers(seconds):
                self._newcomers.rest()  # else a worker that saves could wait for this node to let it go on
                self._workers.begin_stopping(seconds)
            case do.FlushProgress():
                self._channel.record_last_step()

    def _change_row(self, action: do.RowAction) -> ev.EndWritten:
        round_end = self._rdzv.round_end
        if isinstance(action, do.Close):
            mine = round_end.close(action)
            if mine:
                self.record(RunEnded, succeeded=action.succeeded, message=action.message)
            return ev.EndWritten(mine)
        written = round_end.reopen(action)
        if written is None:
            return ev.EndWritten(mine=False)
        self.record(RoundReopened, reason=action.reason, lost=tuple(sorted(action.lost)))
        if written.closed:  # it was one failed round too many
            self.record(RunEnded, succeeded=False, message=written.message)
        return ev.EndWritten(True, round_end.left_in_order(action.lost))

    def _read_failures(self, gave_way: frozenset[int]) -> ev.Failures:
        ranks = self._rdzv.membership.assignment.global_ranks
        failed = {
            local_rank: failure
            for local_rank, failure in self._workers.failures().items()
            if local_rank not in gave_way
        }
        if not failed:
            return ev.Failures()
        by_rank = {ranks[each]: failure for each, failure in failed.items()}
        cause = root_cause(by_rank)
        if cause.kind == "timeout":
            cause = replace(cause, message=f"{waited_lines(by_rank)}{cause.message}")
        codes = {local_rank: failure.exitcode for local_rank, failure in failed.items()}
        return ev.Failures(codes, cause, describe_ending(cause), worker_fault(cause.exit_code, cause.message))

    def _await_save(self, action: do.SaveAction) -> ev.TrainingEvent | None:
        match action:
            case do.AwaitSave(waiting):
                self._newcomers.await_save(waiting, self._workers.pids)
            case do.ForgetSaves():
                self._newcomers.rest()
            case do.HoldWorkers():
                return ev.WorkersHeld() if self._newcomers.hold() else None
        return None

    def _respond_to_hang(self, action: do.HangAction) -> None:
        match action:
            case do.AdoptVerdict(hang):
                self._hangs.detector.fired(hang)
            case do.LearnLesson(lesson):
                self._hangs.detector.learn(lesson)
            case do.WriteStacks(hang):
                ranks = self._rdzv.membership.assignment.global_ranks
                workers = [Worker(each, ranks[each], pid) for each, pid in enumerate(self._workers.pids)]
                self._hangs.write(hang, workers)

    def _enter(self, action: do.Entry) -> None:
        match action:
            case do.Strike(host, reason):
                self._strikes.strike(host, reason, incident_id(self._rdzv.membership.assignment.round))
                self.record(HostStruck, host=host, reason=reason)
            case do.RecordFailure(failure, step):
                self.record(
                    WorkerFailed,
                    rank=failure.rank,
                    exit_code=failure.exit_code,
                    message=failure.message,
                    failure_kind=failure.kind,
                    signature=failure.signature,
                    step=step,
                )
            case do.RecordHang(hang):
                self.record(
                    HangDetected, step=hang.step, seconds=hang.waited, limit_seconds=hang.limit, phase=hang.phase
                )
            case do.NoteConnecting():
                self._observations.connecting(record=self._rdzv.membership.leads)
            case do.Log(text, warning):
                _LOG.log(logging.WARNING if warning else logging.INFO, "%s", text)


class RoundRunner:
    """Runs rounds, one after the other. For the agent's thread.

    Args:
        opens_session: whether the program uses this library.
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
            # Before the look: what happens during it sets the event again, and is seen at once in the next turn.
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
