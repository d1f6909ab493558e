"""Messages between the agents of a round: step boundaries, leaving nodes, and hanging workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from azureml_elastic.ipc.agent_interface import Action
from azureml_elastic.ipc.agent_messages import (
    AllPlaced,
    Decision,
    Dumped,
    DumpStacks,
    HangLesson,
    Leaving,
    Placed,
    Prepare,
    RanksConnecting,
    ReportBody,
    Vote,
)
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.newcomer_watch import NewcomerWatch
from azureml_elastic.node.agent.newcomers import ends_soon
from azureml_elastic.node.agent.peer_discovery import PeerDiscovery
from azureml_elastic.node.core.boundary import BoundaryCoordinator
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.core.messages import Report
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.hangs.response import HangResponse
from azureml_elastic.node.rendezvous.inbox import FromLeader, FromMember
from azureml_elastic.node.rendezvous.reachability.reachability import UnreachablePair
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.state.assignment import Status
from azureml_elastic.node.rendezvous.store_process import RemoteStore, RoundStore

__all__ = ["PeerMessenger"]

_LOG = logging.getLogger(__name__)

_CONNECTION_SECONDS = 0.1
"""Time between two looks whether the workers have begun to connect."""

_IMPORT_SECONDS = 30.0
"""How long newcomers wait at least for the session that the program speaks of. The same rules as for a program without
a session apply then."""


class PeerMessenger:
    """One agent's part in the agreements of a round. For the agent's thread.

    Args:
        rendezvous: this node's place in the round, with its connections.
        channel: server for the workers' sessions.
        hangs: what is done about workers that hang.
        opens_session: whether the program uses this library, so that newcomers wait for its session.
        runs_engine: whether the worker is the process of an engine, which newcomers join without a restart.
        newcomers: decision when newcomers may end a round without a session.

    Attributes:
        leavers: nodes that will not be in the next round, because they are being preempted.
        connecting: whether workers of the round have begun to connect to each other, as far as rank 0's agent has seen.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        channel: Channel,
        hangs: HangResponse,
        *,
        opens_session: bool,
        runs_engine: bool,
        newcomers: NewcomerWatch,
    ) -> None:
        self._rdzv = rendezvous
        self._channel = channel
        self._hangs = hangs
        self._opens_session = opens_session
        self._runs_engine = runs_engine
        self._newcomers = newcomers
        self._coordinator: BoundaryCoordinator | None = None
        self._number = 0
        self._started = 0.0
        self._leaving = False
        self._discovery = PeerDiscovery(rendezvous.hub.broadcast)
        self._store: RoundStore = RemoteStore()
        self._look_at = 0.0
        self.connecting = False
        self.leavers: set[str] = set()

    def begin(self, round_: Round, *, leads: bool) -> None:
        """A round begins."""
        names = tuple(member.node for member in round_.members)
        self._number = round_.number
        self._coordinator = BoundaryCoordinator(names) if leads else None
        self._started = time.monotonic()
        self._newcomers.rest()
        self._leaving = False
        self.connecting = False
        self.leavers = set()
        self._discovery.begin(names)
        self._hangs.begin(round_.number, names)

    def workers_started(self, world_size: int, store: RoundStore, pids: Sequence[int]) -> None:
        """The workers of this node have been started, or have received their assignments.

        Args:
            world_size: number of workers of the round.
            store: store of the round, in which workers set keys when they connect to each other.
            pids: process ids of the workers of this node.
        """
        self._started = self._look_at = time.monotonic()
        self._store = store
        if self._coordinator is not None:
            self._newcomers.begin(world_size, pids)

    def announce_leaving(self) -> None:
        """Tell rank 0's agent, once, that this node has to go."""
        if not self._leaving:
            self._leaving = True
            self.report(Leaving())

    def report(self, body: ReportBody) -> None:
        """Send a report to rank 0's agent."""
        self._rdzv.membership.link.send(Report(body))

    def process_events(self) -> None:
        """Process what agents and local workers have sent since the last call."""
        for vote in self._channel.workers.take_votes():
            self.report(vote)
        for event in self._rdzv.inbox.take(self._number):
            match event:
                case FromLeader(body=Prepare() as proposal):
                    self._channel.workers.prepare(proposal)
                case FromLeader(body=Decision() as decision):
                    self.leavers.update(decision.leavers)
                    if decision.go and self.leavers:
                        left = _list(self.leavers)
                        _LOG.info("All workers stop after the same step; not in the next round: %s.", left)
                    stay = self._rdzv.node not in self.leavers
                    self._channel.workers.decide(Decide(decision.boundary, decision.go, stay))
                case FromLeader(body=AllPlaced()):
                    self._discovery.all_placed()
                case FromLeader(body=RanksConnecting()):
                    self.connecting = True
                case FromLeader(body=DumpStacks() | HangLesson() as body):
                    self._hangs.take(body)
                case FromMember(node=node, body=Leaving()):
                    self.leavers.add(node)
                case FromMember(node=node, body=Placed()):
                    self._discovery.reported(node)
                case FromMember(node=node, body=Dumped()):
                    self._hangs.answered(node)
                case FromMember(node=node, body=Vote() as vote) if self._coordinator is not None:
                    decided = self._coordinator.take(node, vote, time.monotonic(), sorted(self.leavers))
                    if decided is not None:
                        self._rdzv.hub.broadcast(decided)
        if self._discovery.must_report(placed=self._channel.workers.placed):
            self.report(Placed())

    def gap(self) -> UnreachablePair | None:
        """Return the gap for which this agent has to end the round now, because workers will never connect over it."""
        return (
            self._rdzv.take_unreachable_pair()
            if self._discovery.takes_long(connected=self._channel.workers.connected)
            else None
        )

    def lead(self, status: Status, *, done: bool) -> str | None:
        """Rank 0's part: make room for newcomers and let the preempted go.

        Args:
            status: status of the round.
            done: whether this node's workers have ended well.

        Returns:
            Why the round must end at once, because some workers have no session and no boundary can be agreed.
        """
        coordinator = self._coordinator
        if coordinator is None:
            return None
        importing = self._opens_session and time.monotonic() - self._started < _IMPORT_SECONDS
        if self._channel.workers.in_session:
            self._newcomers.rest()
        elif not status.waiting:
            self._newcomers.nobody_waits()
        self._look_at_store()
        ending = coordinator.finished or self._channel.workers.finished or done
        if coordinator.is_busy(time.monotonic()) or coordinator.leaving or ending:
            return None
        if not (self.leavers or status.waiting):
            return None
        if ends_soon(self._channel.workers.seconds_left) and not self.leavers:
            return None
        if self._runs_engine:  # the processes stay and go on working, so that the end of the round costs nothing
            return f"preempted: {_list(self.leavers)}" if self.leavers else f"joining: {_list(status.waiting)}"
        if not coordinator.incapable and self._channel.workers.in_session:
            action: Action = "leave" if self.leavers else "rejoin"
            self._rdzv.hub.broadcast(coordinator.propose(self._channel.workers.step, action))
        elif self.leavers:
            return f"preempted: {_list(self.leavers)}"
        elif not importing and self._newcomers.may_end_round(status.waiting, connected=self.connecting):
            return f"joining: {_list(status.waiting)}"
        elif self._opens_session:
            coordinator.incapable = False  # workers may only be importing still: ask again
        return None

    def _look_at_store(self) -> None:
        """Tell all agents, once, that workers have begun to connect: only this node's store shows it."""
        now = time.monotonic()
        if not self.connecting and now >= self._look_at:
            self._look_at = now + _CONNECTION_SECONDS
            if self._store.has_keys():
                self.connecting = True
                self._rdzv.hub.broadcast(RanksConnecting())

    def hang(self) -> Hang | None:
        """Return the hang for which this agent has to end the round now."""
        return self._hangs.look()


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
