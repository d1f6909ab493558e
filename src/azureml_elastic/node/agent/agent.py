"""Agent of one node: runs its workers through all rounds of the run, independently of the loss of other nodes.

The agent does without torch, whose import takes longer than everything else on the way to the first step: the preload
server has it. What torch's own agent does through rank 0's store between rendezvous and exit (rank assignment, exit
barrier) is replaced: ranks follow from the sealed round, the end of the run from the hub and the table.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.errors import RunSucceeded
from azureml_elastic.ledger.events import (
    HostStruck,
    NodeReady,
    RoundEntered,
    RoundReopened,
    RunEnded,
    WorkersStarted,
)
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.engine_program import derive_engine_key
from azureml_elastic.node.agent.last_state import keep_last_state
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.observation_log import ObservationLog
from azureml_elastic.node.agent.peer_messages import PeerMessenger
from azureml_elastic.node.agent.worker_group import WorkerGroup
from azureml_elastic.node.agent.worker_processes import Workers
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.core.messages import Done, Report
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.failures.classification import FailedWorker, Failure, hang_failure, root_cause
from azureml_elastic.node.failures.host_strikes import HostStrikes, faulty_members, incident_id, worker_fault
from azureml_elastic.node.failures.restart_decision import apply_restart_policy
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.response import HangResponse
from azureml_elastic.node.hangs.stack_dump import Worker
from azureml_elastic.node.hangs.stack_report import StackReporter
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.io.event_recorder import Recorder
from azureml_elastic.node.preemption.watcher import PreemptionWatcher
from azureml_elastic.node.preload.state_lookups import read_lookups
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.state.assignment import Assignment, Status
from azureml_elastic.node.rendezvous.store_process import RemoteStore, RoundStore, enter, open_round_store
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer
from azureml_elastic.plurals import counted

__all__ = ["ExitReason", "NodeAgent"]

_LOG = logging.getLogger(__name__)

_SETTLE_SECONDS = 0.5
"""How long a failed worker's agent waits for the news that another node is the cause."""

_ALONE_SECONDS = 60.0
"""Time after which a single worker that has not used the round's store counts as one that trains."""

_ANNOUNCEMENT_SECONDS = 1.0
"""How long a node whose workers make their imports themselves waits for the announcements of others."""

_CLOSING_SECONDS = 2.0
"""How long rank 0's node has to mark the end of the run before another one does."""


class ExitReason(Enum):
    """How this node's part ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True)
class _RoundEnded:
    """A round is over for this node.

    Args:
        part: how its part in the run has ended, ``None`` if another round follows.
    """

    part: ExitReason | None


class NodeAgent:
    """Runs this node's workers through all rounds of the run.

    Args:
        workers: worker processes of the node.
        slots: number of workers.
        identity: identity of the node, with the plan of the run.
        rendezvous: this node's part in the run.
        channel: server for the workers' sessions.
        recorder: writer of the ledger.
        table: table with the checkpoint's row.
        preemption: watch for notices of this node's preemption.
        strikes: records of faults of hosts.
        watch: detector of hanging workers.
        opens_session: whether the program uses this library, see :mod:`~azureml_elastic.node.agent.session_detection`.
        newcomers: decision when newcomers may end a round without a session.
    """

    def __init__(
        self,
        workers: Workers,
        slots: int,
        identity: NodeIdentity,
        *,
        rendezvous: Rendezvous,
        channel: Channel,
        recorder: Recorder,
        table: Table,
        preemption: PreemptionWatcher,
        strikes: HostStrikes,
        watch: HangDetector,
        opens_session: bool,
        newcomers: NewcomerWatch,
    ) -> None:
        self._workers = workers
        self._slots = slots
        self._run_id = identity.run_id
        self._rdzv = rendezvous
        self._channel = channel
        self._recorder = recorder
        self._table = table
        self._plan = plan = identity.plan
        self._preemption = preemption
        self._strikes = strikes
        self._opens_session = opens_session
        self._runs_engine = plan.distribution.runs_engine
        self._newcomers = newcomers
        self._observations = ObservationLog(recorder, excluded=identity.folder.absolute())
        self._group = WorkerGroup(
            workers,
            channel,
            slots,
            identity.node,
            stays=plan.distribution.keeps_processes(opens_session=opens_session),
            handover_seconds=plan.distribution.handover_timeout.total_seconds(),
            wait=self._wait_for_a_place,
        )
        dumper = StackReporter(
            channel.folder, identity.folder / "stacks", identity.node, self._processes, rendezvous.wake.set
        )
        hangs = HangResponse(
            watch,
            dumper,
            recorder,
            identity.node,
            broadcast=rendezvous.hub.broadcast,
            send=lambda body: rendezvous.membership.link.send(Report(body)),
        )
        self._peers = PeerMessenger(
            rendezvous, channel, hangs, opens_session=opens_session, runs_engine=self._runs_engine, newcomers=newcomers
        )
        self._store: RoundStore = RemoteStore()
        self._pids: tuple[int, ...] = ()
        self._announced = False
        self._done = False
        self._ending: ExitReason | None = None
        self.failure: Failure | None = None
        """Set when this node's worker ended the run."""

    def take_part(self) -> ExitReason:
        """Take part in the run until it ends or this node has to leave.

        Raises:
            RunSucceeded, RunFailed: another node has ended the run, or the workers cannot be started.
            InterruptedError: this node must leave while it waits for a round.
        """
        with contextlib.ExitStack() as stack:  # one step after the other, whatever fails
            stack.callback(self._close_store)
            stack.push(self._end_workers)
            stack.callback(self._newcomers.close)
            self._get_ready_to_join()
            self._recorder.record(NodeReady, 0)
            while True:
                if self._group.stays:
                    self._group.get_ready(self._rdzv.is_left_out)
                self._enter_round()
                ending = self._watch_round()
                if ending is not None:
                    self._ending = ending
                    return ending

    def _close_store(self) -> None:
        self._store.close()

    def _end_workers(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """End the workers. Whatever ends this agent may end those of all nodes: the last one to hold a state writes it.

        Nobody needs it where the run has ended well, or where the workers have saved at an agreed step boundary.
        """
        saved = self._ending is ExitReason.LEFT and self._group.all(self._channel.workers.stopped)
        last = self._ending is not ExitReason.SUCCEEDED and not saved and kind is not RunSucceeded
        if last and self._group.stays:
            self._channel.workers.release()
        self._workers.begin_stopping()
        self._workers.finish_stopping()
        held = self._channel.take_state() if last else None
        if held is not None:
            if error is not None:
                _LOG.warning("This agent ends: %s: %s", type(error).__name__, error)
            keep_last_state(*held, self._preemption)

    def _get_ready_to_join(self) -> None:
        """Wait until this node's workers could start, or for a while."""
        round_ = self._rdzv.read_round()
        if round_.number > 1 or round_.state == "sealed":
            self._group.warm_up(self._rdzv.given_up, settle=round_.state == "sealed")
        elif self._plan.resources.max_instance_count > 1:
            # A round that is sealed before its workers can start begins no earlier, but without the nodes that come a
            # moment later: each of them has announced itself by then, and the first round waits for these.
            if self._workers.is_preloaded:
                self._group.warm_up(self._rdzv.given_up, settle=False)
            else:
                self._rdzv.wake.wait(_ANNOUNCEMENT_SECONDS)

    # --- into a round ------------------------------------------------------------------------------------------------

    def _enter_round(self) -> None:
        """Take a place in the next round, and give the workers theirs."""
        assignment, store = enter(self._rdzv, self._open_store, self._get_ready)
        # Closed at the end: the workers of the round before may have used its store until they were interrupted.
        before, self._store = self._store, store
        round_ = assignment.round
        leads = assignment.rank == 0
        if leads and not (self._channel.workers.in_session or self._runs_engine):
            # Between the last save of the old workers and the first one of the new: what they continue from is there.
            self._workers.finish_stopping()
            self._observations.left(read_lookups(self._channel.folder, self._pids))
        self._observations.entered(round_.number, round_.world_size)
        pointer = CheckpointPointer(self._table, round_.number, self._rdzv.incarnation) if leads else None
        names = tuple(member.node for member in round_.members)
        self._peers.begin(round_, leads=leads)
        self._announced = self._done = False
        self._record(RoundEntered, rank=assignment.rank, members=names, world_size=round_.world_size)
        nodes, workers = counted(len(names), "node"), counted(round_.world_size, "worker")
        _LOG.info("Round %d: rank %d of %s, %s.", round_.number, assignment.rank, nodes, workers)
        engine_key = derive_engine_key(self._rdzv.authenticator.key) if self._runs_engine else b""
        self._group.enter(assignment, pointer, self._run_id, self._plan.distribution.max_restarts, engine_key)
        before.close()
        self._pids = self._workers.pids
        self._record(WorkersStarted, pids=self._pids)
        self._peers.workers_started(round_.world_size, store, self._pids)

    def _open_store(self, assignment: Assignment) -> RoundStore | None:
        return open_round_store(assignment, self._rdzv, lambda: self._workers.preload_server)

    def _get_ready(self) -> bool:
        """Wait for the script's imports before the round ends for this node; return whether that took time."""
        return self._group.warm_up(self._rdzv.given_up, settle=False)

    def _processes(self) -> list[Worker]:
        """Return the workers, for their stacks."""
        ranks = self._rdzv.membership.assignment.global_ranks
        return [Worker(local_rank, ranks[local_rank], pid) for local_rank, pid in enumerate(self._workers.pids)]

    @property
    def _leavers(self) -> frozenset[str]:
        return frozenset(self._peers.leavers)

    def _wait(self) -> None:
        self._rdzv.wake.wait(self._plan.distribution.monitor_interval.total_seconds())
        self._rdzv.wake.clear()

    def _wait_for_a_place(self) -> None:
        self._wait()
        if self._preemption.noticed and self._preemption.commit_to_leave():
            raise InterruptedError("the node is being preempted")

    # --- a round -----------------------------------------------------------------------------------------------------

    def _watch_round(self) -> ExitReason | None:
        """Watch the round until it is over; ``None`` means that another round follows."""
        while True:
            self._wait()
            ended = self._look_at_round() or self._look_at_workers()
            if ended is not None:
                return ended.part

    def _look_at_round(self) -> _RoundEnded | None:
        """End the round for what has happened to other nodes, to this one, or between them."""
        if self._runs_engine and self._group.all(self._channel.workers.finished):
            return _RoundEnded(self._close_run())  # the program has ended, whatever has happened to other nodes since
        status = self._rdzv.status()
        if status.broken:
            return _RoundEnded(self._end_round(_why(status, self._rdzv.node), lost=status.lost))
        self._peers.process_events()
        reason = self._peers.lead(status, done=self._done)
        if self._peers.connecting:
            self._observations.connecting(record=self._rdzv.membership.leads)
        if reason is not None:
            return _RoundEnded(self._end_round(reason, lost=self._leavers))
        if self._preemption.noticed:
            self._announce_leaving()
            if self._announced and self._preemption.overdue:
                node = self._rdzv.node
                return _RoundEnded(self._end_round(f"{node} was preempted", lost=frozenset({node})))
        if self._store.ended:
            return _RoundEnded(self._store_ended())
        if (gap := self._peers.gap()) is not None:
            reason = f"the workers cannot connect: {gap}"
            return _RoundEnded(self._end_round(reason, lost=frozenset(), round_failed=True))
        if (hang := self._peers.hang()) is not None:
            return _RoundEnded(self._workers_hang(hang))
        return _RoundEnded(self._close_run()) if self._done and status.all_done else None

    def _look_at_workers(self) -> _RoundEnded | None:
        """End the round for what this node's workers have done."""
        if self._done:
            return None
        if self._group.all(self._channel.workers.stopped):
            # All have saved; exit codes after that are irrelevant.
            if not self._runs_engine:
                return _RoundEnded(self._end_round("rescale at a step boundary", lost=self._leavers))
            self._peers.announce_leaving()
            return None
        codes = self._workers.exit_codes
        if any(codes.values()):
            return _RoundEnded(self._some_failed())
        if len(codes) == self._slots:
            self._group.wait_for_final_messages()
            if not self._group.all(self._channel.workers.stopped):
                self._done = True
                self._rdzv.membership.link.send(Done())
        return None

    def _some_failed(self) -> ExitReason | None:
        self._workers.wait_for_siblings()
        self._group.wait_for_final_messages()
        ranks = self._rdzv.membership.assignment.global_ranks
        gave_way = self._channel.workers.gave_way
        failures = {
            ranks[local_rank]: failure
            for local_rank, failure in self._workers.failures().items()
            if local_rank not in gave_way
        }
        return self._worker_failed(failures) if failures else self._workers_gave_way()

    def _workers_gave_way(self) -> ExitReason | None:
        """Start anew: a session has seen the end of the round, or cannot go on with this one."""
        until = time.monotonic() + _SETTLE_SECONDS
        while not self._rdzv.status().broken and time.monotonic() < until:
            self._wait()
        status = self._rdzv.status()
        if status.broken:
            return self._end_round(_why(status, self._rdzv.node), lost=status.lost)
        reason = f"a worker on {self._rdzv.node} could not go on with the round"
        return self._end_round(reason, lost=frozenset(), round_failed=True)

    def _announce_leaving(self) -> None:
        if not self._announced and self._preemption.commit_to_leave():
            self._announced = True
            _LOG.warning("This node is being preempted (%s); leaving at the next step.", self._preemption.reason)
            if self._runs_engine:
                self._channel.workers.leave()  # announced to the others when it has stopped
            else:
                self._peers.announce_leaving()

    def _end_round(self, reason: str, *, lost: frozenset[str], round_failed: bool = False) -> ExitReason | None:
        """Interrupt the workers and end the round, so that the next one forms; or leave, where this node has to.

        Args:
            reason: why.
            lost: members that will not be back.
            round_failed: whether nobody is to blame but the network.
        """
        self._channel.record_last_step()
        leaving = self._preemption.noticed and self._preemption.commit_to_leave()
        lost |= frozenset({self._rdzv.node}) if leaving else frozenset()
        # Programs without a session save when they get SIGTERM, if at all: those that continue wait for what they save.
        saving = not (self._channel.workers.in_session or self._runs_engine)
        finishing = lost & (self._leavers | {self._rdzv.node}) if saving else frozenset[str]()
        if leaving or not self._group.stays:
            if self._group.stays and not self._group.all(self._channel.workers.stopped):
                self._channel.workers.release()
            self._workers.begin_stopping(self._preemption.seconds_left if leaving else None)
        else:
            self._channel.workers.interrupt()
        if leaving:
            self._rdzv.membership.disconnect()  # the hub notices this before the table is updated
        round_ = self._rdzv.membership.assignment.round
        grace = self._plan.distribution.preemption.grace.total_seconds()
        if self._rdzv.round_end.reopen(
            reason, lost=lost, finishing=finishing, finishing_seconds=grace, round_failed=round_failed
        ):
            self._record(RoundReopened, reason=reason, lost=tuple(sorted(lost)))
            in_order = self._leavers | self._rdzv.round_end.left_in_order(lost)
            for member in faulty_members(round_, lost, in_order | ({self._rdzv.node} if leaving else set())):
                self._strike(member.host_id, "lost its connection")
        return ExitReason.LEFT if leaving else None

    def _strike(self, host: str, reason: str | None) -> None:
        """Hold something against a host."""
        if reason is not None and host:
            self._strikes.strike(host, reason, incident_id(self._rdzv.membership.assignment.round))
            self._record(HostStruck, host=host, reason=reason)

    def _store_ended(self) -> ExitReason | None:
        """End the round: its workers can open no further process group, and new processes cannot connect at all."""
        reason = f"the process of the round's store on {self._rdzv.node} has ended"
        return self._end_round(reason, lost=frozenset(), round_failed=True)

    def _worker_failed(self, failures: Mapping[int, FailedWorker]) -> ExitReason | None:
        """Find out whose fault it is: a lost node's, this node's preemption, or the worker's own."""
        failure = root_cause(failures, self._workers.stderrs)
        distribution = self._plan.distribution
        # SIGKILL is nobody's consequence. SIGTERM may be: a preempted container's processes all get it.
        killed = failure.exit_code == 128 + signal.SIGKILL
        until = time.monotonic() + (0.0 if killed else _SETTLE_SECONDS)
        if failure.kind == "peer":  # silence is noticed no sooner, and another node's agent may have the cause
            until += SilenceLimit(distribution.rendezvous.timings).longest
        status = self._rdzv.status()
        while not status.broken and not self._preemption.noticed and time.monotonic() < until:
            if self._store.ended and failure.kind == "peer":
                return self._store_ended()
            self._rdzv.wake.wait(until - time.monotonic())
            self._rdzv.wake.clear()
            status = self._rdzv.status()
        if status.broken or self._preemption.noticed:
            return self._end_round(_why(status, self._rdzv.node), lost=status.lost)
        if self._died_after_training(failures):
            return self._end_round("a worker was aborted after its training had ended", lost=frozenset())
        self._strike(self._strikes.host, worker_fault(failure.exit_code, failure.message))
        reason = f"worker {failure.rank} on {self._rdzv.node} failed with {failure.ending}"
        # Where processes stay, the others do not wait for this node's new ones.
        return self._charge(failure, reason, lost=frozenset({self._rdzv.node}) if self._group.stays else frozenset())

    def _workers_hang(self, hang: Hang) -> ExitReason | None:
        """Start anew, which costs as much as a failure: a program may hang at the same place each time."""
        rank = self._rdzv.membership.assignment.global_ranks[0]
        return self._charge(hang_failure(rank, FAILED, hang.reason), hang.reason, lost=self._leavers)

    def _charge(self, failure: Failure, reason: str, *, lost: frozenset[str]) -> ExitReason | None:
        self._channel.record_last_step()
        self._workers.begin_stopping()
        self.failure = apply_restart_policy(
            failure,
            step=self._channel.workers.step if self._opens_session or self._channel.workers.in_session else None,
            connected=self._connected,
            reason=reason,
            lost=lost,
            rendezvous=self._rdzv,
            recorder=self._recorder,
            distribution=self._plan.distribution,
        )
        return ExitReason.FAILED if self.failure is not None else None

    @property
    def _connected(self) -> bool:
        """Whether the workers of the round have begun to connect, or are unknown to: one that trains alone need not."""
        alone = self._rdzv.membership.assignment.round.world_size == 1
        return self._peers.connecting or (alone and self._rdzv.membership.seconds >= _ALONE_SECONDS)

    def _died_after_training(self, failures: Mapping[int, FailedWorker]) -> bool:
        """Tell whether torch has aborted a worker that had finished, as its threads sometimes do at interpreter exit.

        Such a round is repeated free of charge, but only if it has trained: the next one has nothing left to train.
        """
        aborted = [failure for failure in failures.values() if failure.exitcode != -signal.SIGTERM]
        return (
            self._channel.workers.trained
            and bool(aborted)
            and all(failure.exitcode == -signal.SIGABRT for failure in aborted)
            and {failure.local_rank for failure in aborted} <= self._channel.workers.finished
        )

    def _close_run(self) -> ExitReason | None:
        """Mark the run's good end. Rank 0 writes; the others make sure that it has."""
        if not self._rdzv.membership.leads:
            until = time.monotonic() + _CLOSING_SECONDS
            while not self._rdzv.status().over and time.monotonic() < until:
                self._rdzv.wake.wait(until - time.monotonic())
                self._rdzv.wake.clear()
        if self._rdzv.round_end.close(succeeded=True):
            self._record(RunEnded, succeeded=True)
            return ExitReason.SUCCEEDED
        return None  # closed by another node, which joining tells, or reopened

    def _record(self, kind: type[Any], **fields: Any) -> None:
        self._recorder.record(kind, self._rdzv.membership.assignment.round.number, **fields)


def _why(status: Status, node: str) -> str:
    """Return why a round is broken.

    Args:
        status: status of the round.
        node: name of this node.
    """
    if status.lost:
        return f"lost {_list(status.lost)}"
    return f"{node} did not run for some seconds" if status.was_given_up else "the round was reopened"


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
