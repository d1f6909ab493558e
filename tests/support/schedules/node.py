"""One process of a node: what drives it is the real driver, and this is its port to a simulated world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.hub_state import CloseLink, HubState, HubView, Send, SendAll
from azureml_elastic.node.core.joiner import Joiner
from azureml_elastic.node.core.joining import greeting_of
from azureml_elastic.node.core.node import Node as Machine
from azureml_elastic.node.core.node import Part
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
from azureml_elastic.node.driver import Driver, Received
from tests.support.schedules.workers import Group
from tests.support.schedules.world import Connection, DiedError

if TYPE_CHECKING:
    from tests.support.schedules.schedule import Schedule

_DEAD_CONNECT_SECONDS = 3.0
_MONITOR_SECONDS = 1.0


class Recorded(Machine):
    """A node's machine whose transitions are recorded."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.me, node.limits, node.timings, node.newest)
        self.run_workers(node.schedule.configuration, opens_session=node.schedule.opens_session)
        self._process = node

    def handle(self, event: ev.NodeEvent, now: float) -> list[do.Action]:
        decides = self.joiner or self.training
        before = decides.state if decides is not None else self.part
        actions = super().handle(event, now)
        decides = decides or self.joiner or self.training
        after = decides.state if decides is not None else self.part
        self._process.schedule.moved(before, event, after)
        if actions or self.joiner is not None:
            self._process.world.log(self._process, after, event, actions)
        return actions


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
        self.held = self.heartbeat_seen = self.beating = 0
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
        self.hub = HubState(self.limits, self.timings, self.now, self.silence)
        self.links: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._thawing: list[Callable[[], object]] = []
        self._pauses = PauseDetector(self.now, self.tick)
        self.machine = Recorded(self)
        self.driver = Driver(self.machine, self)
        self._timer = self._connections = 0
        self._received: tuple[list, list, list, list] = [], [], [], []
        self._must_look = False
        # on the way into a round
        self.watch: Connection | None = None
        self.round_version = -1
        self.round_seen: Round | None = None
        self.written_version = -2
        # in a round
        self.link: Connection | None = None
        self.awaits_save = self.has_left = self.has_parked = False
        self.parked_at: float | None = None
        self.group: Group | None = None
        self.own: list[ev.TrainingEvent] = []
        self.notice: ev.Noticed | None = None
        self._noticed_in: Training | None = None
        self.part: str | None = None
        world.nodes.append(self)
        world.after(self.tick, self._on_tick)
        world.after(imports, lambda: self.when_running(partial(self._drive, self.driver.begin)))
        self.call(lambda: world.table.members.__setitem__(name, self.me), lambda _: None)

    def __repr__(self) -> str:
        return self.incarnation

    @property
    def joiner(self) -> Joiner | None:
        return self.machine.joiner

    @property
    def training(self) -> Training | None:
        return self.machine.training

    @property
    def round(self) -> Round | None:
        return self.machine.round

    # --- time and life -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
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
        actions = self.hub.ticked(self.now, last)
        beat = messages.Beat(self.silence.pause)
        self._perform_hub([SendAll(beat)])
        self._perform_hub(actions or [])
        self._pauses.tick(self.now)
        for link in (self.watch, self.link):
            if link is not None:
                link.send(beat)
                if self._beats_of(link).is_lost(link.client_received, self.now):
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
                self.silence.learn(message.pause, self.now)
                return
            case messages.RoundChanged(round=None):
                self._perform_hub([SendAll(message)])
            case messages.RoundChanged(round=Round() as round_):
                if not self.newest.accept(round_):
                    state.request_read()
                self._perform_hub(state.publish(round_))
            case messages.MemberHello():
                self._perform_hub(state.greeted(link.number, peer.name, peer.incarnation, message.round, self.now))
            case messages.Watch():
                self._perform_hub(state.watching(link.number, peer.name, peer.incarnation, message, self.now))
            case messages.Done():
                self.done.add((state.member_of(link.number)[1], peer.name))
                self._perform_hub(state.done(link.number))
            case messages.Report() if (member := state.member_of(link.number)) is not None:
                self._received[2].append((member[1], ev.FromMember(member[0], message.body)))
        self.wake()

    def hub_link_ended(self, link: Connection) -> None:
        """Process the end of a connection at this node's hub."""
        self.links.pop(link.number, None)
        actions = self.hub.closed(link.number, self.now)
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

    # --- the driver's port -------------------------------------------------------------------------------------------

    def _drive(self, what: Callable[[], object]) -> None:
        """Have the driver do something, and look again when the node wants to; the ends of processes wake nobody."""
        if not self.alive:
            return
        what()
        machine, until = self.machine, self.driver.deadline
        if machine.part is Part.ENDED and machine.ending is not None and self.part is None:
            self._ends(machine.ending)
        if machine.prepares and not machine.calls:
            until = self.now + 0.05
        elif machine.training is not None:
            until = min(self.now + _MONITOR_SECONDS, max(until, self.now + 0.01))
        self._timer += 1
        if until != float("inf"):
            fires = partial(self._on_timer, self._timer)
            self.world.at(max(self.world.now, until - self.offset + 1e-6), lambda: self.when_running(fires))

    def _on_timer(self, number: int) -> None:
        if self._timer == number:
            self._drive(self.driver.turn)

    def wake(self) -> None:
        """Have this process look at once, unless it waits for the table."""
        # Not now: who wakes it is another process, or in the middle of its own actions.
        turn = partial(self.driver.turn, woken=True)
        self.world.after(0.0, lambda: self.when_running(partial(self._drive, turn)))

    def _answer(self, event: ev.NodeEvent) -> None:
        self._drive(partial(self.driver.answer, event))

    def clock(self) -> float:
        return self.now

    def receive(self) -> Received:
        received, self._received = self._received, ([], [], [], [])
        must_look, self._must_look = self._must_look, False
        return Received(*received, must_look)

    def must_leave(self) -> bool:
        return self.notice is not None

    def view(self) -> HubView:
        return self.hub.view(self.now) if self.machine.leads else HubView()

    def woken(self) -> ev.Woken:
        return ev.Woken(self.hub.should_seal(), self.hub.take_read_request())

    def marked(self, me: Member) -> Member:
        return me

    def readiness(self) -> ev.ReadinessSeen:
        if self.group is not None and not self.has_parked:
            self._end_workers(None)
            self.parked_at, self.has_parked = self.ends_at, True
        stays = self.parked_at is not None
        return ev.ReadinessSeen(alive=stays, parked=stays and self.world.now >= self.parked_at)

    def workers(self) -> tuple[list[ev.WorkerVoted], ev.WorkersSeen]:
        workers, votes = self.group.report(self)
        return votes, workers

    def own_events(self, training: Training, _: ev.WorkersSeen) -> Iterator[ev.TrainingEvent]:
        own, self.own = self.own, []
        yield from own
        if self.notice is not None and self._noticed_in is not training:
            self._noticed_in = training
            yield self.notice
        if training.leads and self.group.connecting and not training.connecting:
            yield ev.StoreUsed()

    def perform(self, action: do.Action) -> ev.NodeEvent | None:
        self._may_crash(action)
        match action:
            case do.ReplaceWorkers():
                if self.group is not None:
                    self._end_workers(None)
                self.parked_at = self.ends_at + self.world.random.uniform(0.05, 1.0)
            case do.LeaveRound():
                self._disconnect()
            case do.FindRound(before):
                self._find_round(before)
            case do.LookAtRow(round_):
                self.call(lambda: self.world.table.round or Round(), partial(self._looked, round_))
            case do.StartWorkers(round_):
                self._start_workers(round_)
            case do.LeaveRun():
                self._leave_before_a_round()
            case do.Finish(round_):
                self.leaves(round_.state)
            case do.Reopen() | do.Close():
                self._change_row(action)
            case _ if isinstance(action, do.RendezvousCall):
                return self._call(action)
            case _ if isinstance(action, do.JoinStep):
                self._perform(action)
            case _:
                return self._carry_out(action)
        return None

    def _find_round(self, before: Round | None) -> None:
        known = {member.node: member for member in before.members} if before is not None else None

        def read() -> ev.NodeEvent:
            rows = {name: row.to_value() for name, row in self.world.table.members.items()}
            newer = self.newest.after(before) if before is not None else None
            round_ = newer or self._read_round(self.newest.newest)
            return ev.Started(round_, rows if known is None else known, self.has_left)

        if before is not None and self.newest.after(before) is not None:
            event = read()
            self.world.after(0.0, lambda: self.when_running(partial(self._answer, event)))
        else:
            self.call(read, self._answer)

    # --- on the way into a round -------------------------------------------------------------------------------------

    def _may_crash(self, action: object) -> None:
        """End here, between two actions, where the schedule has it so.

        Raises:
            DiedError: it ends, or has ended.
        """
        if self.alive and self.schedule.faults.crashes(self, action):
            self.kill(silently=self.world.random.random() < 0.3)
        if not self.alive:
            raise DiedError

    def _call(self, call: do.RendezvousCall) -> ev.NodeEvent | None:
        match call:
            case do.PrepareRow():
                self.me = replace(self.me, state="waiting")
                wrote = self.written_version == self.round_version and self.round_seen == call.round
                return ev.RowPrepared(replace(self.me, round=call.round.number, store_port=1), wrote)
            case do.TakeCandidates():
                return ev.CandidatesTaken(self.hub.watchers.candidates())
            case do.QueryMembers():
                self._query(call.round)
            case do.Connect():
                return self._connect(call, self._answer)
            case do.Enter():
                self._enter(call)
            case do.ReachMembers():
                self.world.after(0.001, lambda: self.when_running(partial(self._answer, ev.MembersReached())))
            case _:
                self._call_table(call)
        return None

    def _call_table(self, call: do.TableCall | do.ReadHeartbeat) -> None:
        table, answer = self.world.table, self._answer
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

    def _connect(self, call: do.Connect, answer: Callable[[ev.NodeEvent], object]) -> ev.NodeEvent | None:
        if self.watch is not None and self.watch.server.incarnation == call.to.incarnation:
            self.watch.send(call.greeting)
            return ev.Connected()
        self._drop_watch()

        def connected(link: Connection | None, refused: bool) -> None:
            if link is None:
                answer(ev.ConnectFailed(refused, self.me if self.joiner is None else self.joiner.me))
                return
            self.watch = link
            link.send(call.greeting)
            answer(ev.Connected())

        self.dial(call.to, self._from_watched_hub, connected)
        return None

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
            self._received[1].append(ev.LinkEnded())
        else:
            self._received[1].extend(self._events_of(message, self.watch))
        self.wake()

    def _events_of(self, message: messages.Message, link: Connection | None) -> list[ev.HubSent]:
        """Return what a message of a hub is to the agent, as ``rendezvous.link`` does."""
        answered = link is None or link.answered
        if isinstance(message, messages.Beat):
            self.silence.learn(message.pause, self.now)
            if answered:
                return []
        if link is not None:
            link.answered = True
        of_round = isinstance(message, messages.RoundChanged) and message.round is not None
        if of_round and not self.newest.accept(message.round):
            return [ev.HubSent(message), ev.HubSent(messages.RoundChanged(None))]
        return [ev.HubSent(message)]

    def _drop_watch(self) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _enter(self, call: do.Enter) -> None:
        round_, answer = call.round, self._answer
        if call.rank == 0:
            self._perform_hub(self.hub.enter(round_, self.now))
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

        self._disconnect()
        self.dial(round_.members[0], partial(self._from_leader, self._connections), connected)

    def _disconnect(self) -> None:
        self._connections += 1
        self._received[0].clear()  # what came on the connection that ends is dropped
        if self.link is not None:
            self.link.close()
            self.link = None

    def _query(self, round_: Round) -> None:
        answers: list[bool | None] = []
        for member in round_.members[1:9]:
            other = self.world.node_at(member)
            if member.node == self.name:
                continue
            if (
                other is None
                or other.frozen
                or self.world.hole_between(self.name, member.node) > self.world.now
                or other.machine.last_round != round_.number
            ):
                answers.append(None)
            else:
                answers.append(other.link is not None)
        self.world.after(1.2, lambda: self.when_running(lambda: self._answer(ev.MembersAnswered(answers))))

    def _perform(self, action: do.JoinStep) -> None:
        match action:
            case do.Offer():
                self._perform_hub(self.hub.add_own(action.round, action.me))
            case do.Greet() if self.watch is not None:
                self.watch.send(action.greeting)
            case do.EndWatch() | do.Take():
                self._drop_watch()
            case do.Forward():
                self._perform_hub(self.hub.publish(action.round))
                if action.to_hub and self.watch is not None:
                    self.watch.send(messages.RoundChanged(action.round))
            case do.NudgeHeartbeat():
                self.call(self.world.table.nudge, lambda _: None)

    def _leave_before_a_round(self) -> None:
        """Leave while waiting, as the agent does: its row says so, and a seal with it is taken back."""
        row = replace(self.me, state="left", reason="preempted")

        def write() -> None:
            self.world.table.members[self.name] = row
            round_ = self.world.table.round or Round()
            member = round_.rank_of(self.name, self.incarnation) is not None
            if round_.state == "sealed" and member and round_.number > self.machine.last_round:
                to = reopened(round_, "left before it could enter", lost=frozenset({self.name}))
                self.world.table.write(self.world.now, self.name, to)

        self.part = "left"
        leave = partial(self.leaves, "left")
        self.call(write, lambda _: self.world.at(self.ends_at, lambda: self.when_running(leave)))

    # --- in a round --------------------------------------------------------------------------------------------------

    def _start_workers(self, round_: Round) -> None:
        self.schedule.entered(self, round_)
        # The workers of the round before hand over to those of this one, or save for them.
        self.world.at(self.ends_at, lambda: self.when_running(partial(self._begins, round_)))

    def _begins(self, round_: Round) -> None:
        self.group, self.has_parked = self.schedule.group_of(round_), False
        self.group.start(self)
        self._answer(ev.WorkersStarted())

    def _from_leader(self, connection: int, message: messages.Message | None) -> None:
        if connection != self._connections:
            return
        if message is None:
            given_up = self._pauses.was_given_up(self.silence.smallest(self.now), self.now)
            self.link = None
            self._received[0].append(ev.LinkEnded(was_given_up=given_up))
        elif isinstance(message, messages.Broadcast):
            self._received[2].append((self.machine.last_round, ev.FromLeader(message.body)))
        else:
            self._received[0].extend(self._events_of(message, self.link))
        self.wake()

    def _looked(self, round_: Round, row: Round) -> None:
        self._received[3].append(ev.RowSeen(round_, (row.number, row.state) != (round_.number, round_.state)))
        self.wake()

    def program_saved(self) -> None:
        """The program of this node's worker has saved, and waits."""
        if self.training is not None:
            self.own.append(ev.ProgramSaved())
            self.wake()

    def _carry_out(self, action: do.TrainingAction) -> ev.TrainingEvent | None:
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
                self.group.workers[self.incarnation].kept = True
            case do.ReadFailures():
                return self.group.failures(self)
            case do.Strike(host):
                self.schedule.struck(self, host)
        return None

    def _end_workers(self, seconds: float | None) -> None:
        self.ends_at = max(self.ends_at, self.world.now + self.group.end(self, seconds))
        self.awaits_save = self.has_left = self.has_parked = False
        self.parked_at: float | None = None

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
                self._disconnect()

    def _change_row(self, action: do.Reopen | do.Close) -> None:
        """End the round, or the run; see ``rendezvous.round_end``."""
        round_, view = self.round, self.hub.view(self.now)
        absent = self.machine.absent(view) & getattr(action, "lost", frozenset())
        facts = EndFacts(self.now - self.machine.entered, view.waiting, absent, f"{sorted(absent)} have not connected")
        to = version_after(round_, action, facts, max_failed_rounds=self.timings.max_failed_rounds)

        def written(mine: bool) -> None:
            newer = to if mine else self.newest.after(round_)
            if newer is not None:
                self._perform_hub(self.hub.publish(newer))
            if mine and self.link is not None:
                self.link.send(messages.RoundChanged(to))
            rows = self.world.table.members
            never_came = self.machine.absent(self.hub.view(self.now))
            gone = left_in_order([rows[node] for node in never_came if node in rows])
            self._answer(ev.EndWritten(mine, gone))

        self.call(lambda: self._end_row(round_.number, to), written)

    def _ends(self, ending: State) -> None:
        self._end_workers(None)
        if ending is State.LEFT:
            self.part = "left"
            self.world.at(self.ends_at, lambda: self.when_running(partial(self.leaves, "left")))
        else:
            self.leaves("succeeded" if ending is State.SUCCEEDED else "failed")

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
                self._must_look = True
                self.wake()
            beats(writer, 0.0 if then.again else seconds)

        if writer is None:
            self.beating = number
            self.call(lambda: HeartbeatWriter(number, self.incarnation, table.heartbeat), beats)
        elif self.beating == number:
            self.call(lambda: table.beat(writer.version, writer.beat()), beaten)
