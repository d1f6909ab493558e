"""Which other nodes this one cannot reach, told by name.

A node of a run must reach the others by TCP. Where a firewall or another network is in between, a connection times out,
and whoever waits for it would seem to hang. Here each such *gap* is noted: it is logged, once, with both names; it goes
into the ledger; and the node says in its row, and to those that it can reach, whom it cannot. Those that form a round
then leave out whoever could not take part; see :mod:`~azureml_elastic.node.rendezvous.state.member_selection`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from azureml_elastic.node.host.addresses import place
from azureml_elastic.node.rendezvous.state.round import Member

__all__ = ["Reachability", "UnreachablePair", "Way", "describe_error", "is_unreachable", "why_absent"]

_LOG = logging.getLogger(__name__)

Way = Literal["hub", "store", "mesh", "data"]
"""What could not be reached: the hub where it is needed, the store of a round; the hub of a member to which workers
alone connect, or a port of it such as they take."""

_OF_WORKERS = ("mesh", "data")

_SILENCE_SECONDS = 300.0
"""Before the same gap is told once more."""

_MOST = 16
"""How many gaps a node keeps in mind; of more the newest."""

_MOST_TOLD = 2
"""How many of them stand in its row."""

_NOT_IN_THE_WAY = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""The machine itself has answered."""


@dataclass(frozen=True)
class UnreachablePair:
    """A node that cannot be reached from another one.

    Args:
        node: that cannot reach the other.
        host: its address.
        peer: that cannot be reached.
        peer_host: its address.
        port: that was tried.
        purpose: what the peer is to the node.
        error: what happened.
    """

    node: str
    host: str
    peer: str
    peer_host: str
    port: int
    purpose: str
    error: str

    @property
    def address(self) -> str:
        """The host and the port that were tried."""
        return place(self.peer_host, self.port)

    def __str__(self) -> str:
        return f"{self.node} ({self.host}) cannot reach {self.peer} ({self.address}), {self.purpose}: {self.error}"


def is_unreachable(error: OSError) -> bool:
    """Return whether an error says that a machine cannot be reached, and not that it refuses."""
    return not isinstance(error, _NOT_IN_THE_WAY)


def describe_error(error: OSError, seconds: float) -> str:
    """Return what happened to a connection, in words.

    Args:
        error: that it ended with.
        seconds: that it was given.
    """
    if isinstance(error, TimeoutError):
        return f"connection timed out after {seconds:g} s"
    if isinstance(error, socket.gaierror):
        return f"its name has no address ({error.strerror})"
    return error.strerror or str(error)


class Reachability:
    """The gaps between this node and others. Thread-safe.

    Args:
        node: this node's name.
        host: where the others reach it.
        clock: returns monotonic seconds.
        ports: the first and the last port of the run, ``None`` for any.
        report: called once with each gap that is told.
    """

    def __init__(
        self,
        node: str,
        host: str,
        clock: Callable[[], float],
        ports: tuple[int, int] | None = None,
        report: Callable[[UnreachablePair], None] = lambda _: None,
    ) -> None:
        self._node = node
        self._host = host
        self._clock = clock
        self._report = report
        self._lock = threading.Lock()
        self._gaps: dict[tuple[str, Way], UnreachablePair] = {}
        self._told: dict[tuple[str, Way], float] = {}
        self._proven: set[tuple[str, Way]] = set()
        self.in_doubt = False
        """Whether the round before ended in a way that a gap between two members explains; then these count, too."""
        wanted = f"TCP ports {ports[0]}-{ports[1]}" if ports else "all TCP ports"
        self.advice = (
            f"Nodes in different clusters need one virtual network; open {wanted} between them, or set advertise= or "
            "port_range= of TableRendezvous (docs/network.md)."
        )
        """What to do about a gap."""
        self._advice_on_data = (
            "NCCL and gloo take any port of net.ipv4.ip_local_port_range, whatever port_range= says: open these ports "
            "between the nodes, too, or narrow them on the nodes (docs/network.md)."
        )

    def failed(
        self, peer: Member, purpose: str, error: OSError, seconds: float, *, way: Way = "hub", port: int | None = None
    ) -> UnreachablePair:
        """Take note of a gap, and tell it unless that was done a while ago.

        Args:
            peer: that cannot be reached.
            purpose: what it is to this node, in words.
            error: for which :func:`is_unreachable` is true.
            seconds: that the connection was given.
            way: what could not be reached.
            port: of it; that of the hub by default.
        """
        port = peer.hub_port if port is None else port
        gap = UnreachablePair(
            self._node, self._host, peer.node, peer.host, port, purpose, describe_error(error, seconds)
        )
        key, now = (peer.incarnation, way), self._clock()
        with self._lock:
            self._gaps.pop(key, None)
            self._gaps[key] = gap
            while len(self._gaps) > _MOST:
                del self._gaps[next(iter(self._gaps))]
            tell = now - self._told.get(key, -_SILENCE_SECONDS) >= _SILENCE_SECONDS
            if tell:
                self._told[key] = now
        if tell:
            _LOG.warning("%s. %s", gap, self._advice_on_data if way == "data" else self.advice)
            self._report(gap)
        return gap

    def reached(self, incarnation: str, way: Way) -> bool:
        """Take note that a connection has come about; return whether there was a gap before."""
        with self._lock:
            gap = self._gaps.pop((incarnation, way), None)
            self._proven.discard((incarnation, way))
            if gap is not None:
                self._told.pop((incarnation, way), None)
        if gap is not None:
            _LOG.info("%s can be reached from here again (%s).", gap.peer, gap.address)
        return gap is not None

    def knows(self, incarnation: str) -> bool:
        """Return whether this node's hub could not be reached when it was tried last."""
        with self._lock:
            return (incarnation, "hub") in self._gaps

    def gaps(self) -> dict[tuple[str, Way], UnreachablePair]:
        """Return all of them, by the peer's incarnation and what of it could not be reached."""
        with self._lock:
            return dict(self._gaps)

    def prove(self, incarnations: Collection[str]) -> UnreachablePair | None:
        """Return a gap to one of these to which workers alone connect, if there is one; it counts until it has closed.

        Args:
            incarnations: of which the workers have not found each other.
        """
        with self._lock:
            found = [key for key in self._gaps if key[1] in _OF_WORKERS and key[0] in incarnations]
            self._proven.update(found)
            return self._gaps[found[0]] if found else None

    def unreached(self, connected_to: str = "") -> tuple[str, ...]:
        """Return the incarnations of those with which this node cannot be in a round.

        Args:
            connected_to: the one whose hub is told so, and is reached therefore.
        """
        with self._lock:
            counting = {
                peer
                for peer, way in self._gaps
                if (way not in _OF_WORKERS or self.in_doubt or (peer, way) in self._proven)
                and not (way == "hub" and peer == connected_to)
            }
        return tuple(sorted(counting))

    def marked(self, me: Member, connected_to: str = "") -> Member:
        """Return this node with what it cannot reach, and the newest gaps in words.

        Args:
            me: this node.
            connected_to: see :meth:`unreached`.
        """
        unreached = self.unreached(connected_to)
        if unreached == me.unreached:
            return me
        with self._lock:
            told = [str(gap) for (peer, _), gap in self._gaps.items() if peer in unreached]
        return replace(me, unreached=unreached, reason="; ".join(told[-_MOST_TOLD:]))


def why_absent(member: Member, row: Member | None, me: Member, seconds: float) -> str:
    """Return, in words, why a member of the round has never come to the node of rank 0.

    Args:
        member: as it was sealed.
        row: as it is now, ``None`` where that is not known.
        me: the node of rank 0.
        seconds: that the member was given.
    """
    if row is None or row.incarnation != member.incarnation or not row.reason:
        here = place(me.host, me.hub_port)
        return f"{member.node} ({member.host}) did not reach {me.node} ({here}) within {seconds:g} s"
    gaps = row.reason.split("; ")
    return next((gap for gap in gaps if f" cannot reach {me.node} (" in gap), gaps[-1])
