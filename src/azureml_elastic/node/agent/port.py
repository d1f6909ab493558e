"""What a node's agent does to the world: what happens to its workers, and what carries out what the node decides."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.forks.optimizer_steps import read_training
from azureml_elastic.ipc.worker_messages import Leave
from azureml_elastic.ledger.events import (
    HangDetected,
    HostStruck,
    NodeReady,
    RoundEntered,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.event_logs import ObservationLog
from azureml_elastic.node.agent.without_session import NewcomerWatch, SessionWatch
from azureml_elastic.node.agent.worker_group import WorkerGroup
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.events import Hang, Hung, Learned, StacksWritten, TrainingEvent
from azureml_elastic.node.core.training import Training
from azureml_elastic.node.failures.classification import describe_ending, hang_failure, root_cause, store_failure
from azureml_elastic.node.failures.host_faults import worker_fault
from azureml_elastic.node.failures.host_strikes import HostStrikes, incident_id
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.stack_dump import StackReporter, Worker
from azureml_elastic.node.hangs.waiting import waited_lines
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.node.rendezvous.link import Assignment
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.store_process import RoundStore, StoreProcess
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer
from azureml_elastic.plurals import counted


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


_LOG = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Time between two looks at the workers: the ends of processes wake nobody, nor do imports."""


class AgentPort:
    """The world of a node whose agent runs workers; a :class:`~azureml_elastic.node.driver.Port`."""

    def __init__(
        self,
        identity: NodeIdentity,
        rendezvous: Rendezvous,
        group: WorkerGroup,
        channel: Channel,
        preemption: PreemptionWatcher,
        hangs: HangWatch,
        newcomers: NewcomerWatch,
        session: SessionWatch,
        recorder: Recorder,
        strikes: HostStrikes,
        observations: ObservationLog,
        table: Table,
    ) -> None:
        distribution = identity.plan.distribution
        self._run_id = identity.run_id
        self._distribution = distribution
        self._rdzv = rendezvous
        self._group = group
        self._processes = group.workers
        self._channel = channel
        self._preemption = preemption
        self._hangs = hangs
        self._newcomers = newcomers
        self._session = session
        self._recorder = recorder
        self._strikes = strikes
        self._observations = observations
        self._table = table
        self._store = self._watched_store = RoundStore()
        self._pids: tuple[int, ...] = ()
        self._until = float("inf")
        self.newest = rendezvous.newest
        self.clock = rendezvous.clock
        self.receive = rendezvous.receive
        self.must_leave = rendezvous.must_leave
        self.view = rendezvous.view
        self.woken = rendezvous.woken
        self.marked = rendezvous.marked

    def readiness(self) -> ev.ReadinessSeen:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        workers = self._processes
        parked, ended = self._group.all(self._channel.workers.parked), bool(workers.exit_codes)
        return ev.ReadinessSeen(
            workers.is_preloaded, workers.ready, workers.settled, workers.importing, workers.alive, parked, ended
        )

    def workers(self) -> tuple[list[ev.WorkerVoted], ev.WorkersSeen]:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        # The report comes after the exit codes: a worker says that it is done before it ends, and an end of which the
        # report does not say so is a failure.
        votes = [ev.WorkerVoted(*vote) for vote in self._channel.workers.take_votes()]
        codes = self._processes.exit_codes
        return votes, replace(self._channel.workers.report(codes), importing=self._processes.importing)

    def own_events(self, training: Training, workers: ev.WorkersSeen) -> Iterator[ev.TrainingEvent]:
        """See :class:`~azureml_elastic.node.driver.Port`."""
        yield from self._look_at_notice()
        store = self._watched_store
        if (end := store.end) is not None:
            self._watched_store = RoundStore()
            first = self._rdzv.membership.assignment.global_ranks[0]
            yield ev.StoreEnded(store_failure(first, end.exit_code, end.error))
        elif training.leads and not training.connecting and store.has_keys():
            yield ev.StoreUsed()
        if self._newcomers.take_saved():
            yield ev.ProgramSaved()
        if workers.pace is not None:
            self._session.session_has_begun()
        elif training.leads and not training.runs_engine:
            opened = workers.in_session or bool(workers.present)
            self._session.look(self._processes.pids, connecting=training.connecting, opened=opened)
        yield from self._hangs.look(leads=training.leads)

    def wait(self, seconds: float) -> bool:
        """Wait until there may be something to do, at most for this time; return whether there may be.

        Raises:
            NodeLeaving: this node is in no round, and must leave.
        """
        machine = self._rdzv.machine
        if machine.training is None:
            return self._rdzv.wait(min(seconds, _LOOK_SECONDS) if machine.prepares else seconds)
        return self._rdzv.queue.wait(min(seconds, _LOOK_SECONDS))

    def perform(self, action: do.Action) -> ev.NodeEvent | None:
        """See :class:`~azureml_elastic.node.driver.Port`.

        Raises:
            RunSucceeded, RunFailed: the run has ended, or the workers cannot be started.
            NodeLeaving: this node must leave while it is in no round.
        """
        match action:
            case do.RecordReady():
                self._record(NodeReady)
            case do.ReplaceWorkers():
                self._group.replace()
            case do.FailEarly():
                raise self._group.early_end()
            case do.StartWorkers():
                self._start(self._rdzv.membership.assignment)
                return ev.WorkersStarted()
            case do.ReadFailures(gave_way):
                return self._read_failures(gave_way)
            case do.AwaitSave(waiting):
                self._newcomers.await_save(waiting, self._processes.pids)
            case do.ForgetSaves():
                self._newcomers.rest()
            case do.HoldWorkers():
                self._newcomers.hold()
            case do.AdoptVerdict() | do.LearnLesson() | do.WriteStacks():
                self._respond_to_hang(action)
            case do.Strike() | do.RecordFailure() | do.RecordHang() | do.NoteConnecting() | do.Log():
                self._enter(action)
            case _ if isinstance(action, do.WorkersAction):
                self._tell_workers(action)
            case _:
                return self._rdzv.perform(action)
        return None

    def close(self) -> None:
        """End the store of the round."""
        self._store.close()

    def _start(self, assignment: Assignment) -> None:
        """Give the workers their places in a round."""
        rdzv, workers, round_ = self._rdzv, self._processes, assignment.round
        store = RoundStore()
        if assignment.listener is not None:
            store = StoreProcess(assignment, workers.preload_server, rdzv.queue)
        # Closed at the end: the workers of the round before may have used its store until they were interrupted.
        before, self._store, self._watched_store, self._until = self._store, store, store, float("inf")
        if assignment.rank == 0 and not (self._channel.workers.in_session or self._distribution.runs_engine):
            workers.finish_stopping()
            saves = [read_training(self._channel.folder, pid).saved_at for pid in self._pids]
            self._observations.left(max(saves, default=0.0))
        self._observations.entered(round_.number, round_.world_size)
        self._newcomers.rest()
        self._hangs.begin(round_.number, assignment.global_ranks[0])
        pointer = None
        if assignment.rank == 0:
            pointer = CheckpointPointer(self._table, round_.number, rdzv.incarnation)
        names = tuple(member.node for member in round_.members)
        self._record(RoundEntered, rank=assignment.rank, members=names, world_size=round_.world_size)
        nodes, count = counted(len(names), "node"), counted(round_.world_size, "worker")
        _LOG.info("Round %d: rank %d of %s, %s.", round_.number, assignment.rank, nodes, count)
        run_key, key = rdzv.authenticator.key, b""
        if run_key is not None and self._distribution.runs_engine:  # for its own connections
            key = hmac.digest(run_key, b"azureml-elastic engine", "sha256")  # it does not reveal the run's
        self._group.enter(assignment, pointer, self._run_id, self._distribution.max_restarts, key)
        before.close()
        self._record(WorkersStarted, pids=workers.pids)
        self._pids = workers.pids

    def _look_at_notice(self) -> Iterator[ev.TrainingEvent]:
        """Yield a notice, which is final from then on: it is about to be announced."""
        if not self._preemption.noticed:
            return
        until = self.clock() + self._preemption.seconds_left
        if until < self._until - _SOONER_SECONDS and self._preemption.commit_to_leave():
            self._until = until
            yield ev.Noticed(until, self._preemption.reason)

    def _record(self, kind: type[Any], **fields: Any) -> None:
        """Record an event of the present round in the ledger."""
        self._recorder.record(kind, self._rdzv.machine.last_round, **fields)

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
                self._processes.begin_stopping(seconds)
            case do.FlushProgress():
                self._channel.record_last_step()

    def _read_failures(self, gave_way: frozenset[int]) -> ev.Failures:
        ranks = self._rdzv.membership.assignment.global_ranks
        failed = {
            local_rank: failure
            for local_rank, failure in self._processes.failures().items()
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

    def _respond_to_hang(self, action: do.HangAction) -> None:
        match action:
            case do.AdoptVerdict(hang):
                self._hangs.detector.fired(hang)
            case do.LearnLesson(lesson):
                self._hangs.detector.learn(lesson)
            case do.WriteStacks(hang):
                ranks = self._rdzv.membership.assignment.global_ranks
                workers = [Worker(each, ranks[each], pid) for each, pid in enumerate(self._processes.pids)]
                self._hangs.write(hang, workers)

    def _enter(self, action: do.Entry) -> None:
        match action:
            case do.Strike(host, reason):
                self._strikes.strike(host, reason, incident_id(self._rdzv.membership.assignment.round))
                self._record(HostStruck, host=host, reason=reason)
            case do.RecordFailure(failure, step):
                self._record(
                    WorkerFailed,
                    rank=failure.rank,
                    exit_code=failure.exit_code,
                    message=failure.message,
                    failure_kind=failure.kind,
                    signature=failure.signature,
                    step=step,
                )
            case do.RecordHang(hang):
                self._record(
                    HangDetected, step=hang.step, seconds=hang.waited, limit_seconds=hang.limit, phase=hang.phase
                )
            case do.NoteConnecting():
                self._observations.connecting(record=self._rdzv.machine.leads)
            case do.Log(text, warning):
                _LOG.log(logging.WARNING if warning else logging.INFO, "%s", text)
