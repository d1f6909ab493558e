"""The agent of one node: torch's local agent, driven so that no other node's death can take it along.

torch's ``LocalElasticAgent`` starts, watches and stops the workers. Everything that it does through rank 0's store
between rendezvous and exit (rank assignment, exit barrier) is replaced: ranks follow from the sealed round, the end of
the run from the hub and the table.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from azureml_elastic.ledger.events import RoundEntered, RoundReopened, RunEnded, WorkerFailed, WorkersStarted
from azureml_elastic.node.boundary import Coordinator
from azureml_elastic.node.channel import Channel
from azureml_elastic.node.checkpoints import CheckpointPointer
from azureml_elastic.node.failures import Failure, first_failure
from azureml_elastic.node.preemption import Preemption
from azureml_elastic.node.recorder import Recorder
from azureml_elastic.node.rendezvous.handler import Rendezvous
from azureml_elastic.node.rendezvous.round import global_ranks
from azureml_elastic.node.rendezvous.seat import Status
from azureml_elastic.node.table import Table
from azureml_elastic.node.torchrun import enter
from azureml_elastic.spec import Plan
from azureml_elastic.spec import environment as variables

__all__ = ["Ending", "NodeAgent"]

_LOG = logging.getLogger(__name__)

_SETTLE_SECONDS = 0.5
"""How long a failed worker's agent waits for the news that another node is the cause."""

_LAST_WORDS_SECONDS = 5.0
"""How long the channel has to deliver what workers said before they ended."""

_IMPORT_SECONDS = 30.0
"""How long workers may take to open the session that their program speaks of, before newcomers stop them."""

_CLOSING_SECONDS = 2.0
"""How long rank 0's node has to mark the end of the run before another one does."""


class Ending(Enum):
    """How this node's part ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LEFT = "left"


class NodeAgent(LocalElasticAgent):
    """Runs this node's workers through all rounds of the run.

    Args:
        spec: of the workers.
        logs_specs: where their output goes.
        rendezvous: this node's part in the run.
        channel: to the workers' sessions.
        recorder: of the ledger.
        table: for the checkpoint's row.
        plan: of the run.
        preemption: tells when this node must go.
        opens_session: whether the program's own text says that it opens a session, for which newcomers then wait.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        rendezvous: Rendezvous,
        channel: Channel,
        recorder: Recorder,
        table: Table,
        plan: Plan,
        preemption: Preemption,
        opens_session: bool,
    ) -> None:
        super().__init__(spec, logs_specs=logs_specs, log_line_prefix_template="[rank${rank}]: ")
        self._rdzv = rendezvous
        self._channel = channel
        self._recorder = recorder
        self._table = table
        self._plan = plan
        self._preemption = preemption
        self._opens_session = opens_session
        self._coordinator: Coordinator | None = None
        self._leavers: set[str] = set()
        self._announced = False
        self._done = False
        self._started = 0.0
        self._stopping: threading.Thread | None = None
        self.failure: Failure | None = None
        """Set when this node's worker ended the run."""

    # --- torch's hooks -----------------------------------------------------------------------------------------------

    def take_part(self) -> Ending:
        """Take part in the run until it ends or this node has to leave.

        Raises:
            RunSucceeded, RunFailed: another node has ended the run.
            InterruptedError: this node was told to leave while it waited for a place.
        """
        try:
            while True:
                self._initialize_workers(self._worker_group)
                ending = self._watch_round()
                if ending is not None:
                    return ending
        finally:
            self._begin_stopping()
            self._finish_stopping()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        seat, store = enter(self._rdzv)
        round_, first = seat.round, seat.round.members[0]
        ranks = global_ranks(round_, seat.rank)
        worker_group.workers = [
            Worker(
                local_rank=local_rank,
                global_rank=rank,
                role_rank=rank,
                world_size=round_.world_size,
                role_world_size=round_.world_size,
            )
            for local_rank, rank in enumerate(ranks)
        ]
        worker_group.store = store  # type: ignore[assignment] # torch leaves these untyped
        worker_group.group_rank = seat.rank  # type: ignore[assignment]
        worker_group.group_world_size = len(round_.members)  # type: ignore[assignment]
        worker_group.master_addr = first.host  # type: ignore[assignment]
        worker_group.master_port = first.store_port  # type: ignore[assignment]
        # Workers share keys by the restart count, which must therefore be the same on old nodes and new ones.
        self._remaining_restarts = worker_group.spec.max_restarts - (round_.number - 1)
        leads = seat.rank == 0
        pointer = CheckpointPointer(self._table, round_.number, self._rdzv.incarnation) if leads else None
        self._channel.begin(round_.number, len(ranks), pointer)
        names = tuple(member.node for member in round_.members)
        self._coordinator = Coordinator(names, self._rdzv.hub.broadcast) if leads else None
        self._leavers, self._announced, self._done = set(), False, False
        self._record(RoundEntered, rank=seat.rank, members=names, world_size=round_.world_size)
        _LOG.info("Round %d: rank %d of %d nodes, %d workers.", round_.number, seat.rank, len(names), round_.world_size)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._finish_stopping()
        os.environ[variables.CHANNEL] = self._channel.path
        os.environ[variables.ROUND] = str(self._rdzv.seat.round.number)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._preemption.listen()  # older launchers of torch have just taken the signals
        self._started = time.monotonic()
        self._record(WorkersStarted, pids=tuple(ids[local_rank] for local_rank in sorted(ids)))
        return ids

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # noqa: ARG002 - torch's
        if self._pcontext is not None:
            self._pcontext.close(timeout=round(self._plan.distribution.stop_timeout.total_seconds()))

    # --- a round -----------------------------------------------------------------------------------------------------

    def _watch_round(self) -> Ending | None:
        """Watch the workers until the round is over; ``None`` means that another round follows."""
        interval = self._plan.distribution.monitor_interval.total_seconds()
        while True:
            self._rdzv.wake.wait(interval)
            self._rdzv.wake.clear()
            status = self._rdzv.status()
            if status.broken:
                return self._end_round(_why(status), lost=status.lost)
            self._talk()
            if self._rdzv.leads and (reason := self._lead(status)) is not None:
                return self._end_round(reason, lost=frozenset(self._leavers))
            if self._preemption.noticed:
                self._announce_leaving()
                if self._preemption.overdue:
                    return self._end_round(f"{self._rdzv.node} was preempted", lost=frozenset({self._rdzv.node}))
            if self._done:
                if status.all_done:
                    return self._close_run()
                continue
            self._cut_siblings_of_the_dead()
            result = self._monitor_workers(self._worker_group)
            if result.state == WorkerState.HEALTHY:
                continue
            self._hear_last_words()
            if self._channel.stopped:
                # All have saved; how a process ends after that, or who is told to by torch, is of no interest.
                return self._end_round("rescale at a step boundary", lost=frozenset(self._leavers))
            if result.state != WorkerState.SUCCEEDED:
                return self._worker_failed(result)
            self._done = True
            self._rdzv.link.send({"op": "done"})

    def _talk(self) -> None:
        """Carry proposals and decisions between rank 0's agent and the local workers."""
        link = self._rdzv.link
        for message in link.take_messages():
            if message["op"] == "prepare":
                self._channel.prepare(message)
            elif message["op"] == "decide":
                self._leavers.update(message["leavers"])
                self._channel.decide(message)
        for report in self._channel.take_reports():
            link.send(report)

    def _lead(self, status: Status) -> str | None:
        """Rank 0's part: make room for newcomers and let the preempted go.

        Returns:
            Why the round must end at once, because some workers have no session and no boundary can be agreed.
        """
        coordinator = self._coordinator
        assert coordinator is not None
        for report in self._rdzv.hub.take_reports():
            if report.get("what") == "leaving":
                self._leavers.add(report["node"])
            else:
                coordinator.take(report, sorted(self._leavers))
        ending = coordinator.finished or self._channel.finished or self._done
        if coordinator.busy or coordinator.leaving or ending or not (self._leavers or status.waiting):
            return None
        if not coordinator.incapable and self._channel.in_session:
            coordinator.propose(self._channel.step)
        elif self._opens_session and time.monotonic() - self._started < _IMPORT_SECONDS and not self._leavers:
            coordinator.incapable = False  # workers may only be importing still: ask again
        else:
            return f"preempted: {_list(self._leavers)}" if self._leavers else f"joining: {_list(status.waiting)}"
        return None

    def _cut_siblings_of_the_dead(self) -> None:
        """End the other local workers when one has failed: a session takes torch's SIGTERM for a preemption."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        if any(handler.proc.poll() for handler in handlers.values()):
            self._channel.cut()

    def _hear_last_words(self) -> None:
        """Wait until the sessions' connections have ended: what the workers said last comes before that."""
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while self._channel.connected and time.monotonic() < until:
            self._rdzv.wake.wait(0.01)

    def _announce_leaving(self) -> None:
        if not self._announced:
            self._announced = True
            _LOG.warning("This node is being preempted (%s); leaving at the next step.", self._preemption.reason)
            self._rdzv.link.send({"op": "report", "what": "leaving"})

    def _end_round(self, reason: str, *, lost: frozenset[str], failures: int = 0) -> Ending | None:
        """Stop the workers while the next round forms, or leave if this node is one of those that go."""
        leaving = self._preemption.noticed
        lost |= frozenset({self._rdzv.node}) if leaving else frozenset()
        self._begin_stopping()
        if leaving:
            self._rdzv.drop()  # the others hear of it before the table does
        if self._rdzv.reopen(reason, lost=lost, failures=failures):
            self._record(RoundReopened, reason=reason, lost=tuple(sorted(lost)))
        return Ending.LEFT if leaving else None

    def _worker_failed(self, result: RunResult) -> Ending | None:
        """Find out whose fault it is: a lost node's, this node's preemption, or the worker's own."""
        until = time.monotonic() + _SETTLE_SECONDS
        status = self._rdzv.status()
        while not status.broken and not self._preemption.noticed and time.monotonic() < until:
            self._rdzv.wake.wait(until - time.monotonic())
            self._rdzv.wake.clear()
            status = self._rdzv.status()
        if status.broken or self._preemption.noticed:
            return self._end_round(_why(status), lost=status.lost)
        if self._died_after_training(result):
            return self._end_round("a worker was aborted after its training had ended", lost=frozenset())
        failure = first_failure(result.failures, self._pcontext.stderrs if self._pcontext else {})
        self._record(WorkerFailed, rank=failure.rank, exit_code=failure.exit_code, message=failure.message)
        round_ = self._rdzv.seat.round
        reason = f"worker {failure.rank} on {self._rdzv.node} failed with exit code {failure.exit_code}"
        if round_.failures < self._plan.distribution.max_restarts:
            _LOG.warning("%s; restart %d of %d.", reason, round_.failures + 1, self._plan.distribution.max_restarts)
            return self._end_round(reason, lost=frozenset(), failures=1)
        message = f"{reason} after {round_.failures} restarts of the run (max_restarts).\n{failure.message}"
        self._begin_stopping()
        if not self._rdzv.close(succeeded=False, message=message, exit_code=failure.exit_code):
            return None  # another node was first: join to hear how the run goes on
        self.failure = Failure(failure.rank, failure.exit_code, message)
        self._record(RunEnded, succeeded=False, message=message)
        return Ending.FAILED

    def _died_after_training(self, result: RunResult) -> bool:
        """Tell whether torch has aborted a worker that had finished, as its threads sometimes do at interpreter exit.

        Such a round is repeated free of charge, but only if it has trained: the next one has nothing left to train.
        """
        aborted = [failure for failure in result.failures.values() if failure.exitcode != -signal.SIGTERM]
        return (
            self._channel.trained
            and bool(aborted)
            and all(failure.exitcode == -signal.SIGABRT for failure in aborted)
            and {failure.local_rank for failure in aborted} <= self._channel.finished
        )

    def _close_run(self) -> Ending | None:
        """Mark the run's good end. Rank 0 writes; the others make sure that it has."""
        if not self._rdzv.leads:
            until = time.monotonic() + _CLOSING_SECONDS
            while not self._rdzv.status().over and time.monotonic() < until:
                self._rdzv.wake.wait(until - time.monotonic())
                self._rdzv.wake.clear()
        if self._rdzv.close(succeeded=True):
            self._record(RunEnded, succeeded=True)
            return Ending.SUCCEEDED
        return None  # closed by another node, which joining tells, or reopened

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _begin_stopping(self) -> None:
        """Stop the workers on a thread, so that this node can ask for its next place meanwhile."""
        self._finish_stopping()
        self._channel.cut()
        self._stopping = threading.Thread(target=self._stop_workers, args=(self._worker_group,), name="stop-workers")
        self._stopping.start()

    def _finish_stopping(self) -> None:
        if self._stopping is not None:
            self._stopping.join()
            self._stopping = None

    def _record(self, kind: type[Any], **fields: Any) -> None:
        self._recorder.record(kind, self._rdzv.seat.round.number, **fields)


def _why(status: Status) -> str:
    return f"lost {_list(status.lost)}" if status.lost else "the round was reopened"


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
