"""The hub of a node, to which the members of its round and waiting nodes connect.

Every node listens on one port for as long as it lives. During a round all members, rank 0 included, are connected to
the hub of rank 0's node, with heartbeats in both directions. A member whose connection breaks is lost at once, a silent
one after ``heartbeat_timeout``. Nodes that are not members connect too: rank 0 makes room for those that wait beside
the round, those that wait for an open round are sent which of them should seal it, and all receive each change.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from azureml_elastic.ipc import Connection, Peer
from azureml_elastic.ipc.agent_messages import BroadcastBody
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.events import FromMember
from azureml_elastic.node.core.hub_state import CloseLink, HubAction, HubState, HubView, Send, SendAll
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.link import AgentMessage, Membership

_LOG = logging.getLogger(__name__)


class Hub:
    """The server of one node. :class:`HubState` decides; this class reads, sends and closes. Thread-safe.

    Args:
        context: settings; ``queue`` gets the reports of members, and wakes when the view has changed.
        listener: listening socket, which the hub owns from now on.
        membership: the round that this node has joined last.

    Attributes:
        port: port on which the hub listens.
    """

    def __init__(self, context: Context, listener: socket.socket, membership: Membership) -> None:
        self._context = context
        self._membership = membership
        self._lock = threading.Lock()
        self._state = HubState(context.limits, context.timings, context.clock(), context.silence)
        self._links = itertools.count()
        self._connections: dict[int, Connection] = {}
        self.port: int = listener.getsockname()[1]
        with self._lock:  # the first tick may come before this constructor has returned
            self._server = context.runtime.serve(
                listener,
                self._on_message,
                self._on_close,
                self._on_tick,
                tick=context.silence.tick,
                authenticator=context.authenticator,
            )

    def enter(self, round_: Round) -> None:
        """Serve a sealed round in which this node is rank 0, instead of the one before."""
        with self._lock:
            actions = self._state.enter(round_, self._context.clock())
        self._perform(actions)

    def add_own_candidacy(self, round_: Round, me: Member) -> None:
        """Add this node itself as a candidate of an open round."""
        with self._lock:
            actions = self._state.add_own(round_, me)
        self._perform(actions)

    def should_seal(self) -> bool:
        """Return whether this node is among the first candidates, by what this hub has received."""
        with self._lock:
            return self._state.should_seal()

    def take_read_request(self) -> bool:
        """Return, once, whether this hub has received that there is a newer round, which this node must read."""
        with self._lock:
            return self._state.take_read_request()

    def candidates(self) -> list[Member]:
        """Return the rows with which waiting nodes want to be in an open round."""
        with self._lock:
            return self._state.watchers.candidates()

    def publish(self, round_: Round) -> None:
        """Send a version of the row to all connected nodes, unless an equal or newer one was sent."""
        with self._lock:
            actions = self._state.publish(round_)
        self._perform(actions)

    def request_read(self) -> None:
        """Have all connected nodes read the round's row."""
        self._perform([SendAll(messages.RoundChanged(None))])

    def broadcast(self, body: BroadcastBody) -> None:
        """Send a message of this node's agent to the agents of all members."""
        with self._lock:
            actions = self._state.to_members(messages.Broadcast(body))
        self._perform(actions)

    def view(self) -> HubView:
        """Return the state of the round."""
        with self._lock:
            return self._state.view(self._context.clock())

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()

    def _on_message(self, connection: Connection, fields: Mapping[str, Any]) -> None:
        message = messages.CODEC.receive(connection, fields)
        match message:
            case None:
                return
            case messages.Beat():
                self._context.silence.learn(message.pause, self._context.clock())
                return
            case messages.LeaderQuery():
                _send(connection, messages.LeaderAnswer(self._membership.reached_leader(message.round)))
                return
            case messages.ShardOffer():
                self._context.surroundings.receive_shard(connection, message.shard)
                return
            case messages.RoundChanged(round=None):
                self.request_read()
            case messages.RoundChanged(round=Round() as round_):
                accepted = self._context.latest.accept(round_)
                with self._lock:
                    if not accepted:
                        self._state.request_read()
                    actions = self._state.publish(round_)  # each node decides by itself whether it must read the row
                self._perform(actions)
            case _:
                self._on_state(connection, message)
        self._context.queue.wake()

    def _on_state(self, connection: Connection, message: messages.Message) -> None:
        """Process what a node says of itself or of its round."""
        peer = _identity(connection)
        actions: list[HubAction] = []
        with self._lock:
            link = self._link(connection)
            member = self._state.member_of(link)
            match message:
                case messages.MemberHello():
                    now = self._context.clock()
                    actions = self._state.greeted(link, peer.name, peer.incarnation, message.round, now)
                case messages.Watch():
                    actions = self._state.watching(link, peer.name, peer.incarnation, message, self._context.clock())
                case messages.Done():
                    actions = self._state.done(link)
                case messages.Reached() if member is not None:
                    self._state.watchers.reached(message.incarnation, member[0])
                case messages.Report() if member is not None:
                    name, number = member
                    self._context.queue.post(AgentMessage(number, FromMember(name, message.body)))
        self._perform(actions)

    def _on_close(self, connection: Connection) -> None:
        with self._lock:
            link = self._link(connection)
            actions = self._state.closed(link, self._context.clock())
            del self._connections[link]
        self._perform_and_wake(actions)

    def _on_tick(self) -> None:
        with self._lock:
            last_received = {link: connection.last_received for link, connection in self._connections.items()}
            actions = self._state.ticked(self._context.clock(), last_received)
        self._perform([SendAll(messages.Beat(self._context.silence.pause))])
        self._perform_and_wake(actions)

    def _link(self, connection: Connection) -> int:
        """Return the number of a connection."""
        link: int | None = connection.state.get("link")
        if link is None:
            connection.state["link"] = link = next(self._links)
            self._connections[link] = connection
        return link

    def _perform_and_wake(self, actions: list[HubAction] | None) -> None:
        if actions is not None:
            self._perform(actions)
            self._context.queue.wake()

    def _perform(self, actions: Iterable[HubAction]) -> None:
        """Send and close, outside of the lock: encoding a round for a thousand nodes takes time."""
        # A connection may have ended since the decision, which its own callback tells the state.
        for action in actions:
            match action:
                case SendAll(message):
                    if self._server.connections:
                        self._server.broadcast(messages.CODEC.encode(message))
                case Send(link, message):
                    if (connection := self._connections.get(link)) is not None:
                        _send(connection, message)
                case CloseLink(link, reason):
                    if (connection := self._connections.get(link)) is not None:
                        connection.close(reason)


def _identity(connection: Connection) -> Peer:
    assert connection.identity is not None, "the connection's handshake is complete"
    return connection.identity


def _send(connection: Connection, message: messages.Message) -> None:
    connection.send(messages.CODEC.encode(message))
