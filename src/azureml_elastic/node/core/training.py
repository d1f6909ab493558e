"""A member's part in a round, from the start of its workers to its end: events in, actions out.

:meth:`Training.handle` is all that changes it. Time comes with the event; a wait is a moment that has not come yet. All
agents of a round run the same machine; :mod:`~azureml_elastic.node.core.boundary` is what rank 0's does besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from azureml_elastic.config import Plan
from azureml_elastic.ipc import agent_messages as messages
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.boundary import BoundaryParticipant, Departure, Leader
from azureml_elastic.node.core.failures import Failure, FailureRecord
from azureml_elastic.node.core.hangs import HangResponse
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.core.round_ends import KILLED, charge, died_after_training, faulty_members

_WAITED = ("peer", "timeout")
"""Kinds of failures of a worker that has waited for others."""

_SETTLE_SECONDS = 0.5
"""How long a failed worker's agent waits for the news that another node is the cause."""

_FINAL_MESSAGE_SECONDS = 5.0
"""How long the messages may take that workers have sent before they ended."""

_ALONE_SECONDS = 60.0
"""Time after which a single worker that has not used the round's store counts as one that trains."""

_AT_BOUNDARY = "rescale at a step boundary"

_CLOSING_SECONDS = 2.0
"""How long rank 0's node has to mark the end of the run before another one does."""


class State(Enum):
    """What a member of a round is about; the last four are ends."""

    TRAINING = "training"
    AT_BOUNDARY = "at boundary"
    """All workers of the round stop after the same step."""

    STOPPED = "stopped"
    """All local workers have stopped at the boundary and saved, those of other nodes perhaps not."""

    COLLECTING = "collecting"
    """A local worker has ended; what it has sent arrives, and those beside a failed one hand their state over."""

    SETTLING = "settling"
    """A local worker has failed or given way, and perhaps another node explains it."""

    DONE = "done"
    """All local workers have ended well, those of other nodes perhaps not."""

    CLOSING = "closing"
    """All are done, and rank 0's node is to mark the end of the run."""

    ENDING = "ending"
    """The round's row is being changed, by this node or by the survivor whose turn it is."""

    RECOVERING = "recovering"
    """Another round follows, or the run has been ended by another node."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LEFT = "left"


_IN_ROUND = (State.TRAINING, State.AT_BOUNDARY, State.STOPPED, State.DONE)
_OVER = (State.RECOVERING, State.SUCCEEDED, State.FAILED, State.LEFT)


class Training:
    """One node in one round.

    Args:
        opens_session: whether the program uses this library, so that newcomers wait for its session.
        entered: monotonic seconds at which this node got its place in the round.
        now: monotonic seconds; its workers have been started, or have received their assignments.

    Attributes:
        connecting: whether workers of the round have begun to connect to each other, as far as rank 0's agent has seen.
        reopening: how this node ends the round for another one.
        closed: the end of the run, where this node wants to end it.
    """

    def __init__(
        self,
        round_: Round,
        node: str,
        plan: Plan,
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
        distribution = plan.distribution
        self._plan = plan
        self._opens_session = opens_session
        self._stays = distribution.keeps_processes(opens_session=opens_session)
        self._slots = round_.members[rank].slots
        self._entered = entered
        self._now = now
        self._out: list[do.TrainingAction] = []
        self._leader = Leader(round_, distribution, opens_session=opens_session, now=now) if rank == 0 else None
        self._hangs = HangResponse(round_, node)
        self._seen = ev.RoundSeen()
        self._waiting = frozenset[str]()
        self._workers = ev.WorkersSeen()
        self._boundary = BoundaryParticipant(self._slots)
        self._departure = Departure(runs_engine=distribution.runs_engine)
        self._program_ended = False
        self._store_failure: Failure | None = None
        self._until = 0.0
        self._failures: ev.Failures | None = None
        self._then = State.RECOVERING
        self.state = State.TRAINING
        self.connecting = False
        self.reopening: do.Reopen | None = None
        self.closed: do.Close | None = None

    @property
    def over(self) -> bool:
        """Whether the round is over for this node."""
        return self.state in _OVER

    @property
    def keeps_state(self) -> bool:
        """Whether the workers' state may be the last one: the run has not ended well, nor have they saved to leave."""
        saved = self.state is State.LEFT and self.are_all(self._workers.stopped)
        return self.state is not State.SUCCEEDED and not saved

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of the round."""
        return self._leader is not None

    @property
    def runs_engine(self) -> bool:
        """Whether the worker is the process of an engine, which newcomers join without a restart."""
        return self._plan.distribution.runs_engine

    def are_all(self, local_ranks: frozenset[int]) -> bool:
        """Return whether these are all workers of this node."""
        return len(local_ranks) == self._slots

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which to pass :class:`TimePassed`, though nothing happens; infinite for never.

        What is due already was looked at, and waits for something else to happen.
        """
        moments = [self._hangs.until]
        if self.state in (State.COLLECTING, State.SETTLING, State.CLOSING):
            moments.append(self._until)
        if self._departure.notice is not None:
            moments.append(self._departure.notice.until)
        if self._leader is not None:
            moments += self._leader.moments
        return min((moment for moment in moments if moment is not None and moment > self._now), default=float("inf"))

    def handle(self, event: ev.NodeEvent, now: float) -> list[do.TrainingAction]:
        """Take one event in, and return what shall be done, in this order."""
        if self.over or (self.state is State.ENDING and not isinstance(event, ev.EndWritten)):
            return []  # what is decided is being carried out
        self._now, self._out = now, []
        # First what is known: an answer, and each transition, has to see all of it.
        self._note(event)
        self._answer(event)
        self._look(event)
        return self._out

    def _note(self, event: ev.NodeEvent) -> None:
        """Take in what is known from now on."""
        match event:
            case ev.RoundSeen():
                if self.leads and event.waiting != self._seen.waiting:
                    self._do(do.ToMembers(messages.NodesWait(tuple(sorted(event.waiting)))))
                self._seen = event
            case ev.WorkersSeen():
                self._workers = event
            case ev.Noticed():
                self._departure.notice = event
            case ev.ProgramEnded():
                self._program_ended = True
            case ev.StoreEnded(failure):
                self._store_failure = failure
            case ev.ProgramSaved() if self._leader is not None:
                self._leader.newcomers.saved()
            case ev.Failures() if self.state is State.SETTLING:
                self._take_failures(event)
            case ev.EndWritten():
                self._row_written(event)
            case _:
                pass

    def _answer(self, event: ev.NodeEvent) -> None:
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

    def _look(self, event: ev.NodeEvent) -> None:
        """Go on to the next state, where what is known calls for it."""
        match self.state:
            case State.TRAINING | State.AT_BOUNDARY | State.STOPPED | State.DONE:
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

    def _look_at_round(self, event: ev.NodeEvent) -> None:
        """End the round for what has happened to other nodes, to this one, or between them."""
        if self._program_ended:
            self._begin_closing()  # the program has ended, whatever has happened to other nodes since
        elif self._broken:
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif isinstance(event, ev.TimePassed) and self._leader is not None and self._leader.coordinator.reached:
            # Only now that all else of this turn is known: a node that was lost meanwhile must not be waited for.
            self._end_round(_AT_BOUNDARY, lost=self._boundary.leavers)
        elif isinstance(event, ev.TimePassed) and (reason := self._lead()) is not None:
            self._end_round(reason, lost=self._boundary.leavers)
        elif self._is_overdue():
            self._end_round(f"{self._node} was preempted", lost=frozenset({self._node}))
        elif self._store_failure is not None:
            self._end_without_store(self._store_failure)
        elif (hung := self._hangs.due(self._now)) is not None:
            # Starting anew costs as much as a failure: a program may hang at the same place each time.
            self._charge(hung.failure, hung.hang.reason, lost=self._boundary.leavers)
        elif self.state is State.DONE and self._seen.all_done:
            self._begin_closing()

    def _look_at_workers(self) -> None:
        """Go on for what this node's workers have done."""
        codes = self._workers.exit_codes
        if self.are_all(self._workers.stopped):
            # All have saved; exit codes after that are irrelevant.
            if self.runs_engine:
                self._do(*self._departure.announce())
            else:
                self._stop()
        elif any(codes.values()):
            self.state = State.COLLECTING
            self._until = self._now + self._plan.distribution.handover_timeout.total_seconds() + _FINAL_MESSAGE_SECONDS
            self._do(do.InterruptWorkers())
            self._collect()
        elif len(codes) == self._slots:
            self.state = State.COLLECTING
            self._until = self._now + _FINAL_MESSAGE_SECONDS
            self._collect()

    def _is_overdue(self) -> bool:
        """Announce that this node leaves, if it has to; return whether its time is over."""
        self._do(*self._departure.begin())
        return self._departure.is_overdue(self._now)

    def _lead(self) -> str | None:
        """Do what rank 0's agent does of its own accord; return why the round must end at once, if it must."""
        if self._leader is None:
            return None
        actions, reason = self._leader.lead(
            self._seen.waiting, self._boundary.leavers, self._workers, self._now,
            connected=self.connecting, done=self.state is State.DONE,
        )  # fmt: skip
        self._do(*actions)
        return reason

    # --- messages ----------------------------------------------------------------------------------------------------

    def _from_leader(self, body: messages.BroadcastBody) -> None:
        match body:
            case messages.Prepare():
                self._ask(body)
            case messages.Decision():
                self._decided(body)
            case messages.RanksConnecting() if not self.connecting:
                self._workers_connect()
            case messages.NodesWait(nodes):
                self._waiting = frozenset(nodes)
            case messages.HangLesson():
                self._do(do.LearnLesson(body))
            case messages.DumpStacks() if self.state in _IN_ROUND:
                self._do(*self._hangs.received(body))

    def _from_member(self, node: str, body: messages.ReportBody) -> None:
        match body:
            case messages.Leaving():
                self._boundary.leavers |= {node}
            case messages.Dumped():
                self._hangs.dumped(node)
            case messages.NodeStopped() if self._leader is not None:
                self._leader.coordinator.stop(node, body)
            case messages.Vote() if self._leader is not None:
                decision = self._leader.coordinator.take(node, body, self._now, sorted(self._boundary.leavers))
                if decision is not None:
                    self._do(do.ToMembers(decision))

    def _workers_connect(self) -> None:
        self.connecting = True
        self._do(do.NoteConnecting())

    def _ask(self, proposal: messages.Prepare) -> None:
        """Have the workers vote, or vote for those that cannot."""
        workers = self._workers
        present = workers.present if self.state is State.TRAINING else frozenset[int]()
        vote = self._boundary.ask(proposal, present, finished=bool(workers.finished))
        self._do(do.AskWorkers(proposal) if vote is None else do.ToLeader(vote))

    def _take_vote(self, local_rank: int, vote: messages.Vote) -> None:
        whole = self._boundary.take(local_rank, vote, finished=bool(self._workers.finished))
        if whole is not None:
            self._do(do.ToLeader(whole))

    # --- the agreed step ---------------------------------------------------------------------------------------------

    def _decided(self, decision: messages.Decision) -> None:
        self._boundary.decided(decision)
        leavers = self._boundary.leavers
        if decision.go and leavers:
            self._do(do.Log(f"All workers stop after the same step; not in the next round: {_list(leavers)}."))
        self._do(do.TellWorkers(Decide(decision.boundary, decision.go, stay=self._node not in leavers)))
        if decision.go:
            self.state = State.AT_BOUNDARY if self.state is State.TRAINING else self.state
            self._report_stopped()

    @property
    def _leaves(self) -> bool:
        return self._departure.notice is not None

    @property
    def _broken(self) -> bool:
        """Whether the workers of the round cannot go on, or need not be waited for."""
        return self._seen.over or bool(self._seen.lost - self._free_to_go)

    @property
    def _free_to_go(self) -> frozenset[str]:
        """Nodes whose loss means nothing: they leave at the agreed step, and have stopped there.

        Only rank 0's agent knows who has. It ends the round where another one is lost, so the others wait for that.
        """
        leavers = self._boundary.leavers if self._boundary.agreed else frozenset[str]()
        return leavers if self._leader is None else leavers & self._leader.coordinator.stopped

    def _stop(self) -> None:
        """All local workers have stopped: wait for the others, or go."""
        self.state = State.STOPPED
        self._report_stopped()
        # Rank 0's node stays until all have stopped, or nobody would end the round for the others.
        if self._node in self._boundary.leavers and not self.leads and self._leaves:
            self._do(do.FlushProgress(), do.StopWorkers(self._departure.seconds_left(self._now)), do.Disconnect())
            self.state = State.LEFT  # rank 0's agent ends the round when all have stopped

    def _report_stopped(self) -> None:
        """Report that at the agreed step nobody has to wait for this node any more, once that is so."""
        if self._boundary.agreed and self.state in (State.STOPPED, State.DONE):
            self._do(do.ToLeader(messages.NodeStopped(finished=self.state is State.DONE)))

    # --- workers that have ended -------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait until the connections of sessions that end have ended: all their messages arrive before that."""
        workers = self._workers
        failed = any(workers.exit_codes.values())
        if self._broken or (failed and self._leaves):
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif workers.leaving and self._now < self._until:
            return
        elif self.are_all(workers.stopped):
            # What they sent before they ended shows that they had stopped at the boundary: they have not failed.
            self.state = State.AT_BOUNDARY
            self._look_at_workers()
        elif failed:
            self.state, self._until = State.SETTLING, float("inf")
            self._do(do.ReadFailures(workers.gave_way))
        else:
            self.state = State.DONE
            self._do(do.ReportDone())
            self._report_stopped()

    def _take_failures(self, failures: ev.Failures) -> None:
        self._failures = failures
        failure = failures.failure
        # SIGKILL is nobody's consequence. SIGTERM may be: a preempted container's processes all get it.
        killed = failure is not None and failure.exit_code == KILLED
        self._until = self._now + (0.0 if killed else _SETTLE_SECONDS)
        if failure is not None and failure.kind in _WAITED:  # silence is noticed late, and another may be the cause
            self._until += SilenceLimit(self._plan.rendezvous.timings).longest

    def _settle(self) -> None:
        """Find out whose fault a failure is: a lost node's, this node's preemption, or the worker's own."""
        failures = self._failures
        if self._broken or self._leaves:
            self._end_round(self._why_broken(), lost=self._seen.lost)
        elif failures is None:
            return
        elif self._boundary.agreed and self._boundary.leavers:
            # One that has stopped is free to go. Its loss ends no round, but breaks the connections of those that save.
            self._end_round(f"a worker on {self._node} failed while others left", round_failed=True)
        elif self._store_failure is not None and (failures.failure is None or failures.failure.kind in _WAITED):
            self._end_without_store(self._store_failure)
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
        self._charge(failure, reason, lost=frozenset({self._node}) if self._stays else self._late)

    @property
    def _late(self) -> frozenset[str]:
        """This node, where its new workers wait for imports: the others do not wait for it, if they are enough."""
        return frozenset({self._node}) if self._workers.importing else frozenset()

    def _charge(self, failure: Failure, reason: str, *, lost: frozenset[str]) -> None:
        """Restart after a failure that nothing else explains, or end the run."""
        self._do(do.FlushProgress(), do.StopWorkers())
        self._change_row(self._what_follows(failure, reason, lost=lost))

    def _end_without_store(self, failure: Failure) -> None:
        """End the round: its workers can open no further process group, and new processes cannot connect at all."""
        reason = f"the process of the round's store on {self._node} ended with exit code {failure.exit_code}"
        change = self._what_follows(failure, reason, lost=self._late)
        if isinstance(change, do.Reopen):  # the workers are well: those that stay keep their state
            self._end_round(reason, lost=self._late, failures=change.failures)
        else:
            self._do(do.FlushProgress(), do.StopWorkers())
            self._change_row(change)

    def _what_follows(self, failure: Failure, reason: str, *, lost: frozenset[str]) -> do.Reopen | do.Close:
        """Record a failure and say what follows: another round, or the end of the run."""
        workers, round_, seconds = self._workers, self._round, self._now - self._entered
        step = workers.step if self._opens_session or workers.in_session else None
        # One that trains alone need not connect.
        connected = self.connecting or (round_.world_size == 1 and seconds >= _ALONE_SECONDS)
        record = failure.record(self._node, step, connected=connected, world_size=round_.world_size)
        *log, change = charge(
            failure, record, reason, lost=lost, waiting=self._waiting, round_=round_, seconds=seconds, plan=self._plan
        )
        self._do(do.RecordFailure(failure, step), *log)
        return change

    # --- the end of the round ----------------------------------------------------------------------------------------

    def _end_round(
        self,
        reason: str,
        *,
        lost: frozenset[str] = frozenset(),
        failures: tuple[FailureRecord, ...] = (),
        round_failed: bool = False,
    ) -> None:
        """Interrupt the workers and end the round, so that the next one forms; or leave, where this node has to.

        Args:
            lost: members that will not be back.
            failures: the run's failures, with the one that ends the round.
            round_failed: whether nobody is to blame but the network.
        """
        me, workers, leaves = frozenset({self._node}), self._workers, self._leaves
        # At an agreed step it is agreed, too, who will not be back, whatever ends the round now.
        lost |= (self._boundary.leavers if self._boundary.agreed else frozenset()) | (me if leaves else frozenset())
        # Programs without a session save when they get SIGTERM, if at all: those that continue wait for what they save.
        saving = not (workers.in_session or self.runs_engine)
        finishing = lost & (self._boundary.leavers | me) if saving else frozenset[str]()
        self._do(do.FlushProgress())
        if leaves or not self._stays:
            self._do(do.StopWorkers(self._departure.seconds_left(self._now)))
        else:
            self._do(do.InterruptWorkers())
        if leaves:
            # A failed worker's agent may not have announced it yet: rank 0's would take this node for lost.
            self._do(*self._departure.announce())
            if not self.leads:  # rank 0 writes the row first: the others would take it for lost
                self._do(do.Disconnect())
        grace = self._plan.preemption.grace.total_seconds()
        self._then = State.LEFT if leaves else State.RECOVERING
        self._change_row(do.Reopen(reason, lost, finishing, grace, failures, round_failed))

    def _begin_closing(self) -> None:
        """Mark the run's good end. Rank 0 writes; the others make sure that it has."""
        self.state, self._until = State.CLOSING, self._now + (0.0 if self.leads else _CLOSING_SECONDS)
        self._look_at_closing()

    def _look_at_closing(self) -> None:
        if self._seen.over or self._now >= self._until:
            self._change_row(do.Close(succeeded=True))

    def _change_row(self, action: do.Reopen | do.Close) -> None:
        if isinstance(action, do.Close):
            self.closed = action
        else:
            self.reopening = action
        self.state = State.ENDING
        self._do(action)

    def _row_written(self, event: ev.EndWritten) -> None:
        if self.closed is not None:
            # Else another node has closed the run, which joining tells, or reopened the round.
            self._then = State.RECOVERING
            if event.mine:
                self._then = State.SUCCEEDED if self.closed.succeeded else State.FAILED
        elif (
            event.mine
            and (how := self.reopening) is not None
            and not how.failures
            and (self.leads or self._round.members[0].node in how.lost)
        ):
            # Who has written in place of a rank 0 that is still there does not know who has announced to leave.
            in_order = self._boundary.leavers | event.left_in_order | {self._node}
            faulty = faulty_members(self._round, how.lost, in_order)
            self._do(*(do.Strike(member.host_id, "lost its connection") for member in faulty if member.host_id))
        self.state = self._then

    def _why_broken(self) -> str:
        """Return why the round is broken, or must be left."""
        if lost := self._seen.lost - self._free_to_go:
            return f"lost {_list(lost)}"
        if self._seen.was_given_up:
            return f"{self._node} did not run for some seconds"
        if gone := self._seen.lost:
            # Its notice has ended before it could end the round.
            return ", ".join(f"{node} was preempted" for node in sorted(gone))
        return "the round was reopened" if self._seen.over else f"{self._node} was preempted"


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
