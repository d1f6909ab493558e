"""Which nodes reach each other: records of unreachable pairs, and the majority's view of rank 0's node.

Where a firewall or a missing route blocks TCP between two nodes, connections time out and the run would seem to hang.
Each such :class:`UnreachablePair` is therefore logged, written to the ledger and sent to the other nodes; the selection
of members leaves such nodes out.

**The majority's view of whether rank 0's node can be reached.** Where rank 0's node does not answer, either it is gone
or cut off, and the round must go on without it; or this node is cut off, and the round must go on without this one. A
node that decided that alone could end a round that works.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from azureml_elastic.ipc import Connection, Peer
from azureml_elastic.node.core.messages import CODEC, LeaderAnswer, LeaderQuery
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.host.addresses import format_address
from azureml_elastic.node.rendezvous.context import Context

_LOG = logging.getLogger(__name__)

Target = Literal["hub", "store", "member"]
"""What could not be reached: a hub that this node needs, the store of a round, or a member to which workers connect."""

_LOG_INTERVAL_SECONDS = 300.0
"""Time after which the same pair is reported again."""

_MAX_PAIRS = 16
"""Largest number of pairs that are kept, the newest ones."""

_MAX_REASONS = 2
"""Largest number of pairs that are described in this node's row."""

_ANSWERS = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors that prove that the machine itself has answered."""


@dataclass(frozen=True)
class UnreachablePair:
    """A node and a peer that it cannot reach.

    Args:
        purpose: description of what the port is needed for.
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
        """Host and port that cannot be reached."""
        return format_address(self.peer_host, self.port)

    def __str__(self) -> str:
        return f"{self.node} ({self.host}) cannot reach {self.peer} ({self.address}), {self.purpose}: {self.error}"


def is_unreachable(error: OSError) -> bool:
    """Return whether an error shows that a machine cannot be reached, rather than that it refuses."""
    return not isinstance(error, _ANSWERS)


def describe_error(error: OSError, seconds: float) -> str:
    """Return a description of why a connection with a timeout of ``seconds`` failed."""
    if isinstance(error, TimeoutError):
        return f"connection timed out after {seconds:g} s"
    if isinstance(error, socket.gaierror):
        return f"its name has no address ({error.strerror})"
    return error.strerror or str(error)


def describe_absence(member: Member, row: Member | None, leader: Member, seconds: float) -> str:
    """Return a description of why a member has never connected to the node of rank 0.

    Args:
        row: its present row, ``None`` if that is not known.
        seconds: time that the member had to connect.
    """
    if row is None or not row.reason:
        hub = format_address(leader.host, leader.hub_port)
        return f"{member.node} ({member.host}) did not reach {leader.node} ({hub}) within {seconds:g} s"
    reasons = row.reason.split("; ")
    return next((reason for reason in reasons if f" cannot reach {leader.node} (" in reason), reasons[-1])


class Reachability:
    """The pairs of this node and others that it cannot reach. Thread-safe.

    Args:
        host: address under which the others reach it.
        clock: clock in monotonic seconds.
        ports: first and last port of the run, ``None`` for any.
        report: callback with each pair that is reported.

    Attributes:
        advice: text that says what to do about an unreachable pair.
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
        self._pairs: dict[tuple[str, Target], UnreachablePair] = {}
        self._reported: dict[tuple[str, Target], float] = {}
        wanted = f"TCP ports {ports[0]}-{ports[1]}" if ports else "all TCP ports"
        self.advice = (
            f"Nodes in different clusters need one virtual network; open {wanted} between them, or set advertise= or "
            "port_range= of TableRendezvous (docs/how-to/nodes.md)."
        )
        self._advice_on_workers = (
            "NCCL and gloo take any port of net.ipv4.ip_local_port_range, whatever port_range= says: open these ports "
            "between the nodes, too, or narrow them on the nodes (docs/how-to/nodes.md)."
        )

    def failed(
        self,
        peer: Member,
        purpose: str,
        error: OSError,
        seconds: float,
        *,
        target: Target = "hub",
        port: int | None = None,
    ) -> UnreachablePair:
        """Record a peer that cannot be reached, and report it unless that was done recently.

        Args:
            peer: node that cannot be reached.
            purpose: description of what the port is needed for.
            error: error for which :func:`is_unreachable` is true.
            seconds: timeout of the connection.
            target: what could not be reached.
            port: its port; that of the hub by default.
        """
        port = peer.hub_port if port is None else port
        error_text = describe_error(error, seconds)
        pair = UnreachablePair(self._node, self._host, peer.node, peer.host, port, purpose, error_text)
        key, now = (peer.incarnation, target), self._clock()
        with self._lock:
            # The newest pair is the last one: the first ones are dropped, and the last ones described.
            self._pairs.pop(key, None)
            self._pairs[key] = pair
            while len(self._pairs) > _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            is_due = now - self._reported.get(key, -_LOG_INTERVAL_SECONDS) >= _LOG_INTERVAL_SECONDS
            if is_due:
                self._reported[key] = now
        if is_due:
            # Not under the lock: the report goes to the ledger and to rank 0's hub.
            _LOG.warning("%s. %s", pair, self._advice_on_workers if port == peer.data_port else self.advice)
            self._report(pair)
        return pair

    def reached(self, incarnation: str, target: Target) -> bool:
        """Record a successful connection; return whether the peer was recorded as unreachable before."""
        with self._lock:
            pair = self._pairs.pop((incarnation, target), None)
            if pair is not None:
                self._reported.pop((incarnation, target), None)
        if pair is not None:
            _LOG.info("%s can be reached from here again (%s).", pair.peer, pair.address)
        return pair is not None

    def is_hub_unreachable(self, incarnation: str) -> bool:
        """Return whether the last attempt to reach this node's hub failed."""
        with self._lock:
            return (incarnation, "hub") in self._pairs

    def pairs(self) -> dict[tuple[str, Target], UnreachablePair]:
        """Return all pairs, by the peer's incarnation and what of it cannot be reached."""
        with self._lock:
            return dict(self._pairs)

    def unreached(self) -> tuple[str, ...]:
        """Return the incarnations of the nodes with which this node cannot be in a round."""
        with self._lock:
            return tuple(sorted({peer for peer, _ in self._pairs}))

    def marked(self, me: Member) -> Member:
        """Return this node's row with the nodes that it cannot reach, and a description of the newest ones."""
        unreached = self.unreached()
        if unreached == me.unreached:
            return me
        with self._lock:
            reasons = [str(pair) for (peer, _), pair in self._pairs.items() if peer in unreached]
        return replace(me, unreached=unreached, reason="; ".join(reasons[-_MAX_REASONS:]))


_MAX_QUERIES = 8
"""Largest number of members that are queried."""

_TIMEOUT_SECONDS = 1.2
"""Long enough for TCP's second attempt, which follows the first after a second."""


def query_members(context: Context, round_: Round, node: str) -> list[bool | None]:
    """Query members of a sealed round whether they have reached rank 0's node.

    Args:
        node: name of this node, which is not queried.

    Returns:
        The answers, ``None`` for each member that did not answer.
    """
    runtime = context.runtime
    others = [member for member in round_.members[1:] if member.node != node][:_MAX_QUERIES]
    answers: list[bool | None] = [None] * len(others)

    def query(index: int, member: Member) -> None:
        answered = runtime.event()

        def on_message(connection: Connection, fields: Mapping[str, Any]) -> None:
            message = CODEC.receive(connection, fields)
            if isinstance(message, LeaderAnswer):
                answers[index] = message.reached
                answered.set()

        def on_close(_: Connection) -> None:
            answered.set()

        try:
            client = runtime.dial(
                (member.host, member.hub_port),
                on_message,
                on_close,
                timeout=_TIMEOUT_SECONDS,
                authenticator=context.authenticator,
                to=Peer(member.node, member.incarnation),
            )
        except OSError:
            return
        client.send(CODEC.encode(LeaderQuery(round_.number)))
        answered.wait(_TIMEOUT_SECONDS)
        client.close()

    threads = [runtime.thread(partial(query, *each), "quorum check") for each in enumerate(others)]
    for thread in threads:
        thread.start()
    until = runtime.clock() + _TIMEOUT_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - runtime.clock()))
    # A copy: a thread that is late still writes to the other one.
    return list(answers)
