"""Simulated time, a table and a network, without threads: one loop, and one random generator for a whole schedule."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from azureml_elastic.node.core.messages import Message
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.table_heartbeat import HeartbeatRow

if TYPE_CHECKING:
    from azureml_elastic.node.core.pauses import BeatWatch
    from tests.support.schedules.node import Node

_UNAVAILABLE = 0.3
"""Share of the reads of a slow table that get no answer at all."""

_SLOW = 0.4
"""Share of its calls that take long, before they are carried out or after that."""


class DiedError(Exception):
    """A process ends between two of its actions."""


class World:
    """Time, and everything that happens in it.

    Args:
        seed: start of the random number generator.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.table = Table()
        self.nodes: list[Node] = []
        self._trace: list[tuple[float, object, tuple[object, ...]]] = []
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.outages: list[tuple[float, float]] = []
        self.slow_until = 0.0
        self.holes: dict[tuple[str, str], float] = {}
        """Until when nothing passes from one node to another; what is sent meanwhile is sent again then."""
        self.late = 0.04
        """Share of the messages that come late."""

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen at a moment."""
        heapq.heappush(self._agenda, (max(when, self.now), next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something happen after some time."""
        self.at(self.now + seconds, what)

    def run(self, until: float) -> None:
        """Let time pass up to a moment."""
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, what = heapq.heappop(self._agenda)
            with suppress(DiedError):
                what()
        self.now = until

    def table_answers_at(self, seconds: float) -> float:
        """Return when a call is carried out that begins now and takes so long, if the table is not out of order."""
        when = self.now + seconds
        for begins, ends in self.outages:
            if begins <= when < ends:
                when = ends + self.random.uniform(0.0, 0.5)
        return when

    def table_takes(self) -> tuple[float, float]:
        """Return the seconds until a call of the table is carried out, and from then to its answer."""
        before, after = self.random.uniform(0.002, 0.008), self.random.uniform(0.002, 0.008)
        if self.now < self.slow_until and self.random.random() < _SLOW:
            late = self.random.choice((0.3, 2.0, 9.5))
            return (before + late, after) if self.random.random() < 0.5 else (before, after + late)
        return before, after

    def table_fails(self) -> bool:
        """Return whether a call gets no answer."""
        return self.now < self.slow_until and self.random.random() < _UNAVAILABLE

    def log(self, who: object, *what: object) -> None:
        """Keep what has happened, for a schedule that fails."""
        self._trace.append((self.now, who, what))

    def trace(self) -> list[str]:
        """Return a line for each thing that has happened."""

        def text(what: object) -> str:
            if isinstance(what, list):
                return f"-> {', '.join(type(action).__name__ for action in what) or 'nothing'}"
            return what.value if isinstance(what, Enum) else str(what)[:160]

        return [f"{when:9.3f} {who} {' '.join(text(each) for each in what)}" for when, who, what in self._trace]

    def node_at(self, member: Member) -> Node | None:
        """Return the living process with this member's incarnation."""
        return next((node for node in self.nodes if node.incarnation == member.incarnation and node.alive), None)

    def hole_between(self, one: str, other: str) -> float:
        """Return until when two nodes cannot connect."""
        return max(self.holes.get((one, other), 0.0), self.holes.get((other, one), 0.0))


class Version(NamedTuple):
    """What the round's row has held, when, and who has written it."""

    when: float
    node: str
    round: Round


@dataclass
class Table:
    """The rows. A number is the version of the round's row."""

    round: Round | None = None
    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    heartbeat: HeartbeatRow | None = None
    versions: list[Version] = field(default_factory=list)
    """All that the round's row has held."""
    went_back: bool = False
    beats: int = 0
    emptied: bool = False
    """Whether it has lost all of its rows, the heartbeat's too."""

    def write(self, now: float, node: str, to: Round) -> None:
        """Write the round's row."""
        self.round, self.version = to, self.version + 1
        self.versions.append(Version(now, node, to))

    def beat(self, version: str | None, fields: Mapping[str, Any]) -> str | None:
        """Write the heartbeat's row in place of this version; return the new one, ``None`` where it was another one."""
        if (self.heartbeat and self.heartbeat.version) != version:
            return None
        self.beats += 1
        self.heartbeat = HeartbeatRow(str(self.beats), **fields)
        return self.heartbeat.version

    def nudge(self) -> None:
        """Change the heartbeat's row, so that the node that writes it looks at the round's row."""
        if (found := self.heartbeat) is not None:
            self.beat(found.version, {"round": found.round, "beats": found.beats})

    def go_back(self, versions: int) -> None:
        """Lose the last writes of the round's row, or all with the heartbeat's."""
        self.went_back = True
        kept = self.versions[:-versions] if versions else []
        self.round = kept[-1].round if kept else None
        self.version += 1
        if not kept:
            self.emptied = True
            self.heartbeat, self.members = None, {}


class Connection:
    """A connection between a node and a hub, perhaps its own, which keeps the order of messages.

    Args:
        world: time.
        client: the node.
        server: node of the hub.
        take: what takes messages of the hub, and ``None`` for the end.
    """

    def __init__(self, world: World, client: Node, server: Node, take: Callable[[Message | None], Any]) -> None:
        self.world, self.client, self.server, self._take = world, client, server, take
        self.client_received = client.now
        self.server_received = server.now
        self.beats: BeatWatch | None = None
        self.answered = False
        self._over_for: set[str] = set()
        self._last = {"client": 0.0, "server": 0.0}
        self.number = server.new_link(self)

    def send(self, message: Message) -> None:
        """Send a message of the node."""
        self._send("client", message)

    def answer(self, message: Message) -> None:
        """Send a message of the hub."""
        self._send("server", message)

    def close(self) -> None:
        """End the connection from the node's side; the hub learns it after what was sent before."""
        self._close("client")

    def drop(self) -> None:
        """End the connection from the hub's side."""
        self._close("server")

    def _node(self, side: str) -> Node:
        return self.client if side == "client" else self.server

    def _send(self, by: str, message: Message) -> None:
        if by not in self._over_for:
            self._at_other(by, lambda to: self._arrives(to, message))

    def _close(self, by: str) -> None:
        if by in self._over_for:
            return
        self._over_for.add(by)
        if by == "server":
            self.server.links.pop(self.number, None)
        self._at_other(by, self._ends)

    def _at_other(self, by: str, what: Callable[[str], object]) -> None:
        """Have something happen at the other end, after all that this side has sent before."""
        to = "server" if by == "client" else "client"
        world, source, target = self.world, self._node(by), self._node(to)
        sent = max(world.now, world.holes.get((source.name, target.name), 0.0))
        is_late = source is not target and world.random.random() < world.late
        takes = world.random.uniform(0.0, 0.6) if is_late else world.random.uniform(0.0005, 0.003)
        self._last[by] = max(self._last[by], sent + takes)
        world.at(self._last[by], lambda: target.when_running(lambda: what(to)))

    def _arrives(self, at: str, message: Message) -> None:
        if at in self._over_for:
            return
        if at == "client":
            self.client_received = self.client.now
            self._take(message)
        else:
            self.server_received = self.server.now
            self.server.hub_received(self, message)

    def _ends(self, at: str) -> None:
        if at in self._over_for:
            return
        self._over_for.add(at)
        if at == "client":
            self._take(None)
        else:
            self.server.hub_link_ended(self)

    def silent(self) -> None:
        """End the connection from the node's side, because the hub is silent."""
        if "client" not in self._over_for:
            self.close()
            self._take(None)
