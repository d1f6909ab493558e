"""Looks, beside a running round, which of its members reach each other, and whether gaps have closed meanwhile.

Agents only need to reach rank 0's node, but workers connect to each other as they like. Where two of their nodes
cannot, the workers hang, and none of them can say why. So each node connects once to the hub of each other member, a
second after the round began and on a thread of its own: in a large round to the next one in the order of the ranks and
to some others at random. Nothing waits for it. Whoever was reached once is not asked again.

Where hubs keep to a range of ports, they show nothing about the ports that workers take: NCCL and gloo have any that is
free. Then each node also listens on such a port, for nothing but that somebody can connect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from azureml_elastic.ipc import Connection
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, Way, is_unreachable
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["DataPort", "PeerProber", "peers_to_probe"]

_AFTER_SECONDS = 1.0
"""Since the round began: workers are being started then."""

_PROBE_SECONDS = 2.0
_TRIES = 2

_AGAIN_SECONDS = (5.0, 60.0)
"""The first and the longest pause between two attempts at a gap."""

_ALL = 32
"""Members of a round up to which everybody tries everybody."""

_SAMPLE = 8


def peers_to_probe(
    members: Sequence[Member], rank: int, reached: Collection[str], choose: random.Random
) -> list[Member]:
    """Return the members that the one of this rank should try to reach.

    Args:
        members: of the round.
        rank: of this node.
        reached: incarnations that need not be tried.
        choose: picks some of many.
    """
    others = [member for index, member in enumerate(members) if index != rank]
    if len(members) > _ALL:
        following = members[(rank + 1) % len(members)]
        others = [following, *choose.sample([member for member in others if member is not following], _SAMPLE)]
    return [member for member in others if member.incarnation not in reached]


_IDLE_SECONDS = 3600.0

_PURPOSES: dict[Way, str] = {
    "mesh": "a member of round {}, to which the workers here connect",
    "data": "a member of round {}, on a port such as its workers take",
}


class DataPort:
    """A port such as workers take, on which nothing is served.

    Args:
        machine: to listen on.
        interface: the address to listen on.
    """

    def __init__(self, machine: Runtime, interface: str) -> None:
        listener = machine.listen_as_workers_do(interface)
        self.number: int = listener.getsockname()[1]
        self._server = machine.serve(listener, _hang_up, _nothing, _nothing, _IDLE_SECONDS)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class PeerProber:
    """This node's probes. :meth:`tick` is for one thread; what it starts runs on another.

    Args:
        machine: to connect from.
        reach: takes note of gaps.
        is_on: whether this node is still in the round of this number with this member, which nobody has lost.
        tell: sends a message to rank 0's hub.
        wake: called when a gap has closed.
        name: of this node, for its choice.
    """

    def __init__(
        self,
        machine: Runtime,
        reach: Reachability,
        is_on: Callable[[int, str], bool],
        tell: Callable[[Mapping[str, Any]], None],
        wake: Callable[[], None],
        name: str,
    ) -> None:
        self._machine = machine
        self._reach = reach
        self._is_on = is_on
        self._tell = tell
        self._wake = wake
        self._choose = random.Random(name)
        self._clock = machine.clock
        self._reached: set[str] = set()
        self._new: tuple[Round, int] | None = None
        self._new_at = 0.0
        self._again_at: dict[tuple[str, str], tuple[float, float]] = {}
        self._busy = False

    def begin(self, round_: Round, rank: int) -> None:
        """Take note that this node is in a round, and has reached rank 0's node."""
        if not round_.members[0].data_port:
            self._reached.add(round_.members[0].incarnation)
        self._new, self._new_at = (round_, rank), self._clock() + _AFTER_SECONDS

    def tick(self) -> None:
        """Start what is due, unless something still runs."""
        if self._busy:
            return
        now = self._clock()
        if self._new is not None and now >= self._new_at:
            (round_, rank), self._new = self._new, None
            peers = peers_to_probe(round_.members, rank, self._reached, self._choose)
            if peers:
                self._start(partial(self._look_around, round_, peers))
                return
        gaps = self._reach.gaps()
        if not gaps:
            self._again_at.clear()
            return
        due = []
        for key, gap in gaps.items():
            at, pause = self._again_at.setdefault(key, (now + _AGAIN_SECONDS[0], _AGAIN_SECONDS[0]))
            if now >= at:
                pause = min(2 * pause, _AGAIN_SECONDS[1])
                self._again_at[key] = (now + pause, pause)
                due.append((key, (gap.peer_host, gap.port)))
        if due:
            self._start(partial(self._look_again, due))

    def _start(self, look: Callable[[], None]) -> None:
        self._busy = True

        def run() -> None:
            try:
                look()
            finally:
                self._busy = False

        self._machine.thread(run, "probing").start()

    def _look_around(self, round_: Round, peers: list[Member]) -> None:
        """Try to reach the members that were not reached before, twice."""
        left: list[tuple[Member, Way, int]] = [(peer, "mesh", peer.hub_port) for peer in peers]
        left += [(peer, "data", peer.data_port) for peer in peers if peer.data_port]
        errors: dict[tuple[str, Way], OSError] = {}
        for _ in range(_TRIES):
            found = self._machine.probe([(peer.host, port) for peer, _, port in left], _PROBE_SECONDS)
            closed = [(each, error) for each, error in zip(left, found, strict=True) if error is not None]
            errors = {(peer.incarnation, way): error for (peer, way, _), error in closed if is_unreachable(error)}
            left = [each for each, error in closed if is_unreachable(error)]
            if not left:
                break
        self._reached.update(peer.incarnation for peer in peers if not errors.keys() & _ways(peer))
        for peer in peers:
            for closed_way in _ways(peer) - errors.keys():
                self._closed(*closed_way)
        for peer, way, port in left:
            if way == "data" and (peer.incarnation, "mesh") in errors:
                continue  # nothing of that machine is reached
            if self._is_on(round_.number, peer.node):
                purpose = _PURPOSES[way].format(round_.number)
                error = errors[peer.incarnation, way]
                self._reach.failed(peer, purpose, error, _PROBE_SECONDS, way=way, port=port)

    def _look_again(self, due: list[tuple[tuple[str, Any], tuple[str, int]]]) -> None:
        """Try once more to close gaps."""
        errors = self._machine.probe([address for _, address in due], _PROBE_SECONDS)
        for ((incarnation, way), _), error in zip(due, errors, strict=True):
            if error is None or not is_unreachable(error):
                self._closed(incarnation, way)

    def _closed(self, incarnation: str, way: Way) -> None:
        """Take note that a way is free."""
        if self._reach.reached(incarnation, way):
            self._tell({"op": "reaches", "incarnation": incarnation})
            self._wake()


def _ways(peer: Member) -> set[tuple[str, Way]]:
    return {(peer.incarnation, "mesh"), (peer.incarnation, "data")}


def _hang_up(connection: Connection, _: object) -> None:
    connection.close("nothing is served here")


def _nothing(*_: object) -> None:
    """Let it pass."""
