"""What drives a node: it brings all that has happened to the machine, in one order, and has its actions carried out.

The :class:`Port` is all that it does to the world. A real one performs a call at once; a simulated one may answer it
later, by :meth:`Driver.answer`. Either way nothing else is brought meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.node import Node, Part
from azureml_elastic.node.core.round import Member, NewestRound
from azureml_elastic.node.core.training import Training


@dataclass(frozen=True)
class Received:
    """What has come since the last call, in the order of its arrival.

    Args:
        leader: what rank 0's hub has sent, and the end of the connection to it.
        watched: the same of the hub to which this node is connected while it waits.
        messages: messages of other agents, with the number of the round of each.
        rows: what looks at the round's row have found.
        must_look: whether the round's row is to be looked at.
    """

    leader: Sequence[ev.HubSent | ev.LinkEnded] = ()
    watched: Sequence[ev.HubSent | ev.LinkEnded] = ()
    messages: Sequence[tuple[int, ev.FromLeader | ev.FromMember]] = ()
    rows: Sequence[ev.RowSeen] = ()
    must_look: bool = False


class Port(Protocol):
    """A node's world: its clock, what comes from outside, and what carries its actions out."""

    @property
    def newest(self) -> NewestRound:
        """Newest version of the round that this node knows, from wherever."""

    def clock(self) -> float:
        """Return monotonic seconds."""

    def receive(self) -> Received:
        """Return what has come since the last call."""

    def must_leave(self) -> bool:
        """Return whether this node must leave, while it is in no round. From then on it does."""

    def view(self) -> HubView:
        """Return what this node's own hub knows of the round's members."""

    def woken(self) -> ev.Woken:
        """Return what this node's own hub knows of those that wait."""

    def marked(self, me: Member) -> Member:
        """Return this node's row with the nodes that it cannot reach."""

    def readiness(self) -> ev.ReadinessSeen:
        """Return how far this node's workers are before it asks for a place."""

    def workers(self) -> tuple[Iterable[ev.WorkerVoted], ev.WorkersSeen]:
        """Return the votes of this node's workers, once each, and then all that they have reported."""

    def own_events(self, training: Training, workers: ev.WorkersSeen) -> Iterable[ev.TrainingEvent]:
        """Return what else has happened on this node, once each."""

    def perform(self, action: do.Action) -> ev.NodeEvent | None:
        """Carry out one action, and return the event that answers it, where one does, and does at once."""


_LONGEST_SECONDS = 3600.0
"""Longest wait."""


class EventQueue:
    """What other threads have for the node's, in the order in which it came. Thread-safe.

    Args:
        event: event of the threads' clock; one of this machine by default.
    """

    def __init__(self, event: threading.Event | None = None) -> None:
        self._event = event or threading.Event()
        # Without a lock: a deque's append and popleft are atomic.
        self._posted: deque[Any] = deque()

    def post(self, *posted: object, wake: bool = True) -> None:
        """Add something, and wake the node's thread unless it need not be taken at once."""
        self._posted.extend(posted)
        if wake:
            self._event.set()

    def wake(self) -> None:
        """Wake the node's thread: something that it looks at has changed."""
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, at most for this time; return whether it was."""
        woken = self._event.wait(max(0.0, min(seconds, _LONGEST_SECONDS)))
        # Cleared before anything is looked at, so that what happens from now on wakes again.
        self._event.clear()
        return woken

    def take(self) -> list[Any]:
        """Remove and return all that was posted."""
        taken = []
        while self._posted:
            taken.append(self._posted.popleft())
        return taken


class Driver:
    """Drives one node. For one thread."""

    def __init__(self, node: Node, port: Port) -> None:
        self._node = node
        self._port = port
        self._watched: deque[ev.HubSent | ev.LinkEnded] = deque()
        self._messages: list[tuple[int, ev.FromLeader | ev.FromMember]] = []
        self._woken = False
        self._last: dict[type, object] = {}

    @property
    def deadline(self) -> float:
        """Monotonic seconds at which to call :meth:`turn`, though nothing happens; infinite for never."""
        return self._node.deadline

    def begin(self) -> None:
        """Have the node ask for a place in a round."""
        self._bring(ev.PlaceWanted())

    def answer(self, event: ev.NodeEvent) -> None:
        """Bring the answer to an action that :meth:`Port.perform` has not answered at once."""
        self._bring(event)
        self.turn()

    def turn(self, *, woken: bool = False) -> None:
        """Bring all that has happened, until there is nothing more to do or a call is under way.

        Args:
            woken: whether something may have come, and not only time has passed.
        """
        node, port = self._node, self._port
        self._woken |= woken
        while not node.calls:
            training = node.training
            if training is not None:
                self._turn_in_round(training)
                if node.training is training:
                    return
            elif node.prepares:
                self._bring(ev.MustLeave() if port.must_leave() else port.readiness())
                if node.prepares:
                    return
            elif node.part in (Part.JOINING, Part.DEFERRING) and (event := self._next()) is not None:
                self._bring(event)
            else:
                return

    def status(self) -> ev.RoundSeen:
        """Return what is known of the round in which the node is."""
        view = self._port.view()
        self._receive()  # after the view: with all that a lost member has sent
        for action in self._node.look(view, self._port.clock()):
            self._port.perform(action)
        return self._node.seen

    def _bring(self, event: ev.NodeEvent) -> None:
        """Bring an event to the node, and those that answer its actions."""
        node, port, events = self._node, self._port, deque([event])
        while events:
            for action in node.handle(events.popleft(), port.clock()):
                if isinstance(action, do.Offer):
                    self._woken = True
                elif isinstance(action, do.LeaveRound | do.Connect | do.AwaitEnd | do.EndWatch):
                    self._watched.clear()
                answer = port.perform(action)
                if answer is not None:
                    events.append(answer)

    def _receive(self) -> None:
        """Take in what has come."""
        node, received = self._node, self._port.receive()
        for event in received.leader:
            node.receive(event)
        for row in received.rows:
            node.row_seen(row)
        if received.must_look:
            node.request_look()
        self._watched += received.watched
        self._messages += received.messages

    def _next(self) -> ev.JoinEvent | None:
        """Return what a node on its way into a round takes in next; ``None`` for nothing."""
        node, port = self._node, self._port
        joiner = node.joiner
        assert joiner is not None
        if port.must_leave():
            return ev.MustLeave()
        self._receive()
        if self._watched:
            return self._watched.popleft()
        if (newer := port.newest.after(joiner.round)) is not None:
            return ev.NewerRound(newer)
        if (marked := port.marked(joiner.me)) != joiner.me:
            return ev.MarksChanged(marked)
        if self._woken:
            self._woken = False
            return port.woken()
        return ev.TimerFired() if node.deadline <= port.clock() else None

    def _turn_in_round(self, training: Training) -> None:
        """Bring what has happened since the last turn, and at the end that time has passed.

        What members have sent, and what rank 0 has decided, comes before what is known of the round: who has stopped,
        or leaves as decided, may be gone. That comes before what this node's workers have done: their end may be a lost
        node's fault.
        """
        for event in self._events(training):
            self._bring(event)
            if self._node.training is not training:
                self._last = {}
                return

    def _events(self, training: Training) -> Iterable[ev.TrainingEvent]:
        seen = self.status()
        votes, workers = self._port.workers()  # just before a step is proposed
        early, others = ev.in_order(self.take_messages())
        if training.runs_engine and training.are_all(workers.finished) and self._is_new(ev.ProgramEnded()):
            yield ev.ProgramEnded()  # whatever has happened to other nodes since
        yield from early
        for report in (seen, workers):
            if self._is_new(report):
                yield report
        yield from others
        yield from votes
        yield from self._port.own_events(training, workers)
        yield ev.TimePassed()

    def take_messages(self) -> list[ev.FromLeader | ev.FromMember]:
        """Remove and return the messages of the present round; those of earlier ones are dropped, later ones stay."""
        number, messages = self._node.last_round, self._messages
        self._messages = [(of, message) for of, message in messages if of > number]
        return [message for of, message in messages if of == number]

    def _is_new(self, event: ev.TrainingEvent) -> bool:
        """Return whether this is not as it was reported last in this round; it is reported now."""
        before = self._last.get(type(event))
        self._last[type(event)] = event
        return event != before
