"""The hub of a node, to which the members of its round and waiting nodes connect.

Every node listens on one port for as long as it lives. During a round all members, rank 0 included, are connected to
the hub of rank 0's node, with heartbeats in both directions. A member whose connection breaks is lost at once, a silent
one after ``heartbeat_timeout``. Nodes that are not members connect too: rank 0 makes room for those that wait beside
the round, those that wait for an open round are sent which of them should seal it, and all receive each change.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from azureml_elastic.ipc import Connection, Peer
from azureml_elastic.ipc.agent_messages import BroadcastBody
from azureml_elastic.ipc.shards import ShardDescription
from azureml_elastic.node.core.pauses import PauseDetector
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub import messages
from azureml_elastic.node.rendezvous.hub.inbox import FromMember
from azureml_elastic.node.rendezvous.hub.state import HubState, HubView
from azureml_elastic.node.rendezvous.hub.watchers import Watcher

__all__ = ["Hub"]

_LOG = logging.getLogger(__name__)

_WATCHER_TIMEOUT_FACTOR = 3
"""Heartbeat timeouts after which a silent waiting node is dropped: nothing depends on its answers."""


class Hub:
    """The server of one node.

    Args:
        context: settings; ``wake`` is set when the view has changed, and reports are put into ``inbox``.
        listener: listening socket, which the hub owns from now on.
        reached_leader: function that returns whether this node has reached rank 0's hub of a round, ``None`` while
            it still tries.
        receive_shard: callback that takes over a connection whose client offers a snapshot shard; ``None`` refuses.

    Attributes:
        port: port on which the hub listens.
    """

    def __init__(
        self,
        context: Context,
        listener: socket.socket,
        reached_leader: Callable[[int], bool | None] = lambda _: None,
        receive_shard: Callable[[Connection, ShardDescription], None] | None = None,
    ) -> None:
        self._context = context
        self._receive_shard = receive_shard
        self._reached_leader = reached_leader
        self._lock = threading.Lock()
        self._state = HubState(context.clock)
        self._must_read = False
        self._round: Round | None = None
        self._entered = 0.0
        self._members: dict[str, Connection] = {}
        self._lost: set[str] = set()
        self._absent: set[str] = set()
        self._done: set[str] = set()
        self._was_given_up = False
        self._pauses = PauseDetector(context.clock(), context.tick)
        self.port: int = listener.getsockname()[1]
        with self._lock:  # the first tick may come before this constructor has returned
            self._server = context.runtime.serve(
                listener, self._on_message, self._on_close, self._on_tick, context.tick, context.authenticator
            )

    def enter(self, round_: Round) -> None:
        """Serve a sealed round in which this node is rank 0, instead of the one before."""
        with self._lock:
            self._round = round_
            self._entered = self._context.clock()
            self._lost, self._absent, self._done, self._was_given_up = set(), set(), set(), False
            unreachable = self._state.watchers.enter(round_)
            self._members = {
                name: connection
                for name, connection in self._members.items()
                if connection.state.get("round") == round_.number and _is_member(round_, connection)
            }
        self.publish(round_)
        for connection, names in unreachable:
            _send(connection, messages.SealPosition(unreachable_from=names))

    def add_own_candidacy(self, round_: Round, me: Member) -> None:
        """Add this node itself as a candidate of an open round."""
        with self._lock:
            self._state.add_own(round_, me)
        self._send_positions()

    def should_seal(self) -> bool:
        """Return whether this node is among the first candidates, by what this hub has received."""
        with self._lock:
            return self._state.should_seal()

    def take_read_request(self) -> bool:
        """Return, once, whether this hub has received that there is a newer round, which this node must read."""
        with self._lock:
            request, self._must_read = self._must_read, False
            return request

    def candidates(self) -> list[Member]:
        """Return the rows with which waiting nodes want to be in an open round."""
        with self._lock:
            return self._state.watchers.candidates()

    def publish(self, round_: Round) -> None:
        """Send a version of the row to all connected nodes, unless an equal or newer one was sent."""
        with self._lock:
            is_new = self._state.publish(round_)
        if is_new:
            self._broadcast_change(round_)

    def request_read(self) -> None:
        """Have all connected nodes read the round's row."""
        self._broadcast_change(None)

    def broadcast(self, body: BroadcastBody) -> None:
        """Send a message of this node's agent to the agents of all members."""
        self._send_members(messages.Broadcast(body))

    def view(self) -> HubView:
        """Return the state of the round."""
        with self._lock:
            # Members that waited here while the round was open may not have sent their greeting yet.
            present = (self._members.keys() | self._member_names()) - self._lost
            waiting_since = self._state.watchers.waiting(present, self._context.limits.quarantine)
            return HubView(frozenset(self._lost), frozenset(self._absent), waiting_since, self._was_given_up)

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()

    def _on_message(self, connection: Connection, fields: Mapping[str, Any]) -> None:
        message = messages.CODEC.receive(connection, fields)
        if message is None or isinstance(message, messages.Beat):
            return
        member, number = connection.state.get("member"), connection.state.get("round", 0)
        match message:
            case messages.LeaderQuery():
                _send(connection, messages.LeaderAnswer(self._reached_leader(message.round)))
                return
            case messages.ShardOffer():
                if self._receive_shard is None:
                    connection.close("this node holds no shards")
                else:
                    self._receive_shard(connection, message.shard)
                return
            case messages.Hello():
                self._on_hello(connection, message)
            case messages.Watch():
                self._on_watch(connection, message)
            case messages.RoundChanged(round=None):
                self.request_read()
            case messages.RoundChanged(round=Round() as round_):
                if not self._context.latest.accept(round_):
                    with self._lock:
                        self._must_read = True
                self.publish(round_)  # each node decides by itself whether it has to read the row
            case messages.Unreachable() if member is not None:
                _LOG.warning("%s.", message.text)
            case messages.Reached() if member is not None:
                with self._lock:
                    self._state.watchers.reached(message.incarnation, member)
            case messages.Report() if member is not None:
                self._context.inbox.put(FromMember(number, member, message.body))
            case messages.Done() if member is not None:
                self._on_done(member, number)
        self._context.wake.set()

    def _on_hello(self, connection: Connection, hello: messages.Hello) -> None:
        peer = _identity(connection)
        with self._lock:
            if (
                self._round is not None
                and hello.round == self._round.number
                and not _is_member(self._round, connection)
            ):
                connection.close(f"{peer.name} is not a member of round {hello.round} in this incarnation")
                return
            connection.state.update(member=peer.name, node=peer.name, round=hello.round)
            if self._round is None or hello.round >= self._round.number:
                self._members[peer.name] = connection
                self._state.watchers.remove(peer.name)
            seen = Round(hello.round, "sealed")
            missed, unknown = self._state.newer_than(seen), self._state.is_first_sign_of(seen)
            self._must_read = self._must_read or unknown
        # From here on the member receives every change; this is what it may have missed.
        if missed is not None:
            _send(connection, messages.RoundChanged(missed))
        if unknown:
            self.request_read()  # the node that has sealed the round has not sent it here, or its message was lost

    def _on_watch(self, connection: Connection, watch: messages.Watch) -> None:
        peer = _identity(connection)
        candidacy = watch.candidacy
        if candidacy is not None and (candidacy.node, candidacy.incarnation) != (peer.name, peer.incarnation):
            connection.close(f"{peer.name} wants to be a candidate in the name of {candidacy.node}")
            return
        connection.state.update(member=None, node=peer.name, position=None)
        watcher = Watcher(
            connection,
            self._context.clock(),
            beside=0 if watch.is_open else watch.round,
            candidacy=candidacy,
            strikes=watch.strikes,
            incarnation=peer.incarnation,
            unreached=frozenset(watch.unreached),
        )
        with self._lock:
            self._state.watch(peer.name, watcher)
            missed = self._state.newer_than(Round(watch.round, "open" if watch.is_open else "sealed"))
            unreachable_from = self._state.watchers.unreached_by(watcher)
        if missed is not None:
            _send(connection, messages.RoundChanged(missed))
        # Sent even if empty: any answer shows the node that this hub serves it.
        _send(connection, messages.SealPosition(unreachable_from=unreachable_from))
        self._send_positions()

    def _on_done(self, member: str, number: int) -> None:
        with self._lock:
            if self._round is None or number != self._round.number:
                return  # a message of an older round
            self._done.add(member)
            all_done = self._member_names() <= self._done
        if all_done:
            self._send_members(messages.AllDone())

    def _on_close(self, connection: Connection) -> None:
        node = connection.state.get("node", "")
        with self._lock:
            queue_changed = self._state.leave(node, connection)
        if queue_changed:
            self._send_positions()
            self._context.wake.set()
        with self._lock:
            if self._members.get(node) is not connection:
                return
            del self._members[node]
            if self._round is None or connection.state.get("round") != self._round.number:
                return
            # Then the member lives, and forms the next round without this node.
            given_up = node not in self._done and self._pauses.was_given_up(
                self._context.heartbeat_timeout, self._context.clock()
            )
            self._was_given_up = self._was_given_up or given_up
        if given_up:
            self._context.wake.set()
        else:
            self._lose([node])

    def _on_tick(self) -> None:
        now = self._context.clock()
        self._pauses.tick(now)
        silence = functools.partial(self._pauses.silence, now=now)
        timeout = self._context.heartbeat_timeout
        join_timeout = self._context.timings.join_timeout.total_seconds()
        with self._lock:
            server, watchers = self._server, self._state.watchers.nodes.values()
            connections = [watcher.connection for watcher in watchers]
            gone = [link for link in connections if silence(link.last_received) > _WATCHER_TIMEOUT_FACTOR * timeout]
        server.broadcast(messages.CODEC.encode(messages.Beat()))
        for connection in gone:
            connection.close("silent")
        with self._lock:
            if self._round is None:
                return
            silent = [name for name, link in self._members.items() if silence(link.last_received) > timeout]
            # A member that still waits here is alive, but has not received the seal yet. A node that has died may have
            # returned under its name, which is no sign of the process that was sealed in.
            here = self._members.keys() | self._state.watchers.waiting_members()
            absent = sorted(self._member_names() - here) if silence(self._entered) > join_timeout else []
            broken = [self._members[name] for name in silent]
        self._lose(silent + absent, absent)
        for connection in broken:
            connection.close()

    def _lose(self, nodes: Iterable[str], absent: Collection[str] = ()) -> None:
        with self._lock:
            lost = tuple(node for node in nodes if node not in self._lost | self._done)
            never_connected = tuple(node for node in lost if node in absent)
            self._lost.update(lost)
            self._absent.update(never_connected)
        if lost:
            self._send_members(messages.Lost(lost, never_connected))
            self._context.wake.set()

    def _send_positions(self) -> None:
        with self._lock:
            positions = self._state.take_positions()
        for connection, position in positions:
            _send(connection, messages.SealPosition(position))

    def _send_members(self, message: messages.Message) -> None:
        with self._lock:
            number = self._round.number if self._round else 0
            connections = [link for link in self._members.values() if link.state["round"] == number]
        for connection in connections:
            _send(connection, message)

    def _broadcast_change(self, round_: Round | None) -> None:
        if self._server.connections:
            self._server.broadcast(messages.CODEC.encode(messages.RoundChanged(round_)))

    def _member_names(self) -> set[str]:
        return {member.node for member in self._round.members} if self._round else set()


def _identity(connection: Connection) -> Peer:
    assert connection.identity is not None, "the connection's handshake is complete"
    return connection.identity


def _is_member(round_: Round, connection: Connection) -> bool:
    peer = _identity(connection)
    return round_.rank_of(peer.name, peer.incarnation) is not None


def _send(connection: Connection, message: messages.Message) -> None:
    connection.send(messages.CODEC.encode(message))
