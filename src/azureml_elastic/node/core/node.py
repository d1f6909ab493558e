"""One node over all rounds of its run: it gets ready, joins a round, takes part in it, and begins anew, until it ends.

::

    OUTSIDE ──> PREPARING ──> RETURNING ──> FINDING ──> JOINING ──> STARTING ──> MEMBER ──> ENDED
                    ^                                      │  ^                  ^  │
                    │                                      v  │                  │  v
                    │                                     DEFERRING to the one that ends the round
                    └──────────────────────── another round follows ────────────────┘

On its way into a round a :class:`~azureml_elastic.node.core.joiner.Joiner` decides, in one a
:class:`~azureml_elastic.node.core.training.Training`. :meth:`Node.handle` is all that changes any of them, but for
what rank 0's hub sends, which :meth:`Node.receive` and :meth:`Node.look` take in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from azureml_elastic.config import Plan, RendezvousTimings
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.hub_state import HubReports, HubView
from azureml_elastic.node.core.joiner import Joiner, JoinState
from azureml_elastic.node.core.preparing import Preparation, Stage
from azureml_elastic.node.core.round import Limits, Member, NewestRound, Round, turn_of
from azureml_elastic.node.core.training import State, Training


class Part(Enum):
    """What a node is about."""

    OUTSIDE = "outside"
    """It has not asked for a place yet."""

    PREPARING = "preparing"
    """Its workers get ready, so that nobody waits for them once it has a place."""

    RETURNING = "returning"
    """It ends the round in which it was, unless another node has."""

    FINDING = "finding"
    """It reads where the run is, and who takes part."""

    JOINING = "joining"
    STARTING = "starting"
    """Its workers get their places."""

    MEMBER = "member"

    DEFERRING = "deferring"
    """Another survivor is to end the round, and this node makes sure of it."""

    ENDED = "ended"


@dataclass(frozen=True)
class _Deferral:
    """What a node knows that leaves the end of a round to another one.

    Args:
        how: how it ends the round where the other one has not.
        until: monotonic seconds until which it waits.
        informed: whether rank 0's node knows who is lost, so that nobody else has to end it while that one lives.
    """

    how: do.Reopen
    until: float
    informed: bool


class Node:
    """One node.

    Args:
        me: row of this node.
        newest: newest version of the round that this node knows, from wherever.

    Attributes:
        calls: whether an action's answer is awaited, before which nothing else may be brought.
        joiner: what decides on the way into a round, ``None`` otherwise.
        training: what decides in a round, ``None`` otherwise, and without a plan.
        round: the round entered last; ``None`` before the first.
        rank: rank of this node in it.
        entered: monotonic seconds at which it was entered.
        seen: what is known of it.
        ending: how this node's part has ended; ``None`` where another node has ended the run.
        closed: the end of the run, where this node has ended it.
        keeps_state: whether what this node's workers hand over when they end is kept for the next start of the run:
            whatever ends this node may end all of them, and nobody else may hold a state.
    """

    def __init__(
        self,
        me: Member,
        limits: Limits,
        timings: RendezvousTimings,
        newest: NewestRound,
    ) -> None:
        self.me = me
        self.part = Part.OUTSIDE
        self.calls = False
        self.joiner: Joiner | None = None
        self.training: Training | None = None
        self.round: Round | None = None
        self.rank = 0
        self.seen = ev.RoundSeen()
        self.ending: State | None = None
        self.closed: do.Close | None = None
        self.keeps_state = True
        self._limits = limits
        self._timings = timings
        self._newest = newest
        self._plan: Plan | None = None
        self._preparation: Preparation | None = None
        self._deferral: _Deferral | None = None
        self._opens_session = False
        self.entered = 0.0
        self._is_linked = False
        self._over = False
        self._reports = HubReports()
        self._must_look = False
        self._looks = False

    def run_workers(self, plan: Plan, *, opens_session: bool) -> None:
        """Have this node run the workers, too, instead of another agent.

        Args:
            opens_session: whether the program uses this library.
        """
        self._plan, self._opens_session = plan, opens_session
        stays = plan.distribution.keeps_processes(opens_session=opens_session)
        self._preparation = Preparation(self.me.node, plan, self._newest, stays=stays)

    @property
    def prepares(self) -> bool:
        """Whether its workers get ready: :class:`~.events.ReadinessSeen` is to be brought again and again."""
        return self._preparation is not None and self._preparation.stage is not Stage.READY

    @property
    def last_round(self) -> int:
        """Number of the round entered last, 0 before the first."""
        return self.round.number if self.round is not None else 0

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self.round is not None and self.rank == 0

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which this node must be looked at though nothing happens; infinite for never.

        While it :attr:`prepares` it is looked at every now and then, as nothing tells how far imports are.
        """
        if self.calls or self.prepares:
            return float("inf")
        if self.part is Part.DEFERRING and self._deferral is not None:
            return self._deferral.until
        if self.part is Part.JOINING and self.joiner is not None:
            return self.joiner.deadline
        return self.training.deadline if self.training is not None else float("inf")

    def handle(self, event: ev.NodeEvent, now: float) -> list[do.Action]:
        """Take one event in, and return what shall be done, in this order.

        After an action that is a call, which is the last one, only its answer may be brought.
        """
        self.calls = False
        if isinstance(event, ev.PlaceWanted):
            return self._prepare()
        if isinstance(event, ev.MustLeave):
            self.part, self.ending = Part.ENDED, State.LEFT
            return [do.LeaveRun()]
        if self._preparation is not None and self.prepares:
            return self._get_ready(self._preparation, event, now)
        match self.part:
            case Part.RETURNING:
                return self._find()
            case Part.FINDING if isinstance(event, ev.Started):
                known, timings, has_left = self.last_round, self._timings, event.has_left
                self.joiner = Joiner(self.me, self._limits, timings, last_round=known, has_left=has_left)
                self.part = Part.JOINING
                return self._join(event, now)
            case Part.JOINING:
                return self._join(event, now)
            case Part.STARTING:
                return self._begin_training(now)
            case Part.DEFERRING if self._deferral is not None:
                return self._await_end(self._deferral, event, now)
            case Part.MEMBER if self.training is not None:
                return self._train(self.training, event, now)
        return []

    def _call(self, *actions: do.Action) -> list[do.Action]:
        """Return actions of which the last one is a call."""
        self.calls = True
        return [*actions]

    # --- on the way into a round -------------------------------------------------------------------------------------

    def _prepare(self) -> list[do.Action]:
        self.joiner = self.training = None
        if self._plan is None:
            return self._return()
        self.part = Part.PREPARING
        assert self._preparation is not None
        actions = self._preparation.begin(self.round)
        self.calls = bool(actions)
        return actions

    def _get_ready(self, preparation: Preparation, event: ev.NodeEvent, now: float) -> list[do.Action]:
        actions = preparation.handle(event, now)
        if self.prepares:
            self.calls = any(isinstance(action, do.ReadRound) for action in actions)
            return actions
        if self.part is Part.PREPARING:
            return [*actions, *self._return()]
        return [*actions, *self._join(ev.GotReady(preparation.waited), now)]

    def _return(self) -> list[do.Action]:
        if self.round is None or self._newest.after(self.round) is not None:
            return self._find()
        self.part = Part.RETURNING
        # Before the disconnection, by which the others would take this node for lost and go on without it.
        return self._call(do.Reopen(f"{self.me.node} has left the round", lost=self.seen.lost))

    def _find(self) -> list[do.Action]:
        self.part, self._is_linked, self.seen = Part.FINDING, False, ev.RoundSeen()
        return self._call(do.LeaveRound(), do.FindRound(self.round))

    def _join(self, event: ev.NodeEvent, now: float) -> list[do.Action]:
        joiner = self.joiner
        assert joiner is not None
        if isinstance(event, ev.RowPrepared):
            self.me = replace(self.me, strikes=event.me.strikes)
        if isinstance(event, ev.Entered):
            self._is_linked = True
        actions: list[do.Action] = [*joiner.handle(event, now)] if not isinstance(event, ev.Abandoned) else []
        if joiner.state is JoinState.IN:
            self.joiner = None
            if self._plan is None:
                self.part = Part.MEMBER
                return actions
            assert self.round is not None
            self.part = Part.STARTING
            return self._call(*actions, do.StartWorkers(self.round, self.rank))
        if joiner.state is JoinState.OVER:
            self.part, self.keeps_state = Part.ENDED, joiner.round.state != "succeeded"
        elif actions and isinstance(actions[-1], do.Call):
            # A call takes up to seconds, and one for a version that has passed would be for nothing.
            if self._newest.after(joiner.round) is not None:
                return actions[:-1]
            if isinstance(actions[-1], do.GetReady):
                if self._preparation is None:
                    return [*actions[:-1], *self._join(ev.GotReady(took_time=False), now)]
                self._preparation.begin_as_spare(now)
                return actions[:-1]
            if isinstance(how := actions[-1], do.Reopen):
                actions[-1:] = self.end_round(how, now)
                if self.part is Part.DEFERRING:
                    joiner.handle(ev.LinkEnded(), now)  # the connection is to the one that ends the round from now on
                    return actions
            self.calls = True
            if isinstance(call := actions[-1], do.PrepareRow):
                actions[-1] = self._preparing_of(call.round)
            elif isinstance(call, do.Enter):
                self.round, self.rank, self.entered = call.round, call.rank, now
                self._is_linked, self._over, self._must_look = False, False, False
                self._reports, self.seen = HubReports(), ev.RoundSeen()
        return actions

    def _preparing_of(self, round_: Round) -> do.PrepareRow:
        """Return what prepares this node for an open round, after the one that it has been in."""
        was_lost = self.round is not None and self.me.node not in round_.previous
        # A pair may have been separated while it trained: its workers fail then, or one counts as lost and is back.
        losses = self.round.losses if self.round is not None else 0
        return do.PrepareRow(round_, was_lost, bool(round_.failed_rounds) or round_.losses > losses)

    # --- in a round --------------------------------------------------------------------------------------------------

    def _begin_training(self, now: float) -> list[do.Action]:
        assert self.round is not None
        assert self._plan is not None
        self.part = Part.MEMBER
        self.training = Training(
            self.round,
            self.me.node,
            self._plan,
            opens_session=self._opens_session,
            entered=self.entered,
            now=now,
        )
        return []

    def _train(self, training: Training, event: ev.NodeEvent, now: float) -> list[do.Action]:
        actions: list[do.Action] = [*training.handle(event, now)]
        if any(isinstance(action, do.Disconnect) for action in actions):
            self._is_linked = False
        if actions and isinstance(how := actions[-1], do.Reopen):
            return [*actions[:-1], *self.end_round(how, now)]
        if not training.over:
            return actions
        self.training = None
        if training.state is State.RECOVERING:
            return [*actions, *self._prepare()]
        self.part, self.ending, self.closed = Part.ENDED, training.state, training.closed
        self.keeps_state = training.keeps_state
        return actions

    # --- whose turn it is to end a round -----------------------------------------------------------------------------

    def end_round(self, how: do.Reopen, now: float) -> list[do.Action]:
        """End the round, or leave that to the survivor whose turn it is, for a while.

        The record of a failure, and that this node leaves, are known here alone: another one would write a round
        without them.
        """
        round_, me = self.round, self.me.node
        assert round_ is not None
        if (newer := self._newest.after(round_)) is not None:
            return self._follow(newer, now)
        if how.at_once or how.failures or me in how.lost:
            return [how]
        informed = self.seen.lost if self._is_linked_to_leader else frozenset[str]()
        seconds, first = turn_of(round_, how.lost, me, informed=informed)
        if not seconds:
            return [how]
        self.part, self._deferral = Part.DEFERRING, _Deferral(how, now + seconds, bool(informed))
        # All others would have to read the row. Rank 0's hub sends the next version to its members.
        return [do.AwaitEnd(first, seconds)] if first != round_.members[0] else []

    @property
    def _is_linked_to_leader(self) -> bool:
        """Whether this node is connected to rank 0's hub."""
        assert self.round is not None
        return not self.seen.was_given_up and self.round.members[0].node not in self.seen.lost

    def _await_end(self, deferral: _Deferral, event: ev.NodeEvent, now: float) -> list[do.Action]:
        """Go on once another node has ended the round, or end it where none has in time or rank 0's node is gone."""
        assert self.round is not None
        joiner, newer = self.joiner, self._newest.after(self.round)
        is_due = now >= deferral.until or (deferral.informed and not self._is_linked_to_leader)
        if newer is None and not is_due:
            if joiner is not None and not isinstance(event, ev.TimerFired):
                joiner.handle(event, now)  # it only notes it
            return []
        self.part, self._deferral = Part.MEMBER if joiner is None else Part.JOINING, None
        if newer is not None:
            return self._follow(newer, now)
        how = replace(deferral.how, lost=deferral.how.lost | self.seen.lost)
        if self.training is not None:
            self.training.reopening = how
        self.calls = joiner is not None
        return [how]

    def _follow(self, newer: Round, now: float) -> list[do.Action]:
        """Go on, as another node has ended the round."""
        if self.training is not None:
            return self._train(self.training, ev.EndWritten(mine=False), now)
        return self._join(ev.NewerRound(newer), now) if self.joiner is not None else []

    # --- what is known of a round ------------------------------------------------------------------------------------

    def receive(self, event: ev.HubSent | ev.LinkEnded) -> None:
        """Take in what rank 0's hub has sent, or that the connection to it has ended."""
        self._reports.take(event)

    def request_look(self) -> None:
        """Have the round's row looked at: it may have changed."""
        self._must_look = True

    def row_seen(self, event: ev.RowSeen) -> None:
        """Take in what the round's row has held."""
        self._looks = False
        if event.round is not self.round:  # a look at the round before says nothing of this one
            return
        if event.changed is None:
            self._must_look = True  # at the next turn: a table that fails at once must not keep the agent busy
        else:
            self._over = self._over or event.changed

    def look(self, view: HubView, now: float) -> list[do.Action]:
        """Bring :attr:`seen` up to date.

        Args:
            view: what this node's own hub knows of its members; counts on rank 0 alone.
        """
        round_ = self.round
        if round_ is None or not self._is_linked:
            self.seen = ev.RoundSeen()
            return []
        view = view if self.leads else HubView()
        ended = self._newest.after(round_) is not None
        self._must_look |= self._reports.take_read_request()
        # Once over it stays so, although the row that has shown it is not looked at again.
        self._over = self._over or view.was_given_up or self._reports.was_given_up or self._reports.broken or ended
        debounce = self._timings.rescale_debounce.total_seconds()
        self.seen = self._reports.see(
            round_, self.me.node, view, over=self._over, limits=self._limits, debounce=debounce, now=now
        )
        if not self._must_look or self._looks:
            return []
        # A request during a look begins another one after it: what is asked for may have changed since.
        self._must_look, self._looks = False, True
        return [do.LookAtRow(round_)]

    def absent(self, view: HubView) -> frozenset[str]:
        """Return the lost members that have never connected to rank 0's hub."""
        return self._reports.absent | view.absent if self.leads else self._reports.absent
