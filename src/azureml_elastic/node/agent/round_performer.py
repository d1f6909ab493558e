"""Carries out the actions of :class:`~azureml_elastic.node.core.training.Training`."""

from __future__ import annotations

import logging
from typing import Any

from azureml_elastic.ledger.events import HangDetected, HostStruck, RoundReopened, RunEnded, WorkerFailed
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.hang_watch import HangWatch
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.observation_log import ObservationLog
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.core import training_actions as do
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.messages import Done, Report
from azureml_elastic.node.failures.classification import describe_ending, root_cause
from azureml_elastic.node.failures.host_strikes import HostStrikes, incident_id, worker_fault
from azureml_elastic.node.hangs.stack_dump import Worker
from azureml_elastic.node.io.event_recorder import Recorder
from azureml_elastic.node.preload.state_lookups import read_lookups
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.state.assignment import Assignment

__all__ = ["RoundPerformer"]

_LOG = logging.getLogger(__name__)


class RoundPerformer:
    """Carries out what a member of a round decides, and returns what comes of it. For the agent's thread.

    Args:
        rendezvous: this node's place in the round.
        workers: processes of the workers.
        channel: server for their sessions.
        recorder: writer of the ledger.
        strikes: records of faults of hosts.
        hangs: watch for hangs.
        newcomers: watch for what waiting nodes wait for.
        observations: what is seen of rounds without a session.
    """

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
            assignment: this node's place in it.
            runs_engine: whether the worker is the process of an engine.
        """
        round_ = assignment.round
        if assignment.rank == 0 and not (self._channel.workers.in_session or runs_engine):
            # Between the last save of the old workers and the first one of the new: what they continue from is there.
            self._workers.finish_stopping()
            self._observations.left(read_lookups(self._channel.folder, self._pids))
        self._observations.entered(round_.number, round_.world_size)
        self._newcomers.rest()
        self._hangs.begin(round_.number, assignment.global_ranks[0])

    def workers_started(self) -> None:
        """The workers of the round have been started, or have received their assignments."""
        self._pids = self._workers.pids

    def perform(self, action: do.TrainingAction) -> ev.TrainingEvent | None:
        """Carry out one action, and return the event that answers it, where one does."""
        match action:
            case do.ToLeader() | do.ToMembers() | do.ReportDone() | do.Disconnect():
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

    def _send(self, action: do.Message) -> None:
        match action:
            case do.ToLeader(body):
                self._rdzv.membership.send_to_leader(Report(body))
            case do.ToMembers(body):
                self._rdzv.hub.broadcast(body)
            case do.ReportDone():
                self._rdzv.membership.send_to_leader(Done())
            case do.Disconnect():
                self._rdzv.membership.disconnect()

    def _tell_workers(self, action: do.WorkersAction) -> None:
        workers = self._channel.workers
        match action:
            case do.AskWorkers(proposal):
                workers.prepare(proposal)
            case do.TellWorkers(decision):
                workers.decide(decision)
            case do.MoveEngine():
                workers.leave()
            case do.InterruptWorkers():
                workers.interrupt()
            case do.ReleaseWorkers():
                workers.release()
            case do.StopWorkers(seconds):
                self._workers.begin_stopping(seconds)
            case do.FlushProgress():
                self._channel.record_last_step()

    def _change_row(self, action: do.RowAction) -> ev.RowWritten:
        round_end = self._rdzv.round_end
        if isinstance(action, do.Close):
            mine = round_end.close(
                succeeded=action.succeeded,
                message=action.message,
                exit_code=action.exit_code,
                failures=action.failures,
            )
            if mine:
                self.record(RunEnded, succeeded=action.succeeded, message=action.message)
            return ev.RowWritten(mine)
        mine = round_end.reopen(
            action.reason,
            lost=action.lost,
            finishing=action.finishing,
            finishing_seconds=action.finishing_seconds,
            failures=action.failures,
            round_failed=action.round_failed,
        )
        if not mine:
            return ev.RowWritten(mine)
        self.record(RoundReopened, reason=action.reason, lost=tuple(sorted(action.lost)))
        return ev.RowWritten(mine, round_end.left_in_order(action.lost))

    def _read_failures(self, gave_way: frozenset[int]) -> ev.Failures:
        ranks = self._rdzv.membership.assignment.global_ranks
        failed = {
            local_rank: failure
            for local_rank, failure in self._workers.failures().items()
            if local_rank not in gave_way
        }
        if not failed:
            return ev.Failures()
        cause = root_cause({ranks[each]: failure for each, failure in failed.items()}, self._workers.stderrs)
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
                self._hangs.adopt(hang)
            case do.LearnLesson(lesson):
                self._hangs.learn(lesson)
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
