"""How a node comes into its next round, as one state machine.

::

       ┌─────────────────────── a newer version of the round ──────────────────────┐
       v                                                                           │
    CHOOSING ──> CANDIDATE of an open round ──> RESTORING ─────────────────────────┤
       │                                                                           │
       ├───────> SPARE beside a sealed round without this node ────────────────────┤
       │                                                                           │
       ├───────> ENTERING a sealed round with this node ──> OUTSIDE ───────────────┘
       │                     │                                 │
       v                     └────────────> IN <───────────────┘
     OVER

- **Choosing** it acts on a version of the round's row, after a pause where it has acted on that one before.
- A **candidate** sends its row to a hub where the candidates meet, or writes it into the table; one of them seals.
- A **spare** is connected to rank 0's hub, which makes room for it. Where that hub sends nothing and the heartbeat's
  row does not change either, or where it was the only member's and refuses connections now, the spare reopens the round
  without its members.
- A node that enters connects to rank 0's hub. If its machine does not answer, either that node is gone or this one is
  cut off; the majority of members decides. In the second case this node stays **outside** and keeps trying.
- The row may have gone back in time, which the heartbeat of a later round shows: then it is **restored**.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core import join_events as on
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.joining import Staleness, greeting_of, is_leader_unreachable
from azureml_elastic.node.core.round import Limits, Member, Round, has_gone_back, reopened
from azureml_elastic.node.core.sealing import Candidacy, Verdict

__all__ = ["JoinState", "Joiner"]

_MAX_BACKOFF_SECONDS = 2.0
"""Longest pause before a version of the round is acted on again, or a new attempt of nodes that could not connect."""

_ALONE_SECONDS = (0.1, 2.0)
"""First and longest pause between two reads of a spare that rank 0's hub has sent nothing."""

_CHECK_SECONDS = 20.0
"""Time between two reads of a spare that is connected to rank 0's hub, in case the hub fails to send a change."""

_RETRY_SECONDS = (0.5, 2.0)
"""First and longest pause between attempts to enter a round that may go on without this node."""

_KEY_TRIES = 4
"""Further attempts to enter a round whose hub holds another key of the run than this node."""


class JoinState(Enum):
    """See the module."""

    CHOOSING = "choosing"
    CANDIDATE = "candidate"
    RESTORING = "restoring"
    SPARE = "spare"
    ENTERING = "entering"
    OUTSIDE = "outside"
    IN = "in"
    OVER = "over"


@dataclass
class _Link:
    """The connection to another node's hub.

    Args:
        greeting: what this node has sent last.
        answered: whether the hub has sent anything yet.
        position: position among the candidates that should seal, as the hub has sent it.
        received: newest version of the round that the hub has sent.
    """

    to: Member
    greeting: messages.Watch
    answered: bool = False
    position: int | None = None
    received: Round | None = None


@dataclass
class _Waiting:
    """What a node knows that waits beside a sealed round, enters it or stays outside of it.

    Args:
        heartbeat: whether the heartbeat's row still changes.
        pause: seconds before the next attempt.
        dial_at: when to connect to rank 0's hub.
        read_at: when to read the round's row.
        unreachable_from: members that cannot reach this node.
        reached: whether rank 0's hub has answered before.
        has_ended: whether the process of the only member has ended.
        tries: attempts with another key of the run.
        reason: why rank 0's hub cannot be reached.
        entered: whether it was reached in the end.
        later: number of a later round, whose row is to be restored.
    """

    heartbeat: Staleness
    pause: float
    dial_at: float = 0.0
    read_at: float = 0.0
    unreachable_from: tuple[str, ...] = ()
    rank: int = 0
    reached: bool = False
    has_ended: bool = False
    tries: int = 0
    reason: str = ""
    entered: bool = False
    later: int = 0


class Joiner:
    """One node on its way into a round.

    Args:
        last_round: number of the round in which this node was last, 0 for none.
        has_left: whether this node's row says that it has left.

    Attributes:
        round: version of the round's row that it acts on.
        deadline: monotonic seconds at which ``TimerFired`` is due.
    """

    def __init__(
        self, me: Member, limits: Limits, timings: RendezvousTimings, *, last_round: int = 0, has_left: bool = False
    ) -> None:
        self.state = JoinState.CHOOSING
        self.round = Round()
        self.me = me
        self.deadline = float("inf")
        self._limits = limits
        self._timings = timings
        self._last_round = last_round
        self._has_left = has_left
        self._is_prepared = False
        self._known: Mapping[str, Member | Mapping[str, Any]] = {}
        self._dialled: _Link | None = None
        self._link: _Link | None = None
        self._must_read = False
        self._seen: Round | None = None
        self._repeats = 0
        self._ended: _Link | None = None
        self._candidacy: Candidacy | None = None
        self._waiting = self._new_waiting(0.0)

    def handle(self, event: on.Event, now: float) -> list[on.Action]:
        """Process what has happened, and return what is to be done."""
        match event:
            case on.Started():
                self._known = event.known
                return self._go_on(event.round, now)
            case on.NewerRound():
                return self._moved(event.round, now)
            case on.Woken():
                self._must_read |= event.must_read
            case on.Connected():
                self._link, self._dialled = self._dialled, None
            case on.LinkEnded():
                self._ended, self._link = self._link, None
            case on.Reopened():
                self.state = JoinState.CHOOSING
                return [on.ReadRound()]
            case on.MarksChanged():
                self.me = event.me
            case on.HubSent():
                self._hub_sent(event.message)
        match self.state:
            case JoinState.CHOOSING:
                return self._choosing(event, now)
            case JoinState.CANDIDATE:
                return self._waits_for_seal(event, now)
            case JoinState.RESTORING:
                return self._restoring(event, now)
            case JoinState.SPARE:
                return self._waits_beside(event, now)
            case JoinState.ENTERING:
                return self._entering(event, now)
            case JoinState.OUTSIDE:
                return self._outside(event, now)
        return []

    # --- from version to version -------------------------------------------------------------------------------------

    def _go_on(self, round_: Round, now: float) -> list[on.Action]:
        """Act on a version of the round, after a pause where it is not newer than the one before."""
        pause = 0.0
        if round_.is_newer_than(self._seen):
            self._seen, self._repeats = round_, 0
        else:
            # The table and this node disagree about what follows this version. Acting on it at once, and again, would
            # keep the agent and the table busy.
            self._repeats += 1
            pause = min(_MAX_BACKOFF_SECONDS, 0.05 * 2.0**self._repeats)
        # What is between nodes that cannot connect needs time to recover, and each round costs all others a restart.
        if round_.state == "open" and round_.failed_rounds:
            pause += min(_MAX_BACKOFF_SECONDS, 0.1 * 2**round_.failed_rounds)
        if round_.state == "sealed":
            self._known = {member.node: member for member in round_.members}
        self.state, self.round, self.deadline = JoinState.CHOOSING, round_, now + pause
        return [] if pause else self._act()

    def _moved(self, round_: Round, now: float) -> list[on.Action]:
        """Go on with another version of the round, which the nodes at this node's hub may not have."""
        waited = self.state in (JoinState.CANDIDATE, JoinState.RESTORING, JoinState.SPARE)
        # Not back to the hub that has sent it.
        to_hub = self._link is not None and round_.is_newer_than(self._link.received)
        return [*([on.Forward(round_, to_hub)] if waited else []), *self._go_on(round_, now)]

    def _act(self) -> list[on.Action]:
        round_, self.deadline = self.round, float("inf")
        if round_.closed:
            self.state = JoinState.OVER
            return [on.Finish(round_)]
        if round_.state == "open":
            return [on.Prepare(round_)]
        rank = round_.rank_of(self.me.node, self.me.incarnation)
        # The round has this node's port for the store, on which it listens only since it was prepared.
        if rank is not None and self._is_prepared and self._last_round < round_.number:
            self.state, self._waiting = JoinState.ENTERING, self._new_waiting(_RETRY_SECONDS[0])
            self._waiting.rank = rank
            return [on.Enter(round_, rank)]
        if self._last_round == round_.number:
            # This node has left its own round, and the node that should end it may be dead.
            return [on.Reopen(f"{self.me.node} has left the round")]
        return [on.GetReady()]

    def _choosing(self, event: on.Event, now: float) -> list[on.Action]:
        match event:
            case on.TimerFired():
                return self._act()
            case on.Prepared():
                return self._begin_candidacy(event, now)
            case on.GotReady(took_time=False):
                return self._begin_spare(now)
            case on.GotReady():
                return [on.ReadRound()]
            case on.RoundRead():
                return self._go_on(event.round, now)
        return []

    # --- a candidate of an open round --------------------------------------------------------------------------------

    def _begin_candidacy(self, prepared: on.Prepared, now: float) -> list[on.Action]:
        self.state, self.me, self._is_prepared = JoinState.CANDIDATE, prepared.me, True
        me = prepared.me
        self._candidacy = candidacy = Candidacy(
            self.round, me, self._known, self._limits, self._timings, now, wrote_round=prepared.wrote_round
        )
        # In the first round nodes find each other by their rows. Later they know each other, and a message suffices.
        if self.round.number == 1 or self._has_left:
            return [on.WriteRow(me, self.round)]
        return self._look_after(candidacy, now)

    def _waits_for_seal(self, event: on.Event, now: float) -> list[on.Action]:
        mine = self._candidacy
        assert mine is not None
        match event:
            case on.Woken():
                mine.should_seal = event.should_seal
                mine.schedule.hub_received()
                # It decides when the last node has come, which it need not read the rows for.
                if mine.knows_all:
                    return [on.TakeCandidates()]
            case on.HubSent(message=messages.SealPosition(position=int())):
                mine.schedule.candidate_came()
            case on.MarksChanged():
                mine.offer_again(now)
            case on.RowWritten():
                mine.written, self._has_left = True, False
            case on.ConnectFailed():
                return self._connect_failed(mine, event, now)
            case on.LinkEnded(refused=True):
                return [on.ReadKey()]
            case on.LinkEnded():
                self._choose_another(mine, now)
            case on.KeyRead(changed=True):
                mine.schedule.read_now(now)  # the same hub accepts this node now
            case on.KeyRead():
                self._choose_another(mine, now)
            case on.RowsUnavailable():
                mine.could_not_read(now)
            case on.RowsRead():
                return self._rows_read(mine, event, now)
            case on.CandidatesTaken():
                return self._decide(mine, event.candidates, now)
            case on.HeartbeatRead() | on.RoundTooLarge() | on.RoundWritten() | on.RoundRead():
                return self._sealing(mine, event, now)
        return self._look_after(mine, now)

    def _choose_another(self, mine: Candidacy, now: float) -> None:
        """Record that the connection to a hub has ended: after some times another one is chosen."""
        if (ended := self._ended) is not None:
            mine.points.connection_broke(ended.to, answered=ended.answered)
            # A frozen hub accepts once more. The seal that it has not sent on is in the row, and others would take this
            # node for lost before it looks there by itself.
            mine.schedule.read_now(now)

    def _connect_failed(self, mine: Candidacy, failed: on.ConnectFailed, now: float) -> list[on.Action]:
        assert self._dialled is not None
        was_known = mine.points.connect_failed(self._dialled.to, refused=failed.refused)
        self._dialled = None
        if failed.me != self.me:
            self.me = failed.me
            mine.offer_again(now)
        if was_known or not failed.refused:
            mine.schedule.read_now(now)
        # An attempt that was not refused took seconds: write this node's row before the next one.
        return self._look_after(mine, now, meets=failed.refused)

    def _look_after(self, mine: Candidacy, now: float, *, meets: bool = True) -> list[on.Action]:
        """Return what a candidate does next: connect, write its row, decide, read, or wait."""
        schedule, actions = mine.schedule, list[on.Action]()
        if not mine.offered:
            mine.offered = True
            actions.append(on.Offer(self.round, self.me))
        if meets:
            point = mine.points.choose()
            if point is None:
                actions += self._disconnect()
            else:
                actions += self._connect(point, f"where the nodes of round {self.round.number} meet")
                if self._dialled is not None:
                    return actions
        if self._must_read:
            self._must_read = False
            schedule.read_now(now)
        link, is_first = self._link, mine.points.is_first
        # Few read often: a thousand nodes would read a thousand rows each.
        schedule.set_active(link is None or link.position is not None or (is_first and mine.should_seal), now)
        # Who is at no hub, and at whose own nobody meets, is known by its row alone. The others write theirs after a
        # second, since the node of the hub may die with all that it was sent.
        if not mine.written and ((link is None and not is_first) or now >= mine.write_at):
            return [*actions, on.WriteRow(self.me, self.round)]
        if schedule.take_decision(now):
            return [*actions, on.TakeCandidates()]
        if schedule.should_read(now):
            return [*actions, on.ReadRows()]
        self.deadline = now + schedule.seconds_left(now)
        if not mine.written:
            self.deadline = min(self.deadline, mine.write_at)
        return actions

    def _rows_read(self, mine: Candidacy, read: on.RowsRead, now: float) -> list[on.Action]:
        if has_gone_back(read.round, self.round):
            return [on.Restore(read.round, self.round)]
        if read.round.is_newer_than(self.round):
            return self._moved(read.round, now)
        mine.read(read.roster, self.me, now)
        return [on.TakeCandidates()]

    def _decide(self, mine: Candidacy, received: Sequence[Member], now: float) -> list[on.Action]:
        match mine.decide(received, self.me, now):
            case Verdict.SEAL:
                return [on.WriteRound(mine.sealed)]
            case Verdict.CONFIRM:
                return [on.ReadHeartbeat()]
            case Verdict.WAIT:
                return self._look_after(mine, now)

    def _sealing(self, mine: Candidacy, event: on.Event, now: float) -> list[on.Action]:
        match event:
            case on.HeartbeatRead() if event.round >= self.round.number:
                # The row went back in time. Sealing it would begin a second run beside one that may still train.
                return self._begin_restoring(event.round)
            case on.HeartbeatRead():
                mine.confirm(self.me)
                return [on.WriteRound(mine.sealed)]
            case on.RoundTooLarge():
                mine.fail(event.error)
                return [on.WriteRound(mine.sealed)]
            case on.RoundWritten(written=True):
                return [*(on.Warn(text) for text in mine.describe()), *self._moved(mine.sealed, now)]
            case on.RoundRead():
                return self._moved(event.round, now)
        return [on.ReadRound()]  # another node has changed it first

    # --- rows that went back in time ---------------------------------------------------------------------------------

    def _begin_restoring(self, later: int) -> list[on.Action]:
        """Wait until a node of a later round has written its row again, or write it where none of them lives.

        Args:
            later: number of the later round, which has written its heartbeat.
        """
        self.state = JoinState.RESTORING
        self._waiting = self._new_waiting(self._timings.table_heartbeat_interval.total_seconds() / 2)
        self._waiting.later = later
        warning = (
            f"The table's row holds round {self.round.number} (open), but round {later} has run: rows went back in "
            "time or are gone. Waiting for a node of that round."
        )
        return [on.Warn(warning), on.NudgeHeartbeat(), on.ReadHeartbeat()]

    def _restoring(self, event: on.Event, now: float) -> list[on.Action]:
        match event:
            case on.HeartbeatRead():
                if self._waiting.heartbeat.see(event.version, now):
                    return [on.Restore(self.round, Round(self._waiting.later, "sealed"))]
                self.deadline = now + self._waiting.pause
            case on.TimerFired() | on.Woken():
                return [on.ReadRound()]
            case on.RoundRead():
                return self._moved(event.round, now) if event.round.is_newer_than(self.round) else [on.ReadHeartbeat()]
        return []

    # --- a spare beside a sealed round -------------------------------------------------------------------------------

    def _begin_spare(self, now: float) -> list[on.Action]:
        self.state, self._waiting = JoinState.SPARE, self._new_waiting(_ALONE_SECONDS[0])
        self._waiting.dial_at, self._waiting.read_at = now, now + _CHECK_SECONDS
        return self._watch(now)

    def _waits_beside(self, event: on.Event, now: float) -> list[on.Action]:
        waiting = self._waiting
        match event:
            case on.HubSent(message=messages.SealPosition(unreachable_from=names)):
                if names not in ((), waiting.unreachable_from):
                    waiting.unreachable_from = names
                    return [on.NoRoom(self.round, names), *self._watch(now)]
            case on.ConnectFailed():
                self.me, self._dialled = event.me, None
                waiting.dial_at, waiting.read_at = now + waiting.pause, now
                # A hub listens for as long as its node lives. One that was never reached may be behind a firewall that
                # refuses: nodes that took each other for dead would end each other's rounds for ever.
                waiting.has_ended = event.refused and waiting.reached and len(self.round.members) == 1
            case on.LinkEnded():
                waiting.reached |= self._ended is not None and self._ended.answered
                waiting.dial_at, waiting.read_at = now + waiting.pause, now
                if event.refused:
                    return [on.ReadKey()]
            case on.RoundRead():
                if event.round.is_newer_than(self.round):
                    return self._moved(event.round, now)
                if waiting.has_ended:  # and it has not written why
                    return self._give_round_up("has lost its only member")
                if not self._is_answered:
                    return [on.ReadHeartbeat()]
                waiting.read_at = now + _CHECK_SECONDS
            case on.HeartbeatRead():
                if waiting.heartbeat.see(event.version, now):
                    return self._give_round_up("has stopped writing its heartbeat")
                waiting.pause = min(_ALONE_SECONDS[1], waiting.pause * 1.5)
                waiting.read_at = now + waiting.pause
            case on.RoundWritten(written=True):
                return self._moved(self._without_members(), now)
            case on.RoundWritten():
                waiting.read_at = now  # another node has changed it first
        return self._watch(now)

    def _watch(self, now: float) -> list[on.Action]:
        """Return what a spare does next: connect, read the round's row, or wait."""
        waiting, first = self._waiting, self.round.members[0]
        actions: list[on.Action] = []
        # On a connection that is there, too: what this node waits for may have changed.
        if now >= waiting.dial_at or self._is_linked_to(first):
            actions = self._connect(first, f"rank 0 of round {self.round.number}")
            if self._dialled is not None:
                return actions
        # An accepted connection shows nothing: the kernel accepts for a process that is frozen.
        if self._is_answered:
            waiting.heartbeat.reset()
        if self._must_read or now >= waiting.read_at:
            self._must_read = False
            return [*actions, on.ReadRound()]
        self.deadline = waiting.read_at if self._link is not None else min(waiting.read_at, waiting.dial_at)
        return actions

    def _give_round_up(self, why: str) -> list[on.Action]:
        warning = f"Round {self.round.number} {why}; it is reopened without its members."
        return [on.Warn(warning), on.EndRound(self.round, self._without_members())]

    def _without_members(self) -> Round:
        # None of them is waited for. Those that live read the row, and come back like new nodes.
        everyone = [member.node for member in self.round.members]
        return reopened(self.round, f"no sign of life from {everyone[0]}", lost=everyone, waiting=[self.me.node])

    # --- entering a sealed round -------------------------------------------------------------------------------------

    def _entering(self, event: on.Event, now: float) -> list[on.Action]:
        waiting = self._waiting
        match event:
            case on.Entered() | on.EntryFailed():
                # After a failed attempt, too: this node has its assignment in the round since then, and a reopening
                # ends that one.
                self._last_round, self.deadline = self.round.number, float("inf")
        match event:
            case on.Entered(refused=True) if waiting.tries < _KEY_TRIES:
                waiting.tries += 1
                self.deadline = now + _RETRY_SECONDS[0]
            case on.Entered():
                self.state = JoinState.IN
                return [on.Take()]
            case on.TimerFired():
                return [on.ReadKey()]
            case on.KeyRead():
                return [on.Enter(self.round, waiting.rank)]
            case on.EntryFailed(unreachable=False):
                return self._without_leader(event.reason)
            case on.EntryFailed():
                waiting.reason, self.me = event.reason, event.me
                return [on.QueryMembers(self.round)]
            case on.MembersAnswered():
                verdict = is_leader_unreachable(event.answers)
                if verdict is None:
                    return [on.ReadHeartbeat()]
                return self._without_leader(waiting.reason) if verdict else self._stay_outside()
            case on.HeartbeatRead():
                runs = event.round == self.round.number
                return self._stay_outside() if runs else self._without_leader(waiting.reason)
        return []

    def _without_leader(self, reason: str) -> list[on.Action]:
        """End the round without rank 0's node."""
        return [on.Reopen(reason, frozenset({self.round.members[0].node}), round_failed=True)]

    def _stay_outside(self) -> list[on.Action]:
        self.state = JoinState.OUTSIDE
        warning = f"Round {self.round.number} may go on without this node, which keeps trying to enter it."
        # The row says so, so that a next round does not wait for this node, and rank 0's can say why it never came.
        me = replace(self.me, state="left", reason=self._waiting.reason)
        return [on.Warn(warning), on.WriteRow(me, self.round)]

    def _outside(self, event: on.Event, now: float) -> list[on.Action]:
        waiting = self._waiting
        match event:
            case on.RowWritten() if waiting.entered:
                self.state, self._has_left = JoinState.IN, False
                return [on.Take()]
            case on.RowWritten():
                self._has_left = True
                return [on.ReadHeartbeat()]
            case on.HeartbeatRead():
                if waiting.heartbeat.see(event.version, now):
                    return self._without_leader(waiting.reason)
                self.deadline = now + waiting.pause
                waiting.pause = min(_RETRY_SECONDS[1], 1.5 * waiting.pause)
            case on.TimerFired():
                self.deadline = float("inf")
                return [on.ReadRound()]
            case on.RoundRead():
                if event.round.is_newer_than(self.round):
                    return self._go_on(event.round, now)
                return [on.Enter(self.round, waiting.rank, again=True)]
            case on.Entered():
                waiting.entered = True
                # Its row says that it has left: the next round would not wait for it.
                return [on.WriteRow(replace(self.me, round=self.round.number), self.round)]
            case on.EntryFailed(unreachable=False):
                return self._without_leader(event.reason)
            case on.EntryFailed():
                return [on.ReadHeartbeat()]
        return []

    # --- the connection to another node's hub ------------------------------------------------------------------------

    def _connect(self, to: Member, purpose: str) -> list[on.Action]:
        """Return what connects this node to a hub, or tells that hub what this node waits for now."""
        greeting = greeting_of(self.me, self.round)
        link = self._link
        if link is None or not self._is_linked_to(to):
            self._link, self._dialled = None, _Link(to, greeting)
            return [on.Connect(to, greeting, purpose)]
        if greeting == link.greeting:
            return []
        link.greeting, link.position = greeting, None
        return [on.Greet(greeting)]

    def _disconnect(self) -> list[on.Action]:
        link, self._link = self._link, None
        return [on.Disconnect()] if link is not None else []

    def _is_linked_to(self, member: Member) -> bool:
        return self._link is not None and self._link.to.incarnation == member.incarnation

    @property
    def _is_answered(self) -> bool:
        return self._link is not None and self._link.answered

    def _hub_sent(self, message: messages.Message) -> None:
        link = self._link
        if link is None:
            return
        link.answered = True
        match message:
            case messages.RoundChanged(round=None):
                self._must_read = True
            case messages.RoundChanged(round=Round() as round_) if round_.is_newer_than(link.received):
                link.received = round_
            case messages.SealPosition():
                link.position = message.position

    def _new_waiting(self, pause: float) -> _Waiting:
        return _Waiting(Staleness(2 * self._timings.table_heartbeat_interval.total_seconds()), pause)
