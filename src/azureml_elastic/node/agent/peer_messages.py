"""Messages between the agents of a round: step boundaries, leaving nodes, and hanging workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from azureml_elastic.node.agent.channel import Channel
from azureml_elastic.node.agent.peer_discovery import PeerDiscovery
from azureml_elastic.node.agent.step_boundary import BoundaryCoordinator
from azureml_elastic.node.hangs.policy import Hang
from azureml_elastic.node.hangs.response import HangResponse
from azureml_elastic.node.rendezvous.reachability.reachability import UnreachablePair
from azureml_elastic.node.rendezvous.rendezvous import Rendezvous
from azureml_elastic.node.rendezvous.state.assignment import Status
from azureml_elastic.node.rendezvous.state.round import Round

__all__ = ["PeerMessenger"]

_LOG = logging.getLogger(__name__)

_IMPORT_SECONDS = 30.0
"""How long workers may take to open the session that their program speaks of, before newcomers stop them."""

_REMAINING_SECONDS = 1.0
"""A newcomer is not let in any more when the run will end sooner than this: it would only hold it up."""


class PeerMessenger:
    """One agent's part in the agreements of a round. For the agent's thread.

    Args:
        rendezvous: this node's place in the round, with its connections.
        channel: server for the workers' sessions.
        hangs: what is done about workers that hang.
        opens_session: whether the program uses this library, so that newcomers wait for its session.

    Attributes:
        leavers: nodes that will not be in the next round, because they are being preempted.
    """

    def __init__(self, rendezvous: Rendezvous, channel: Channel, hangs: HangResponse, *, opens_session: bool) -> None:
        self._rdzv = rendezvous
        self._channel = channel
        self._hangs = hangs
        self._opens_session = opens_session
        self._coordinator: BoundaryCoordinator | None = None
        self._started = 0.0
        self._leaving = False
        self._discovery = PeerDiscovery(rendezvous.hub.broadcast)
        self.leavers: set[str] = set()

    def begin(self, round_: Round, *, leads: bool) -> None:
        """A round begins."""
        names = tuple(member.node for member in round_.members)
        self._coordinator = BoundaryCoordinator(names, self._rdzv.hub.broadcast) if leads else None
        self._started = time.monotonic()
        self._leaving = False
        self.leavers = set()
        self._discovery.begin(names)
        self._hangs.begin(round_.number, names)

    def announce_leaving(self) -> None:
        """Tell rank 0's agent, once, that this node has to go."""
        if not self._leaving:
            self._leaving = True
            self._rdzv.membership.link.report({"what": "leaving"})

    def talk(self) -> None:
        """Carry proposals and decisions between rank 0's agent and the local workers."""
        link = self._rdzv.membership.link
        for message in link.take_broadcasts():
            if message["op"] == "prepare":
                self._channel.prepare(message)
            elif message["op"] == "placed":
                self._discovery.all_placed()
            elif message["op"] in ("dump", "lesson"):
                self._hangs.take(message)
            elif message["op"] == "decide":
                self.leavers.update(message["leavers"])
                if message["go"] and self.leavers:
                    _LOG.info("All workers stop after the same step; not in the next round: %s.", _list(self.leavers))
                self._channel.decide({**message, "stay": self._rdzv.node not in self.leavers})
        for report in self._channel.take_reports():
            link.report(report)
        if (placed := self._discovery.news(placed=self._channel.placed)) is not None:
            link.report(placed)

    def gap(self) -> UnreachablePair | None:
        """Return the gap for which this agent has to end the round now, because workers will never connect over it."""
        return (
            self._rdzv.take_unreachable_pair()
            if self._discovery.takes_long(connected=self._channel.connected)
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
        for node, report in self._rdzv.hub.take_reports():
            if report.get("what") == "leaving":
                self.leavers.add(node)
            elif report.get("what") == "placed":
                self._discovery.reported(node)
            elif report.get("what") == "dumped":
                self._hangs.answered(node)
            else:
                coordinator.take({**report, "node": node}, sorted(self.leavers))
        ending = coordinator.finished or self._channel.finished or done
        if coordinator.busy or coordinator.leaving or ending or not (self.leavers or status.waiting):
            return None
        left = self._channel.seconds_left
        if left is not None and left < _REMAINING_SECONDS and not self.leavers:
            return None
        if not coordinator.incapable and self._channel.in_session:
            coordinator.propose(self._channel.step, "leave" if self.leavers else "rejoin")
        elif self._opens_session and time.monotonic() - self._started < _IMPORT_SECONDS and not self.leavers:
            coordinator.incapable = False  # workers may only be importing still: ask again
        else:
            return f"preempted: {_list(self.leavers)}" if self.leavers else f"joining: {_list(status.waiting)}"
        return None

    def hang(self) -> Hang | None:
        """Return the hang for which this agent has to end the round now."""
        return self._hangs.look()


def _list(nodes: Iterable[str]) -> str:
    return ", ".join(sorted(nodes))
