"""A member's part in a round, from the start of its workers to its end: events in, actions out.

:meth:`Training.handle` is all that changes it. Time comes with the event; a wait is a moment that has not come yet. All
agents of a round run the same machine; :mod:`~azureml_elastic.node.core.leading` is what rank 0's does besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.exit_codes import of_failed_run
from azureml_elastic.ipc import agent_messages as messages
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core import training_actions as do
from azureml_elastic.node.core import training_events as ev
from azureml_elastic.node.core.boundary import Ballot
from azureml_elastic.node.core.closing_message import closing_message
from azureml_elastic.node.core.discovery import PeerDiscovery
from azureml_elastic.node.core.failures import Failure, aged, decide_restart
from azureml_elastic.node.core.faults import KILLED, died_after_training, faulty_members
from azureml_elastic.node.core.hang_response import HangResponse
from azureml_elastic.node.core.leading import Leader
from azureml_elastic.node.core.round import Round

__all__ = ["State", "Training"]

_SETTLE_SECONDS = 0.5
"""How long a failed worker's agent waits for the news that another node is the cause."""

_FINAL_MESSAGE_SECONDS = 5.0
"""How long the messages may take that workers have sent before they ended."""

_ALONE_SECONDS = 60.0
"""Time after which a single worker that has not used the round's store counts as one that trains."""

_CLOSING_SECONDS = 2.0
"""How long rank 0's node has to mark the end of the run before another one does."""


class State(Enum):
    """What a member of a round is about; the last four are ends."""

    TRAINING = "training"
    AT_BOUNDARY = "at boundary"
    """All workers of the round stop after the same step."""

    COLLECTING = "collecting"
    """A local worker has ended; what it has sent arrives, and those beside a failed one hand their state over."""

    SETTLING = "settling"
    """A local worker has failed or given way, and perhaps another node explains it."""

    DONE = "done"
    """All local workers have ended well, those of other nodes perhaps not."""

    CLOSING = "closing"
    """All are done, and rank 0's node is to mark the end of the run."""

    ENDING = "ending"
    """The round's row is being changed."""

    RECOVERING = "recovering"
    """Another round follows, or the run has been ended by another node."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LEFT = "left"


_IN_ROUND = (State.TRAINING, State.AT_BOUNDARY, State.DONE)
_OVER = (State.RECOVERING, State.SUCCEEDED, State.FAILED, State.LEFT)


class Training:
    """One node in one round.

    Args:
        round_: the sealed round.
        node: name of this node, which is a member.
        distribution: what the plan says.
        opens_session: whether the program uses this library, so that newcomers wait for its session.
        entered: monotonic seconds at which this node got its place in the round.
        now: monotonic seconds; its workers have been started, or have received their assignments.

    Attributes:
        state: what it is about.
        connecting: whether workers of the round have begun to connect to each other, as far as rank 0's agent has seen.
        closed: the end of the run, where this node wants to end it.
    """

    def __init__(
        self,
        round_: Round,
        node: str,
        distribution: ElasticDistribution,
        *,
        opens_session: bool,
        entered: float,
        now: float,
    ) -> None:
        names = [member.node for member in round_.members]
        rank = names.index(node)
        self._round = round_
        self._node = node
        self._rank = rank
        self._distribution = distribution
        self._opens_session = opens_session
        self._stays = distribution.keeps_processes(opens_session=opens_session)
        self._slots = round_.members[rank].slots
        self._entered = entered
        self._now = now
        self._out: list[do.TrainingAction] = []
        self._leader = Leader(round_, distribution, opens_session=opens_session, now=now) if rank == 0 else None
        self._discovery = PeerDiscovery(names)
        self._hangs = HangResponse(round_, node)
        self._seen = ev.RoundSeen()
        self._workers = ev.WorkersSeen()
        self._ballot: Ballot | None = None
        self._leavers: frozenset[str] = frozenset()
        self._notice: ev.Noticed | None = None
        self._warned = self._reported_leaving = False
        self._program_ended = self._store_ended = False
        self._until = 0.0
        self._failures: ev.Failures | None = None
        self._lost: frozenset[str] | None = None
        self._then = State.RECOVERING
        self.state = State.TRAINING
        self.connecting = False
        self.closed: do.Close | None = None

    @property
    def over(self) -> bool:
        """Whether the round is over for this node."""
        return self.state in _OVER

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of the round."""
        return self._leader is not None

    @property
    def runs_engine(self) -> bool:
        """Whether the worker is the process of an engine, which newcomers join without a restart."""
        return self._distribution.runs_engine

    def are_all(self, local_ranks: frozenset[int]) -> bool:
        """Return whether these are all workers of this node."""
        return len(local_ranks) == self._slots

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which to pass :class:`TimePassed`, though nothing happens; infinite for never.

        What is due already was looked at, and waits for something else to happen.
        """
        moments = [self._discovery.until, self._hangs.until]
        if self.state in (State.COLLECTING, State.SETTLING, State.CLOSING):
            moments.append(self._until)
        if self._notice is not None:
            moments.append(self._notice.until)
        if self._leader is not None:
            moments += self._leader.moments
        return min((moment for moment in moments if moment is not None and moment > self._now), default=float("inf"))

    def handle(self, event: ev.TrainingEvent, now: float) -> list[do.TrainingAction]:
        """Take one event in, and return what shall be done, in this order.

        Args:
            event: what has happened.
            now: monotonic seconds.
        """
        if self.over or (self.state is State.ENDING and not isinstance(event, ev.RowWritten)):
            return []  # what is decided is being carried out
        self._now, self._out = now, []
        self._note(event)
        self._answer(event)
        self._look(event)
        return self._out

    def _note(self, event: ev.TrainingEvent) -> None:
        """Take in what is known from now on."""
        match event:
            case ev.RoundSeen():
                self._seen = event
            case ev.WorkersSeen():
                self._workers = event
            case ev.Noticed():
                self._notice = event
            case ev.ProgramEnded():
                self._program_ended = True
            case ev.StoreEnded():
                self._store_ended = True
            case ev.ProgramSaved() if self._leader is not None:
                self._leader.newcomers.saved()
            case ev.Failures() if self.state is State.SETTLING:
                self._take_failures(event)
            case ev.RowWritten():
                self._row_written(event)
            case _:
                pass

    def _answer(self, event: ev.TrainingEvent) -> None:
        """Do what a message, or a verdict, calls for at once."""
        match event:
            case ev.FromLeader(body):
                self._from_leader(body)
            case ev.FromMember(node, body):
                self._from_member(node, body)
            case ev.WorkerVoted(local_rank, vote):
                self._take_vote(local_rank, vote)
            case ev.StoreUsed() if not self.connecting:
                self._workers_connect()
                self._do(do.ToMembers(messages.RanksConnecting()))
            case ev.Hung() if self.state in _IN_ROUND:
                self._do(*self._hangs.decided(event, self._now))
            case ev.Learned(lesson):
                self._do(do.ToMembers(lesson))
            case ev.StacksWritten():
                self._do(*self._hangs.written())
            case _:
                pass

    def _do(self, *actions: do.TrainingAction) -> None:
        self._out += actions

    # --- transitions -------------------------------------------------------------------------------------------------

    def _look(self, event: ev.TrainingEvent) -> None:
        """Go on to the next state, where what is known calls for it."""
        match self.state:
            case State.TRAINING | State.AT_BOUNDARY | State.DONE:
                self._look_at_round(event)
                if self.state in (State.TRAINING, State.AT_BOUNDARY):
                    self._look_at_workers()
            case State.COLLECTING:
                self._collect()
            case State.SETTLING:
                self._settle()
            case State.CLOSING:
                self._look_at_closing()
            case _:
                pass

    def _look_at_round(self, event: ev.TrainingEvent) -> None:
        """End the round for what has happened to other nodes, to this one, or between them."""
        if self._program_ended:
            self._begin_closing()  # the program has ended, whatever has happened to other nodes since
        elif self._seen.broken:
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif isinstance(event, ev.WorkersHeld):
            self._end_round(f"joining: {_list(self._seen.waiting)}", lost=self._leavers)
        elif isinstance(event, ev.TimePassed) and (reason := self._lead()) is not None:
            self._end_round(reason, lost=self._leavers)
        elif self._notice is not None and self._is_overdue(self._notice):
            self._end_round(f"{self._node} was preempted", lost=frozenset({self._node}))
        elif self._store_ended:
            self._end_round(self._why_store_ended(), round_failed=True)
        elif isinstance(event, ev.PairFound):
            self._end_round(f"the workers cannot connect: {event.pair}", round_failed=True)
        elif (hung := self._hangs.due(self._now)) is not None:
            # Starting anew costs as much as a failure: a program may hang at the same place each time.
            self._charge(hung.failure, hung.hang.reason, lost=self._leavers)
        elif self.state is State.DONE and self._seen.all_done:
            self._begin_closing()
        else:
            self._look_for_ranks(event)

    def _look_at_workers(self) -> None:
        """Go on for what this node's workers have done."""
        codes = self._workers.exit_codes
        if self.are_all(self._workers.stopped):
            # All have saved; exit codes after that are irrelevant.
            if self.runs_engine:
                self._report_leaving()
            else:
                self._end_round("rescale at a step boundary", lost=self._leavers)
        elif any(codes.values()):
            self.state = State.COLLECTING
            self._until = self._now + self._distribution.handover_timeout.total_seconds() + _FINAL_MESSAGE_SECONDS
            self._do(do.InterruptWorkers())
            self._collect()
        elif len(codes) == self._slots:
            self.state = State.COLLECTING
            self._until = self._now + _FINAL_MESSAGE_SECONDS
            self._collect()

    def _lead(self) -> str | None:
        """Do what rank 0's agent does of its own accord; return why the round must end at once, if it must."""
        if self._leader is None:
            return None
        actions, reason = self._leader.lead(
            self._seen.waiting, self._leavers, self._workers, self._now,
            connected=self.connecting, done=self.state is State.DONE,
        )  # fmt: skip
        self._do(*actions)
        return reason

    def _look_for_ranks(self, event: ev.TrainingEvent) -> None:
        """Report once that the local workers connect to the others, and look why they have not connected for long."""
        if self._discovery.must_report(placed=self._workers.placed):
            self._do(do.ToLeader(messages.Placed()))
        takes_long = self._discovery.takes_long(self._now, connected=self._workers.connected)
        if takes_long and isinstance(event, ev.TimePassed):
            self._do(do.FindPair())

    def _is_overdue(self, notice: ev.Noticed) -> bool:
        """Announce once that this node leaves; return whether its time is over."""
        if not self._warned:
            self._warned = True
            self._do(do.Log(f"This node is being preempted ({notice.reason}); leaving at the next step.", warning=True))
            if self.runs_engine:
                self._do(do.MoveEngine())  # announced to the others when it has stopped
            else:
                self._report_leaving()
        return self._now >= notice.until

    def _report_leaving(self) -> None:
        if not self._reported_leaving:
            self._reported_leaving = True
            self._do(do.ToLeader(messages.Leaving()))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _from_leader(self, body: messages.BroadcastBody) -> None:
        match body:
            case messages.Prepare():
                self._ask(body)
            case messages.Decision(boundary, go, leavers):
                self._leavers |= {*leavers}
                if go and self._leavers:
                    left = _list(self._leavers)
                    self._do(do.Log(f"All workers stop after the same step; not in the next round: {left}."))
                if go and self.state is State.TRAINING:
                    self.state = State.AT_BOUNDARY
                self._do(do.TellWorkers(Decide(boundary, go, stay=self._node not in self._leavers)))
            case messages.AllPlaced():
                self._discovery.all_placed(self._now)
            case messages.RanksConnecting() if not self.connecting:
                self._workers_connect()
            case messages.HangLesson():
                self._do(do.LearnLesson(body))
            case messages.DumpStacks() if self.state in _IN_ROUND:
                self._do(*self._hangs.received(body))

    def _from_member(self, node: str, body: messages.ReportBody) -> None:
        match body:
            case messages.Leaving():
                self._leavers |= {node}
            case messages.Placed() if (all_placed := self._discovery.reported(node)) is not None:
                self._do(do.ToMembers(all_placed))
            case messages.Dumped():
                self._hangs.dumped(node)
            case messages.Vote() if self._leader is not None:
                decision = self._leader.coordinator.take(node, body, self._now, sorted(self._leavers))
                if decision is not None:
                    self._do(do.ToMembers(decision))

    def _workers_connect(self) -> None:
        self.connecting = True
        self._do(do.NoteConnecting())

    def _ask(self, proposal: messages.Prepare) -> None:
        """Have the workers vote, or vote for those that cannot."""
        if self.state is State.TRAINING and self.are_all(self._workers.present):
            self._ballot = Ballot(proposal.boundary, self._workers.present)
            self._do(do.AskWorkers(proposal))
        else:
            self._ballot = None
            finished = bool(self._workers.finished)
            vote = messages.Vote(proposal.boundary, ok=False, step=0, capable=False, finished=finished)
            self._do(do.ToLeader(vote))

    def _take_vote(self, local_rank: int, vote: messages.Vote) -> None:
        if self._ballot is None:
            return
        whole = self._ballot.take(local_rank, vote, finished=bool(self._workers.finished))
        if whole is not None:
            self._ballot = None
            self._do(do.ToLeader(whole))

    # --- workers that have ended -------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait until the connections of sessions that end have ended: all their messages arrive before that."""
        workers = self._workers
        failed = any(workers.exit_codes.values())
        if self._seen.broken or (failed and self._notice is not None):
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif workers.leaving and self._now < self._until:
            return
        elif self.are_all(workers.stopped):
            self.state = State.AT_BOUNDARY
            self._look_at_workers()
        elif failed:
            self.state, self._until = State.SETTLING, float("inf")
            self._do(do.ReadFailures(workers.gave_way))
        else:
            self.state = State.DONE
            self._do(do.ReportDone())

    def _take_failures(self, failures: ev.Failures) -> None:
        self._failures = failures
        failure = failures.failure
        # SIGKILL is nobody's consequence. SIGTERM may be: a preempted container's processes all get it.
        killed = failure is not None and failure.exit_code == KILLED
        self._until = self._now + (0.0 if killed else _SETTLE_SECONDS)
        if failure is not None and failure.kind == "peer":  # silence is noticed no sooner, and another may be the cause
            self._until += self._distribution.rendezvous.timings.heartbeat_timeout.total_seconds()

    def _settle(self) -> None:
        """Find out whose fault a failure is: a lost node's, this node's preemption, or the worker's own."""
        failures = self._failures
        if self._seen.broken or self._notice is not None:
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif failures is None:
            return
        elif self._store_ended and failures.failure is not None and failures.failure.kind == "peer":
            self._end_round(self._why_store_ended(), round_failed=True)
        elif self._now < self._until:
            return
        elif failures.failure is None:
            # A session has seen the end of the round, or cannot go on with this one.
            self._end_round(f"a worker on {self._node} could not go on with the round", round_failed=True)
        elif died_after_training(failures.codes, self._workers.finished, trained=self._workers.trained):
            self._end_round("a worker was aborted after its training had ended")
        else:
            self._worker_failed(failures.failure, failures)

    def _worker_failed(self, failure: Failure, failures: ev.Failures) -> None:
        member = self._round.members[self._rank]
        if failures.fault is not None and member.host_id:
            self._do(do.Strike(member.host_id, failures.fault))
        reason = f"worker {failure.rank} on {self._node} failed with {failures.ending}"
        # Where processes stay, the others do not wait for this node's new ones.
        self._charge(failure, reason, lost=frozenset({self._node}) if self._stays else frozenset())

    def _charge(self, failure: Failure, reason: str, *, lost: frozenset[str]) -> None:
        """Restart after a failure that nothing else explains, or end the run."""
        workers, round_, seconds = self._workers, self._round, self._now - self._entered
        step = workers.step if self._opens_session or workers.in_session else None
        # One that trains alone need not connect.
        connected = self.connecting or (round_.world_size == 1 and seconds >= _ALONE_SECONDS)
        record = failure.record(self._node, step, connected=connected)
        decision = decide_restart(
            aged(round_.failures, seconds),
            record,
            self._distribution,
            conclusive=failure.conclusive,
            seconds=seconds,
            failed_rounds=round_.failed_rounds,
        )
        self._do(do.FlushProgress(), do.StopWorkers(), do.RecordFailure(failure, step))
        if decision.restart:
            self._do(do.Log(f"{reason} ({failure.signature}); {decision.why}.", warning=True))
            failed = decision.round_failed
            self._change_row(do.Reopen(reason, lost=lost, failures=decision.failures, round_failed=failed))
        else:
            message = closing_message(failure.message, record, round_.number, decision.why)
            code = of_failed_run(failure.exit_code)
            self._close(do.Close(succeeded=False, message=message, exit_code=code, failures=decision.failures))

    # --- the end of the round ----------------------------------------------------------------------------------------

    def _end_round(self, reason: str, *, lost: frozenset[str] = frozenset(), round_failed: bool = False) -> None:
        """Interrupt the workers and end the round, so that the next one forms; or leave, where this node has to.

        Args:
            reason: why.
            lost: members that will not be back.
            round_failed: whether nobody is to blame but the network.
        """
        me, workers, leaves = frozenset({self._node}), self._workers, self._notice is not None
        lost |= me if leaves else frozenset()
        # Programs without a session save when they get SIGTERM, if at all: those that continue wait for what they save.
        saving = not (workers.in_session or self.runs_engine)
        finishing = lost & (self._leavers | me) if saving else frozenset[str]()
        self._do(do.FlushProgress())
        if leaves or not self._stays:
            if self._stays and not self.are_all(workers.stopped):
                self._do(do.ReleaseWorkers())
            self._do(do.StopWorkers(max(0.0, self._notice.until - self._now) if self._notice is not None else None))
        else:
            self._do(do.InterruptWorkers())
        if leaves:
            self._do(do.Disconnect())
        grace = self._distribution.preemption.grace.total_seconds()
        self._lost, self._then = lost, State.LEFT if leaves else State.RECOVERING
        self._change_row(do.Reopen(reason, lost, finishing, grace, round_failed=round_failed))

    def _begin_closing(self) -> None:
        """Mark the run's good end. Rank 0 writes; the others make sure that it has."""
        self.state, self._until = State.CLOSING, self._now + (0.0 if self.leads else _CLOSING_SECONDS)
        self._look_at_closing()

    def _look_at_closing(self) -> None:
        if self._seen.over or self._now >= self._until:
            self._close(do.Close(succeeded=True))

    def _close(self, close: do.Close) -> None:
        self.closed = close
        self._change_row(close)

    def _change_row(self, action: do.Reopen | do.Close) -> None:
        self.state = State.ENDING
        self._do(action)

    def _row_written(self, event: ev.RowWritten) -> None:
        if self.closed is not None:
            # Else another node has closed the run, which joining tells, or reopened the round.
            self._then = State.RECOVERING
            if event.mine:
                self._then = State.SUCCEEDED if self.closed.succeeded else State.FAILED
        elif event.mine and self._lost is not None:
            in_order = self._leavers | event.left_in_order
            in_order |= {self._node} if self._then is State.LEFT else set()
            for member in faulty_members(self._round, self._lost, in_order):
                if member.host_id:
                    self._do(do.Strike(member.host_id, "lost its connection"))
        self.state = self._then

    def _why_broken(self) -> str:
        """Return why the round is broken, or must be left."""
        if self._seen.lost:
            return f"lost {_list(self._seen.lost)}"
        if self._seen.was_given_up:
            return f"{self._node} did not run for some seconds"
        return "the round was reopened" if self._seen.over else f"{self._node} was preempted"

    def _why_store_ended(self) -> str:
        """Return why: the workers can open no further process group, and new processes cannot connect at all."""
        return f"the process of the round's store on {self._node} has ended"


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
