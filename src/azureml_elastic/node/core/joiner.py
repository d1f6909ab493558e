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
  cut off; the majority of members decides. In the second case this node stays **outside** and keeps trying. Then it
  connects to what its workers will. A member that does not answer ends the round: the next one is without one of both.
- The row may have gone back in time, which the heartbeat of a later round shows: then it is **restored**.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.joining import HubLink, Staleness, greeting_of, is_leader_unreachable
from azureml_elastic.node.core.round import Limits, Member, Round, has_gone_back, reopened
from azureml_elastic.node.core.sealing import Candidacy, Verdict

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
        self._dialled: HubLink | None = None
        self._link: HubLink | None = None
        self._must_read = False
        self._seen: Round | None = None
        self._repeats = 0
        self._ended: HubLink | None = None
        self._candidacy: Candidacy | None = None
        self._waiting = self._new_waiting(0.0)

    def handle(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        """Process what has happened, and return what is to be done."""
        match event:
            case ev.Started():
                self._known = event.known
                return self._go_on(event.round, now)
            case ev.NewerRound():
                return self._moved(event.round, now)
            case ev.Woken():
                self._must_read |= event.must_read
            case ev.Connected():
                self._link, self._dialled = self._dialled, None
            case ev.LinkEnded():
                self._ended, self._link = self._link, None
            case ev.EndWritten():
                self.state = JoinState.CHOOSING
                return [do.ReadRound()]
            case ev.MarksChanged():
                self.me = event.me
            case ev.HubSent():
                self._hub_sent(event.message)
        handlers = {
            JoinState.CHOOSING: self._choosing,
            JoinState.CANDIDATE: self._waits_for_seal,
            JoinState.RESTORING: self._restoring,
            JoinState.SPARE: self._waits_beside,
            JoinState.ENTERING: self._entering,
            JoinState.OUTSIDE: self._outside,
        }
        return handlers[self.state](event, now) if self.state in handlers else []

    # --- from version to version -------------------------------------------------------------------------------------

    def _go_on(self, round_: Round, now: float) -> list[do.JoinAction]:
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

    def _moved(self, round_: Round, now: float) -> list[do.JoinAction]:
        """Go on with another version of the round, which the nodes at this node's hub may not have."""
        waited = self.state in (JoinState.CANDIDATE, JoinState.RESTORING, JoinState.SPARE)
        # Not back to the hub that has sent it.
        to_hub = self._link is not None and round_.is_newer_than(self._link.received)
        return [*([do.Forward(round_, to_hub)] if waited else []), *self._go_on(round_, now)]

    def _act(self) -> list[do.JoinAction]:
        round_, self.deadline = self.round, float("inf")
        if round_.closed:
            self.state = JoinState.OVER
            return [do.Finish(round_)]
        if round_.state == "open":
            return [do.PrepareRow(round_)]
        rank = round_.rank_of(self.me.node, self.me.incarnation)
        # The round has this node's port for the store, on which it listens only since it was prepared.
        if rank is not None and self._is_prepared and self._last_round < round_.number:
            self.state, self._waiting = JoinState.ENTERING, self._new_waiting(_RETRY_SECONDS[0])
            self._waiting.rank = rank
            return [do.Enter(round_, rank)]
        if self._last_round == round_.number:
            # This node has left its own round, and the node that should end it may be dead.
            return [do.Reopen(f"{self.me.node} has left the round", at_once=True)]
        return [do.GetReady()]

    def _choosing(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        match event:
            case ev.TimerFired():
                return self._act()
            case ev.RowPrepared():
                return self._begin_candidacy(event, now)
            case ev.GotReady(took_time=False):
                return self._begin_spare(now)
            case ev.GotReady():
                return [do.ReadRound()]
            case ev.RoundRead():
                return self._go_on(event.round, now)
        return []

    # --- a candidate of an open round --------------------------------------------------------------------------------

    def _begin_candidacy(self, prepared: ev.RowPrepared, now: float) -> list[do.JoinAction]:
        self.state, self.me, self._is_prepared = JoinState.CANDIDATE, prepared.me, True
        me = prepared.me
        self._candidacy = candidacy = Candidacy(
            self.round, me, self._known, self._limits, self._timings, now, wrote_round=prepared.wrote_round
        )
        # In the first round nodes find each other by their rows. Later they know each other, and a message suffices.
        if self.round.number == 1 or self._has_left:
            return [do.WriteRow(me, self.round)]
        return self._look_after(candidacy, now)

    def _waits_for_seal(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        mine = self._candidacy
        assert mine is not None
        match event:
            case ev.Woken():
                mine.should_seal = event.should_seal
                mine.schedule.hub_received()
                # It decides when the last node has come, which it need not read the rows for.
                if mine.knows_all:
                    return [do.TakeCandidates()]
            case ev.HubSent(message=messages.SealPosition(position=int())):
                mine.schedule.candidate_came()
            case ev.MarksChanged():
                mine.offer_again(now)
            case ev.RowWritten():
                mine.written, self._has_left = True, False
            case ev.ConnectFailed():
                return self._connect_failed(mine, event, now)
            case ev.LinkEnded(refused=True):
                return [do.ReadKey()]
            case ev.LinkEnded():
                self._choose_another(mine, now)
            case ev.KeyRead(changed=True):
                mine.schedule.read_now(now)  # the same hub accepts this node now
            case ev.KeyRead():
                self._choose_another(mine, now)
            case ev.RowsUnavailable():
                mine.could_not_read(now)
            case ev.RowsRead():
                return self._rows_read(mine, event, now)
            case ev.CandidatesTaken():
                return self._decide(mine, event.candidates, now)
            case ev.HeartbeatRead() | ev.RoundTooLarge() | ev.RoundWritten() | ev.RoundRead():
                return self._sealing(mine, event, now)
        return self._look_after(mine, now)

    def _choose_another(self, mine: Candidacy, now: float) -> None:
        """Record that the connection to a hub has ended: after some times another one is chosen."""
        if (ended := self._ended) is not None:
            mine.points.connection_broke(ended.to, answered=ended.answered)
            # A frozen hub accepts once more. The seal that it has not sent on is in the row, and others would take this
            # node for lost before it looks there by itself.
            mine.schedule.read_now(now)

    def _connect_failed(self, mine: Candidacy, failed: ev.ConnectFailed, now: float) -> list[do.JoinAction]:
        assert self._dialled is not None
        to, self._dialled = self._dialled.to, None
        was_known = mine.points.connect_failed(to, refused=failed.refused)
        if failed.me != self.me:
            self.me = failed.me
            mine.offer_again(now)
        if was_known or not failed.refused or to.node in mine.points.late:
            mine.schedule.read_now(now)
        # An attempt that was not refused took seconds: write this node's row before the next one.
        return self._look_after(mine, now, meets=failed.refused)

    def _look_after(self, mine: Candidacy, now: float, *, meets: bool = True) -> list[do.JoinAction]:
        """Return what a candidate does next: connect, write its row, decide, read, or wait."""
        schedule, actions = mine.schedule, list[do.JoinAction]()
        if not mine.offered:
            mine.offered = True
            actions.append(do.Offer(self.round, self.me))
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
            return [*actions, do.WriteRow(self.me, self.round)]
        if schedule.take_decision(now):
            return [*actions, do.TakeCandidates()]
        if schedule.should_read(now):
            mine.read_began = now
            return [*actions, do.ReadRows()]
        self.deadline = now + schedule.seconds_left(now)
        if not mine.written:
            self.deadline = min(self.deadline, mine.write_at)
        return actions

    def _rows_read(self, mine: Candidacy, read: ev.RowsRead, now: float) -> list[do.JoinAction]:
        if has_gone_back(read.round, self.round):
            return [do.Restore(read.round, self.round)]
        if read.round.is_newer_than(self.round):
            return self._moved(read.round, now)
        mine.read(read.roster, self.me, now)
        return [do.TakeCandidates()]

    def _decide(self, mine: Candidacy, received: Sequence[Member], now: float) -> list[do.JoinAction]:
        match mine.decide(received, self.me, now):
            case Verdict.SEAL:
                return [do.WriteRound(mine.sealed)]
            case Verdict.CONFIRM:
                return [do.ReadHeartbeat()]
            case Verdict.WAIT:
                return self._look_after(mine, now)

    def _sealing(self, mine: Candidacy, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        match event:
            case ev.HeartbeatRead() if event.round >= self.round.number:
                # The row went back in time. Sealing it would begin a second run beside one that may still train.
                return self._begin_restoring(event.round)
            case ev.HeartbeatRead():
                mine.confirm(self.me)
                return [do.WriteRound(mine.sealed)]
            case ev.RoundTooLarge():
                mine.fail(event.error)
                return [do.WriteRound(mine.sealed)]
            case ev.RoundWritten(written=True):
                return [*(do.Warn(text) for text in mine.describe()), *self._moved(mine.sealed, now)]
            case ev.RoundRead():
                return self._moved(event.round, now)
        return [do.ReadRound()]  # another node has changed it first

    # --- rows that went back in time ---------------------------------------------------------------------------------

    def _begin_restoring(self, later: int) -> list[do.JoinAction]:
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
        return [do.Warn(warning), do.NudgeHeartbeat(), do.ReadHeartbeat()]

    def _restoring(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        match event:
            case ev.HeartbeatRead():
                if self._waiting.heartbeat.see(event.version, now):
                    return [do.Restore(self.round, Round(self._waiting.later, "sealed"))]
                self.deadline = now + self._waiting.pause
            case ev.TimerFired() | ev.Woken():
                return [do.ReadRound()]
            case ev.RoundRead():
                return self._moved(event.round, now) if event.round.is_newer_than(self.round) else [do.ReadHeartbeat()]
        return []

    # --- a spare beside a sealed round -------------------------------------------------------------------------------

    def _begin_spare(self, now: float) -> list[do.JoinAction]:
        self.state, self._waiting = JoinState.SPARE, self._new_waiting(_ALONE_SECONDS[0])
        self._waiting.dial_at, self._waiting.read_at = now, now + _CHECK_SECONDS
        return self._watch(now)

    def _waits_beside(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        waiting = self._waiting
        match event:
            case ev.HubSent(message=messages.SealPosition(unreachable_from=names)):
                if names not in ((), waiting.unreachable_from):
                    waiting.unreachable_from = names
                    return [do.NoRoom(self.round, names), *self._watch(now)]
            case ev.ConnectFailed():
                self.me, self._dialled = event.me, None
                waiting.dial_at, waiting.read_at = now + waiting.pause, now
                # A hub listens for as long as its node lives. One that was never reached may be behind a firewall that
                # refuses: nodes that took each other for dead would end each other's rounds for ever.
                waiting.has_ended = event.refused and waiting.reached and len(self.round.members) == 1
            case ev.LinkEnded():
                waiting.reached |= self._ended is not None and self._ended.answered
                waiting.dial_at, waiting.read_at = now + waiting.pause, now
                if event.refused:
                    return [do.ReadKey()]
            case ev.RoundRead():
                if event.round.is_newer_than(self.round):
                    return self._moved(event.round, now)
                if waiting.has_ended:  # and it has not written why
                    return self._give_round_up("has lost its only member")
                if not self._is_answered:
                    return [do.ReadHeartbeat()]
                waiting.read_at = now + _CHECK_SECONDS
            case ev.HeartbeatRead():
                if waiting.heartbeat.see(event.version, now):
                    return self._give_round_up("has stopped writing its heartbeat")
                waiting.pause = min(_ALONE_SECONDS[1], waiting.pause * 1.5)
                waiting.read_at = now + waiting.pause
            case ev.RoundWritten(written=True):
                return self._moved(self._without_members(), now)
            case ev.RoundWritten():
                waiting.read_at = now  # another node has changed it first
        return self._watch(now)

    def _watch(self, now: float) -> list[do.JoinAction]:
        """Return what a spare does next: connect, read the round's row, or wait."""
        waiting, first = self._waiting, self.round.members[0]
        actions: list[do.JoinAction] = []
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
            return [*actions, do.ReadRound()]
        self.deadline = waiting.read_at if self._link is not None else min(waiting.read_at, waiting.dial_at)
        return actions

    def _give_round_up(self, why: str) -> list[do.JoinAction]:
        warning = f"Round {self.round.number} {why}; it is reopened without its members."
        return [do.Warn(warning), do.EndRound(self.round, self._without_members())]

    def _without_members(self) -> Round:
        # None of them is waited for. Those that live read the row, and come back like new nodes.
        everyone = [member.node for member in self.round.members]
        return reopened(self.round, f"no sign of life from {everyone[0]}", lost=everyone, waiting=[self.me.node])

    # --- entering a sealed round -------------------------------------------------------------------------------------

    def _entering(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        waiting = self._waiting
        if isinstance(event, ev.Entered | ev.EntryFailed):
            # After a failed attempt, too: this node has its assignment since then, and a reopening ends the round.
            self._last_round, self.deadline = self.round.number, float("inf")
        match event:
            case ev.Entered(refused=True) if waiting.tries < _KEY_TRIES:
                waiting.tries += 1
                self.deadline = now + _RETRY_SECONDS[0]
            case ev.Entered():
                return [do.ReachMembers(self.round)]
            case ev.MembersReached():
                self.state = JoinState.IN
                return [do.Take()]
            case ev.MemberUnreachable(seen=seen) if not seen.over or seen.lost:
                return [do.Reopen(event.reason, seen.lost, round_failed=not seen.lost, at_once=True)]
            case ev.MemberUnreachable():  # another node has ended the round
                self.state = JoinState.CHOOSING
                return [do.ReadRound()]
            case ev.TimerFired():
                return [do.ReadKey()]
            case ev.KeyRead():
                return [do.Enter(self.round, waiting.rank)]
            case ev.EntryFailed(unreachable=False):
                return self._without_leader(event.reason)
            case ev.EntryFailed():
                waiting.reason, self.me = event.reason, event.me
                return [do.QueryMembers(self.round)]
            case ev.MembersAnswered():
                verdict = is_leader_unreachable(event.answers)
                if verdict is None:
                    return [do.ReadHeartbeat()]
                return self._without_leader(waiting.reason) if verdict else self._stay_outside()
            case ev.HeartbeatRead():
                runs = event.round == self.round.number
                return self._stay_outside() if runs else self._without_leader(waiting.reason)
        return []

    def _without_leader(self, reason: str) -> list[do.JoinAction]:
        return [do.Reopen(reason, frozenset({self.round.members[0].node}), round_failed=True)]

    def _stay_outside(self) -> list[do.JoinAction]:
        self.state = JoinState.OUTSIDE
        warning = f"Round {self.round.number} may go on without this node, which keeps trying to enter it."
        # The row says so, so that a next round does not wait for this node, and rank 0's can say why it never came.
        me = replace(self.me, state="left", reason=self._waiting.reason)
        return [do.Warn(warning), do.WriteRow(me, self.round)]

    def _outside(self, event: ev.NodeEvent, now: float) -> list[do.JoinAction]:
        waiting = self._waiting
        match event:
            case ev.RowWritten() if waiting.entered:
                self._has_left, self.state = False, JoinState.ENTERING
                return [do.ReachMembers(self.round)]
            case ev.RowWritten():
                self._has_left = True
                return [do.ReadHeartbeat()]
            case ev.HeartbeatRead():
                if waiting.heartbeat.see(event.version, now):
                    return self._without_leader(waiting.reason)
                self.deadline = now + waiting.pause
                waiting.pause = min(_RETRY_SECONDS[1], 1.5 * waiting.pause)
            case ev.TimerFired():
                self.deadline = float("inf")
                return [do.ReadRound()]
            case ev.RoundRead():
                if event.round.is_newer_than(self.round):
                    return self._go_on(event.round, now)
                return [do.Enter(self.round, waiting.rank, again=True)]
            case ev.Entered():
                waiting.entered = True
                # Its row says that it has left: the next round would not wait for it.
                return [do.WriteRow(replace(self.me, round=self.round.number), self.round)]
            case ev.EntryFailed(unreachable=False):
                return self._without_leader(event.reason)
            case ev.EntryFailed():
                return [do.ReadHeartbeat()]
        return []

    # --- the connection to another node's hub ------------------------------------------------------------------------

    def _connect(self, to: Member, purpose: str) -> list[do.JoinAction]:
        """Return what connects this node to a hub, or tells that hub what this node waits for now."""
        greeting = greeting_of(self.me, self.round)
        link = self._link
        if link is None or not self._is_linked_to(to):
            self._link, self._dialled = None, HubLink(to, greeting)
            return [do.Connect(to, greeting, purpose)]
        if greeting == link.greeting:
            return []
        link.greeting, link.position = greeting, None
        return [do.Greet(greeting)]

    def _disconnect(self) -> list[do.JoinAction]:
        link, self._link = self._link, None
        return [do.EndWatch()] if link is not None else []

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
