"""One process of a node: the machines, and what their actions do to a simulated world."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.hub_state import CloseLink, HubReports, HubState, HubView, Send, SendAll
from azureml_elastic.node.core.joiner import Joiner, JoinState
from azureml_elastic.node.core.joining import greeting_of
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector, SilenceLimit
from azureml_elastic.node.core.round import (
    Member,
    NewestRound,
    Round,
    has_gone_back,
    is_same_round,
    reopened,
    restored,
)
from azureml_elastic.node.core.round_ends import EndFacts, left_in_order, version_after
from azureml_elastic.node.core.table_heartbeat import HeartbeatWriter, Overtaken
from azureml_elastic.node.core.training import State, Training
from tests.support.schedules.workers import Group
from tests.support.schedules.world import Connection, DiedError

if TYPE_CHECKING:
    from tests.support.schedules.schedule import Schedule

_DEAD_CONNECT_SECONDS = 3.0
_MONITOR_SECONDS = 1.0


class Node:
    """A node's process.

    Args:
        schedule: everything around it.
        name: name of the node.
        imports: seconds until it can train.

    Attributes:
        ends_at: when the worker of the round before has ended.
        table_slow_until: until when its calls of the table take long.
        held: step of the state in this process's memory.
        heartbeat_seen: number of the round whose heartbeat it has read last.
        done: rounds and members that have reported to this node's hub that their workers have ended well.
        round_seen: the round's row with the version that it knows.
    """

    def __init__(self, schedule: Schedule, name: str, imports: float) -> None:
        world = schedule.world
        self.schedule, self.world, self.name = schedule, world, name
        self.incarnation = f"{name}/{len(world.nodes)}"
        self.offset = world.random.uniform(0.0, 1e4)
        self.alive, self.frozen = True, False
        self.ready_at = world.now + imports
        self.ends_at = self.table_slow_until = 0.0
        self.held = self.heartbeat_seen = self.last_round = self.beating = 0
        self.done: set[tuple[int, str]] = set()
        self.calls: list[float] = []
        self._pending: list[float] = []
        self._waited_at = float("-inf")
        self.limits, self.timings = schedule.limits, schedule.timings
        self.me = Member(name, self.incarnation, state="starting", host=name, hub_port=1, host_id=f"host-{name}")
        self.newest = NewestRound()
        self._rejoin = self.timings.rejoin_timeout.total_seconds()
        self.tick = self.timings.heartbeat_interval.total_seconds() / 2
        self.silence = SilenceLimit(self.timings)
        self.hub = HubState(self.limits, self.timings, self.clock, self.silence)
        self.links: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._thawing: list[Callable[[], object]] = []
        self._pauses = PauseDetector(self.clock, self.tick)
        # on the way into a round
        self.joiner: Joiner | None = None
        self.watch: Connection | None = None
        self.busy = self.has_woken = self.has_left = False
        self.events: deque[ev.JoinEvent] = deque()
        self.round_version = -1
        self.round_seen: Round | None = None
        self.written_version = -2
        # in a round
        self.round: Round | None = None
        self.entered = 0.0
        self.link: Connection | None = None
        self.reports = HubReports()
        self.over = self.must_look = self.awaits_save = False
        self.training: Training | None = None
        self.group: Group | None = None
        self.inbox: deque[ev.TrainingEvent] = deque()
        self.seen: dict[type, object] = {}
        self.notice: ev.Noticed | None = None
        self.part: str | None = None
        world.nodes.append(self)
        world.after(self.tick, self._on_tick)
        world.after(imports, lambda: self.when_running(self._join))
        self.call(lambda: world.table.members.__setitem__(name, self.me), lambda _: None)

    def __repr__(self) -> str:
        return self.incarnation

    # --- time and life -----------------------------------------------------------------------------------------------

    @property
    def clock(self) -> float:
        return self.world.now + self.offset

    def when_running(self, what: Callable[[], object]) -> None:
        """Have this process do something now, or once it is no longer frozen."""
        if self.alive and self.frozen:
            self._thawing.append(what)
        elif self.alive:
            what()

    def freeze(self, seconds: float) -> None:
        """Stop the process for some time."""
        self.frozen = True
        self.world.after(seconds, self.thaw)

    def thaw(self) -> None:
        """Have a frozen process go on."""
        self.frozen = False
        waiting, self._thawing = self._thawing, []
        self.world.random.shuffle(waiting) if self.world.random.random() < 0.3 else None
        for what in waiting:
            self.when_running(what)

    def kill(self, *, silently: bool = False) -> None:
        """End the process, as SIGKILL does, or silently, as when a machine loses power."""
        self.world.log(self, "dies silently" if silently else "dies")
        if not silently:
            for link in list(self.links.values()):
                link.drop()
            for link in (self.watch, self.link):
                if link is not None:
                    link.close()
        self.alive = False
        if self.group is not None:
            self.group.lost(self)

    def _on_tick(self) -> None:
        if not self.alive:
            return
        self.world.after(self.tick, self._on_tick)
        self.when_running(self._beat)

    def _beat(self) -> None:
        """Do what the hub's server and the connections do twice in a heartbeat interval."""
        last = {number: link.server_received for number, link in self.links.items()}
        actions = self.hub.ticked(self.clock, last)
        beat = messages.Beat(self.silence.pause)
        self._perform_hub([SendAll(beat)])
        self._perform_hub(actions or [])
        self._pauses.tick(self.clock)
        for link in (self.watch, self.link):
            if link is not None:
                link.send(beat)
                if self._beats_of(link).is_lost(link.client_received, self.clock):
                    link.silent()
        if actions:
            self.wake()

    def _beats_of(self, link: Connection) -> BeatWatch:
        if link.beats is None:
            link.beats = BeatWatch(self.silence, self._pauses, link.client_received)
        return link.beats

    # --- this node's hub ---------------------------------------------------------------------------------------------

    def new_link(self, link: Connection) -> int:
        number = next(self._numbers)
        self.links[number] = link
        return number

    def hub_received(self, link: Connection, message: messages.Message) -> None:
        """Process a message at this node's hub, as ``rendezvous.hub`` does."""
        state, peer = self.hub, link.client
        match message:
            case messages.Beat():
                self.silence.learn(message.pause, self.clock)
                return
            case messages.RoundChanged(round=None):
                self._perform_hub([SendAll(message)])
            case messages.RoundChanged(round=Round() as round_):
                if not self.newest.accept(round_):
                    state.request_read()
                self._perform_hub(state.publish(round_))
            case messages.MemberHello():
                self._perform_hub(state.greeted(link.number, peer.name, peer.incarnation, message.round, self.clock))
            case messages.Watch():
                self._perform_hub(state.watching(link.number, peer.name, peer.incarnation, message, self.clock))
            case messages.Done():
                self.done.add((state.member_of(link.number)[1], peer.name))
                self._perform_hub(state.done(link.number))
            case messages.Report() if (member := state.member_of(link.number)) is not None:
                if self.round is not None and member[1] == self.round.number:
                    self.inbox.append(ev.FromMember(member[0], message.body))
        self.wake()

    def hub_link_ended(self, link: Connection) -> None:
        """Process the end of a connection at this node's hub."""
        self.links.pop(link.number, None)
        actions = self.hub.closed(link.number, self.clock)
        if actions is not None:
            self._perform_hub(actions)
            self.wake()

    def _perform_hub(self, actions: list) -> None:
        for action in actions:
            match action:
                case SendAll(message):
                    for link in list(self.links.values()):
                        link.answer(message)
                case Send(number, message):
                    if (link := self.links.get(number)) is not None:
                        link.answer(message)
                case CloseLink(number):
                    if (link := self.links.get(number)) is not None:
                        link.drop()
                        self.hub_link_ended(link)

    # --- the table ---------------------------------------------------------------------------------------------------

    def call(self, effect: Callable[[], object], then: Callable[[object], object], *, seconds: float = 0.0) -> None:
        """Have the table do something, and go on with its result. This process may end before it or after it."""
        world = self.world
        began = world.now
        self.calls.append(began)
        self._pending.append(began)
        before, after = world.table_takes()
        before += seconds
        before += 9.5 if world.now < self.table_slow_until else 0.0

        def carry_out() -> None:
            result = effect()
            world.after(after, lambda: self.when_running(lambda: answered(result)))

        def answered(result: object) -> None:
            self._pending.remove(began)
            if world.now - began > self._rejoin:
                self._waited_at = world.now
            then(result)

        when = world.table_answers_at(before)
        world.at(when, lambda: carry_out() if self.alive or world.random.random() < 0.5 else None)

    @property
    def waits_for_table(self) -> bool:
        """Whether others do not wait for this node any more, because a call of the table takes so long."""
        now = self.world.now
        return now - self._waited_at < self._rejoin or any(now - began > self._rejoin for began in self._pending)

    def _read_round(self, known: Round | None) -> Round:
        """Read the round's row, and restore it if it is older than what was known."""
        table = self.world.table
        row = table.round or Round()
        if has_gone_back(row, known):
            row = restored(row, known)
            table.write(self.world.now, self.name, row)
            self.written_version = table.version
        self._see_row(row)
        return row

    def _see_row(self, row: Round) -> None:
        self.round_version, self.round_seen = self.world.table.version, row
        self.newest.observe(row)

    def _replace_round(self, to: Round) -> bool:
        table = self.world.table
        if table.version != self.round_version:
            return False
        later = to.state == "sealed" and self.heartbeat_seen >= to.number
        self.schedule.require(not later, f"{self} seals {to.number}, but knows that {self.heartbeat_seen} has run")
        table.write(self.world.now, self.name, to)
        self.written_version = table.version
        self._see_row(to)
        return True

    def _end_row(self, number: int, to: Round) -> bool:
        """Write the next version if the row still holds this sealed round, or has lost it."""
        known = self.newest.newest
        current = self.world.table.round or Round()
        self._see_row(current)
        if (current.number, current.state) != (number, "sealed"):
            mine = known is not None and (known.number, known.state) == (number, "sealed")
            if not mine or not has_gone_back(current, known):
                return False
        return self._replace_round(to)

    # --- on the way into a round -------------------------------------------------------------------------------------

    def _join(self) -> None:
        self.joiner = joiner = Joiner(
            self.me, self.limits, self.timings, last_round=self.last_round, has_left=self.has_left
        )
        self.events.clear()
        self.has_woken, self.busy = False, True
        before = self.round
        if self.link is not None:
            self.link.close()
            self.link = None
        known = {member.node: member for member in before.members} if before is not None else None
        if before is not None and (newer := self.newest.after(before)) is not None:
            self.busy = False
            self._feed(ev.Started(newer, known or {}))
            return

        def read() -> ev.JoinEvent:
            rows = {name: row.to_value() for name, row in self.world.table.members.items()}
            return ev.Started(self._read_round(self.newest.newest), rows if known is None else known)

        self.call(read, partial(self._answer, joiner))

    def wake(self) -> None:
        """Have this process look at once, unless it waits for the table."""
        # Not now: who wakes it is another process, or in the middle of its own actions.
        self.world.after(0.0, lambda: self.when_running(self._wake))

    def _wake(self) -> None:
        self.has_woken = True
        if self.joiner is not None:
            self._go_on()
        elif self.training is not None:
            self._look()

    def _answer(self, joiner: Joiner, event: object) -> None:
        if self.joiner is joiner:
            self.busy = False
            self._feed(event)

    def _feed(self, event: ev.JoinEvent) -> None:
        """Bring an event to the joiner, perform its actions, and go on with what else has happened."""
        joiner = self.joiner
        before = joiner.state
        actions = joiner.handle(event, self.clock)
        self.schedule.moved(before, event, joiner.state)
        self.world.log(self, joiner.state, event, actions)
        for action in actions:
            if isinstance(action, do.Call):
                if self.newest.after(joiner.round) is None:
                    self.busy = True
                    self._call(joiner, action)
            else:
                self._perform(joiner, action)
        if joiner.state is JoinState.IN:
            self._enters()
        elif joiner.state is JoinState.OVER:
            self.leaves(joiner.round.state)
        else:
            self._go_on()

    def _go_on(self) -> None:
        joiner = self.joiner
        if joiner is None or self.busy:
            return
        if self.notice is not None:
            self._leave_before_a_round()
        elif self.events:
            self._feed(self.events.popleft())
        elif (newer := self.newest.after(joiner.round)) is not None:
            self._feed(ev.NewerRound(newer))
        elif self.has_woken:
            self.has_woken = False
            self._feed(ev.Woken(self.hub.should_seal(), self.hub.take_read_request()))
        elif joiner.deadline <= self.clock:
            self._feed(ev.TimerFired())
        else:
            self.world.at(
                joiner.deadline - self.offset + 1e-6, lambda: self.when_running(partial(self._on_timer, joiner))
            )

    def _on_timer(self, joiner: Joiner) -> None:
        if self.joiner is joiner and not self.busy and joiner.deadline <= self.clock:
            self._feed(ev.TimerFired())

    def _may_crash(self, action: object) -> None:
        """End here, between two actions, where the schedule has it so.

        Raises:
            DiedError: it ends, or has ended.
        """
        if self.alive and self.schedule.faults.crashes(self, action):
            self.kill(silently=self.world.random.random() < 0.3)
        if not self.alive:
            raise DiedError

    def _call(self, joiner: Joiner, call: do.Call) -> None:
        self._may_crash(call)
        answer = partial(self._answer, joiner)
        match call:
            case do.PrepareRow():
                self.me = replace(self.me, state="waiting")
                wrote = self.written_version == self.round_version and self.round_seen == call.round
                answer(ev.RowPrepared(replace(self.me, round=call.round.number, store_port=1), wrote))
            case do.TakeCandidates():
                answer(ev.CandidatesTaken(self.hub.watchers.candidates()))
            case do.GetReady():
                answer(ev.GotReady(took_time=False))
            case do.QueryMembers():
                self._query(call.round, answer)
            case do.Reopen():
                change = do.Reopen(call.reason, call.lost, round_failed=call.round_failed)
                self._change_row(change, lambda _: answer(ev.Reopened()))
            case do.Connect():
                self._connect(call, answer)
            case do.Enter():
                self._enter(call, answer)
            case do.ReachStore():
                self.world.after(0.001, lambda: self.when_running(partial(answer, ev.StoreReached())))
            case _:
                self._call_table(call, answer)

    def _call_table(self, call: do.Call, answer: Callable[[ev.JoinEvent], object]) -> None:
        table = self.world.table
        match call:
            case do.ReadRound() | do.Restore():
                known = call.known if isinstance(call, do.Restore) else self.newest.newest
                self.call(lambda: ev.RoundRead(self._read_round(known)), answer)
            case do.ReadRows():

                def read() -> ev.JoinEvent:
                    row = table.round or Round()
                    self._see_row(row)
                    return ev.RowsRead(row, {name: member.to_value() for name, member in table.members.items()})

                if self.world.table_fails():
                    self.call(ev.RowsUnavailable, answer, seconds=10.0)
                else:
                    self.call(read, answer)
            case do.WriteRow():
                self.has_left = call.me.state == "left"
                self.call(lambda: (table.members.__setitem__(self.name, call.me), ev.RowWritten())[1], answer)
            case do.WriteRound():
                self.call(lambda: ev.RoundWritten(self._replace_round(call.to)), answer)
            case do.EndRound():
                self.call(lambda: ev.RoundWritten(self._end_row(call.round.number, call.to)), answer)
            case do.ReadHeartbeat():

                def look() -> ev.JoinEvent:
                    found = table.heartbeat
                    self.heartbeat_seen = found.round if found else 0
                    return ev.HeartbeatRead(found and found.version, self.heartbeat_seen)

                self.call(look, answer)
            case do.ReadKey():
                self.call(lambda: ev.KeyRead(changed=False), answer)

    def _connect(self, call: do.Connect, answer: Callable[[ev.JoinEvent], object]) -> None:
        if self.watch is not None and self.watch.server.incarnation == call.to.incarnation:
            self.watch.send(call.greeting)
            answer(ev.Connected())
            return
        self._drop_watch()

        def connected(link: Connection | None, refused: bool) -> None:
            if link is None:
                answer(ev.ConnectFailed(refused, self.me if self.joiner is None else self.joiner.me))
                return
            self.watch = link
            link.send(call.greeting)
            answer(ev.Connected())

        self.dial(call.to, self._from_watched_hub, connected)

    def dial(self, to: Member, take: Callable, then: Callable[[Connection | None, bool], object]) -> None:
        """Connect to a hub; ``then`` gets the connection, or none and whether it was refused."""
        world = self.world
        if world.hole_between(self.name, to.node) > world.now + _DEAD_CONNECT_SECONDS:
            world.after(_DEAD_CONNECT_SECONDS, lambda: self.when_running(lambda: then(None, False)))
            return

        def arrive() -> None:
            target = world.node_at(to)
            link = Connection(world, self, target, take) if target is not None and self.alive else None
            world.after(0.001, lambda: self.when_running(lambda: then(link, link is None)))

        world.after(0.001, arrive)

    def _from_watched_hub(self, message: messages.Message | None) -> None:
        if message is None:
            self.watch = None
            self.events.append(ev.LinkEnded())
        else:
            self._note_round(message)
            if isinstance(message, messages.Beat):
                self.silence.learn(message.pause, self.clock)
            else:
                self.events.append(ev.HubSent(message))
        self.wake()

    def _note_round(self, message: messages.Message) -> None:
        """Take in a version of the round, or that it must be read."""
        if isinstance(message, messages.RoundChanged) and message.round is not None:
            if not self.newest.accept(message.round):
                self.must_look = True
                self.events.append(ev.HubSent(messages.RoundChanged(None)))
        elif isinstance(message, messages.RoundChanged):
            self.must_look = True

    def _drop_watch(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _enter(self, call: do.Enter, answer: Callable[[ev.JoinEvent], object]) -> None:
        round_ = call.round
        self.round, self.entered, self.over, self.reports = round_, self.clock, False, HubReports()
        self.last_round = round_.number
        self.inbox.clear()
        if call.rank == 0:
            self._perform_hub(self.hub.enter(round_, self.clock))
            self._heartbeat(round_.number)
        else:
            self.beating = 0

        def connected(link: Connection | None, refused: bool) -> None:
            if link is None:
                answer(ev.EntryFailed(f"{self} cannot reach {round_.members[0].node}", not refused, self.me))
                return
            self.link = link
            link.send(messages.MemberHello(round_.number))
            answer(ev.Entered())

        if self.link is not None:
            self.link.close()
        self.dial(round_.members[0], self._from_leader, connected)

    def _query(self, round_: Round, answer: Callable[[ev.JoinEvent], object]) -> None:
        answers: list[bool | None] = []
        for member in round_.members[1:9]:
            other = self.world.node_at(member)
            if member.node == self.name:
                continue
            if (
                other is None
                or other.frozen
                or self.world.hole_between(self.name, member.node) > self.world.now
                or other.last_round != round_.number
            ):
                answers.append(None)
            else:
                answers.append(other.link is not None)
        self.world.after(1.2, lambda: self.when_running(lambda: answer(ev.MembersAnswered(answers))))

    def _perform(self, joiner: Joiner, action: do.JoinAction) -> None:
        self._may_crash(action)
        match action:
            case do.Offer():
                self._perform_hub(self.hub.add_own(action.round, action.me))
                self.has_woken = True
            case do.Greet() if self.watch is not None:
                self.watch.send(action.greeting)
            case do.EndWatch():
                self._drop_watch()
            case do.Forward():
                self._perform_hub(self.hub.publish(action.round))
                if action.to_hub and self.watch is not None:
                    self.watch.send(messages.RoundChanged(action.round))
            case do.NudgeHeartbeat():
                self.call(self.world.table.nudge, lambda _: None)

    def _leave_before_a_round(self) -> None:
        """Leave while waiting, as the agent does: its row says so, and a seal with it is taken back."""
        self.joiner, self.busy = None, True
        row = replace(self.me, state="left", reason="preempted")

        def write() -> None:
            self.world.table.members[self.name] = row
            round_ = self.world.table.round or Round()
            member = round_.rank_of(self.name, self.incarnation) is not None
            if round_.state == "sealed" and member and round_.number > self.last_round:
                to = reopened(round_, "left before it could enter", lost=frozenset({self.name}))
                self.world.table.write(self.world.now, self.name, to)

        leave = partial(self.leaves, "left")
        self.call(write, lambda _: self.world.at(self.ends_at, lambda: self.when_running(leave)))

    # --- in a round --------------------------------------------------------------------------------------------------

    def _enters(self) -> None:
        self.joiner = None
        self._drop_watch()
        round_ = self.round
        self.schedule.entered(self, round_)
        self.seen = {}
        # The workers of the round before hand over to those of this one, or save for them.
        self.world.at(self.ends_at, lambda: self.when_running(partial(self._begins, round_)))

    def _begins(self, round_: Round) -> None:
        schedule = self.schedule
        self.training = Training(
            round_,
            self.name,
            schedule.configuration,
            opens_session=schedule.opens_session,
            entered=self.entered,
            now=self.clock,
        )
        self.group = schedule.group_of(round_)
        self.group.start(self)
        self._poll(self.training)

    def _poll(self, training: Training) -> None:
        """Look now, and again when the machine wants to, or after some time, as the ends of processes wake nobody."""
        if self.training is training and self.alive:
            self._look()
            pause = min(_MONITOR_SECONDS, max(0.01, training.deadline - self.clock))
            self.world.after(pause, lambda: self.when_running(partial(self._poll, training)))

    def _from_leader(self, message: messages.Message | None) -> None:
        if message is None:
            given_up = self._pauses.was_given_up(self.silence.smallest(self.clock), self.clock)
            self.link = None
            self.reports.take(ev.LinkEnded(was_given_up=given_up))
        else:
            if isinstance(message, messages.Beat):
                self.silence.learn(message.pause, self.clock)
            if isinstance(message, messages.Broadcast):
                self.inbox.append(ev.FromLeader(message.body))
            self._note_round(message)
            self.reports.take(ev.HubSent(message))
        self.wake()

    def _status(self) -> ev.RoundSeen:
        """Return what is known of the round, as ``Rendezvous.status`` does."""
        round_, reports = self.round, self.reports
        leads = round_.members[0].node == self.name
        view = self.hub.view(self.clock) if leads else HubView()
        if self.must_look or reports.take_read_request():
            self.must_look = False
            self.call(lambda: self.world.table.round or Round(), partial(self._looked, round_))
        given_up = view.was_given_up or reports.was_given_up
        self.over = self.over or given_up or reports.broken or self.newest.after(round_) is not None
        debounce = self.timings.rescale_debounce.total_seconds()
        return reports.see(
            round_, self.name, view, over=self.over, ended=self.newest.after(round_) is not None,
            limits=self.limits, debounce=debounce, now=self.clock,
        )  # fmt: skip

    def _looked(self, round_: Round, row: Round) -> None:
        if self.round is round_ and (row.number, row.state) != (round_.number, round_.state):
            self.over = True
            self.wake()

    def _look(self) -> None:
        """Bring what has happened to the machine of the round, as the agent's observer does."""
        training = self.training
        if training is None or self.busy:
            return
        seen = self._status()
        received, self.inbox = list(self.inbox), deque()
        workers, votes = self.group.report(self)
        own = [each for each in received if isinstance(each, (ev.ProgramSaved, ev.WorkersHeld))]
        early, others = ev.in_order([each for each in received if each not in own])
        events: list[ev.TrainingEvent] = [*early]
        for what in (seen, workers):
            if self.seen.get(type(what)) != what:
                self.seen[type(what)] = what
                events.append(what)
        events += others + votes + own
        if self.notice is not None and self.seen.get(ev.Noticed) is None:
            self.seen[ev.Noticed] = self.notice
            events.append(self.notice)
        if training.leads and self.group.connecting and not training.connecting:
            events.append(ev.StoreUsed())
        events.append(ev.TimePassed())
        for event in events:
            if self.training is not training or self.busy:
                return
            self._take_event(training, event)

    def receive(self, event: ev.ProgramSaved | ev.WorkersHeld) -> None:
        """Take what the worker of this node has done."""
        if self.training is not None:
            self.inbox.append(event)
            self.wake()

    def _take_event(self, training: Training, event: ev.TrainingEvent) -> None:
        before = training.state
        actions = training.handle(event, self.clock)
        self.schedule.moved(before, event, training.state)
        if actions:
            self.world.log(self, training.state, event, actions)
        for action in actions:
            self._carry_out(training, action)
        if training.over and self.training is training:
            self._round_is_over(training)

    def _carry_out(self, training: Training, action: do.TrainingAction) -> None:
        self._may_crash(action)
        match action:
            case do.ToMembers(body):
                self._perform_hub(self.hub.to_members(messages.Broadcast(body)))
            case do.ToLeader() | do.ReportDone() | do.Disconnect() | do.AwaitEnd():
                self._send(action)
            case do.AskWorkers(proposal):
                self.group.ask(self, proposal)
            case do.TellWorkers(decision):
                self.group.tell(self, decision)
            case do.InterruptWorkers():
                self._end_workers(None)
            case do.StopWorkers(seconds):
                self._end_workers(seconds)
            case do.AwaitSave() | do.ForgetSaves():
                self.awaits_save = isinstance(action, do.AwaitSave)
            case do.HoldWorkers():
                self.group.workers[self.incarnation].held = True
            case do.ReadFailures():
                self._take_event(training, self.group.failures(self))
            case do.Strike(host):
                self.schedule.struck(self, host)
            case do.Reopen() | do.Close():
                self.busy = True

                def written(mine: bool) -> None:
                    self.busy = False
                    if self.training is training:
                        rows = self.world.table.members
                        absent = [rows[node] for node in self._absent() if node in rows]
                        self._take_event(training, ev.EndWritten(mine, left_in_order(absent)))

                self._change_row(action, written)

    def _end_workers(self, seconds: float | None) -> None:
        self.ends_at = max(self.ends_at, self.world.now + self.group.end(self, seconds))
        self.awaits_save = False

    def _absent(self) -> frozenset[str]:
        """Return the members that have never connected to rank 0's hub."""
        leads = self.round.members[0].node == self.name
        return self.reports.absent | (self.hub.view(self.clock).absent if leads else frozenset())

    def _send(self, action: do.ToLeader | do.ReportDone | do.Disconnect | do.AwaitEnd) -> None:
        if isinstance(action, do.AwaitEnd):
            self._connect(do.Connect(action.by, greeting_of(self.me, self.round), ""), lambda _: None)
        if self.link is None:
            return
        match action:
            case do.ToLeader(body):
                self.link.send(messages.Report(body))
            case do.ReportDone():
                self.link.send(messages.Done())
            case do.Disconnect():
                self.link.close()
                self.link = None

    def _change_row(self, action: do.Reopen | do.Close, then: Callable[[bool], object]) -> None:
        """End the round, or the run; see ``rendezvous.round_end``."""
        round_ = self.round
        if isinstance(action, do.Reopen) and self.newest.after(round_) is not None:
            then(False)
            return
        absent = self._absent() & getattr(action, "lost", frozenset())
        seconds, waiting = self.clock - self.entered, self.hub.view(self.clock).waiting
        facts = EndFacts(seconds, waiting, absent, f"{sorted(absent)} have not connected")
        to = version_after(round_, action, facts, max_failed_rounds=self.timings.max_failed_rounds)

        def written(mine: bool) -> None:
            newer = to if mine else self.newest.after(round_)
            if newer is not None:
                self._perform_hub(self.hub.publish(newer))
            if mine and self.link is not None:
                self.link.send(messages.RoundChanged(to))
            then(mine)

        self.call(lambda: self._end_row(round_.number, to), written)

    def _round_is_over(self, training: Training) -> None:
        self.training = None
        self._end_workers(None)
        if training.state is State.RECOVERING:
            self._join()
        elif training.state is State.LEFT:
            self.world.at(self.ends_at, lambda: self.when_running(partial(self.leaves, "left")))
        else:
            self.leaves("succeeded" if training.state is State.SUCCEEDED else "failed")

    def leaves(self, part: str) -> None:
        """The process ends."""
        self.part = part
        if part == "left":
            row = replace(self.me, state="left")
            self.world.table.members[self.name] = row
        self.kill()

    def _heartbeat(self, number: int, writer: HeartbeatWriter | None = None) -> None:
        """Write the heartbeat's row while this node is rank 0 of a round, as ``TableHeartbeat`` does."""
        table, seconds = self.world.table, self.timings.table_heartbeat_interval.total_seconds()

        def beats(then: HeartbeatWriter, after: float = 0.0) -> None:
            self.world.after(after, lambda: self.when_running(partial(self._heartbeat, number, then)))

        def beaten(version: str | None) -> None:
            holds = is_same_round(table.round or Round(), self.round)
            is_first = version is not None and writer.written(version)
            then = Overtaken(look=is_first and not holds) if version is not None else writer.overtaken(table.heartbeat)
            if then.given_up:
                self.beating = 0
                self._perform_hub([SendAll(messages.RoundChanged(None))])
            if then.look or then.given_up:
                self.must_look = True
                self.wake()
            beats(writer, 0.0 if then.again else seconds)

        if writer is None:
            self.beating = number
            self.call(lambda: HeartbeatWriter(number, self.incarnation, table.heartbeat), beats)
        elif self.beating == number:
            self.call(lambda: table.beat(writer.version, writer.beat()), beaten)
