"""A node's connections to hubs: a member's to that of rank 0's node, with its assignment, and a waiting node's."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from azureml_elastic.ipc import Connection, MessageClient, Peer
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.events import FromLeader, FromMember, HubSent, LinkEnded
from azureml_elastic.node.core.messages import MemberHello, Message, Watch
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.reachability import Reachability, is_unreachable

_ESTABLISHED_SECONDS = 0.5
"""Time in which a hub knows a new member, so that it notices at once if the member dies next; a frozen hub does not."""


@dataclass(frozen=True)
class AgentMessage:
    """A message of another agent, in the queue of this one.

    Args:
        number: number of the round in which it was sent.
    """

    number: int
    message: FromLeader | FromMember


@dataclass(frozen=True)
class FromLink:
    """What has come on a connection to a hub, in the queue of this node's agent."""

    link: Link
    event: HubSent | LinkEnded


class Link:
    """A connection to a hub, with heartbeats in both directions.

    Args:
        context: settings; ``queue`` gets what the hub sends, and the end of the connection.
        greeting: first message, ``MemberHello`` or ``Watch``.
        timeout: seconds to connect in; ``None`` for the heartbeat timeout.

    Attributes:
        broken: whether the connection has ended other than by :meth:`close`.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        context: Context,
        member: Member,
        greeting: messages.MemberHello | messages.Watch,
        timeout: float | None = None,
    ) -> None:
        self._context = context
        self._pauses = PauseDetector(context.clock(), context.silence.tick)
        self._last_received = context.clock()
        self._beats = BeatWatch(context.silence, self._pauses, self._last_received)
        self._round = greeting.round
        self._has_answered = False
        self.broken = False
        self._client: MessageClient | None = None  # the first tick may come before it is set
        seconds = context.silence.timeout if timeout is None else timeout
        self._client = context.runtime.dial(
            (member.host, member.hub_port),
            self._on_message,
            self._on_close,
            self._on_tick,
            tick=context.silence.tick,
            timeout=seconds,
            authenticator=context.authenticator,
            to=Peer(member.node, member.incarnation),
        )
        self.send(greeting)
        if isinstance(greeting, messages.MemberHello):
            self._client.connection.wait_established(_ESTABLISHED_SECONDS)

    @property
    def refused(self) -> bool:
        """Whether the hub does not hold this node's key of the run."""
        return self._client is not None and self._client.connection.refused

    def send(self, message: messages.Message) -> None:
        """Send to the hub; does nothing when the connection is broken."""
        if self._client is not None:
            self._client.send(messages.CODEC.encode(message))

    def close(self) -> None:
        """End the connection: a member whose workers are not done is lost to the round."""
        if self._client is not None:
            self._client.close()

    def _on_message(self, connection: Connection, fields: Mapping[str, Any]) -> None:
        self._last_received = self._context.clock()
        message = messages.CODEC.receive(connection, fields)
        if message is None:
            return
        if isinstance(message, messages.Beat):
            self._context.silence.learn(message.pause, self._last_received)
            # The first beat is passed on like an answer: it shows that the process of the hub runs.
            if self._has_answered:
                return
        match message:
            case messages.Broadcast():
                self._context.queue.post(AgentMessage(self._round, FromLeader(message.body)))
            case messages.RoundChanged(round=Round() as round_) if not self._context.latest.accept(round_):
                self._put(HubSent(message))
                # The version itself is no reason to act, but to read the row; it is passed on so that it is not sent
                # back.
                self._put(HubSent(messages.RoundChanged(None)))
            case _:
                self._put(HubSent(message))
        self._has_answered = True

    def _on_close(self, connection: Connection) -> None:
        now = self._context.clock()
        was_given_up = self._pauses.was_given_up(self._context.silence.smallest(now), now)
        self.broken = True
        self._put(LinkEnded(connection.refused, was_given_up))

    def _put(self, event: HubSent | LinkEnded) -> None:
        self._context.queue.post(FromLink(self, event))

    def _on_tick(self) -> None:
        if self._client is None:
            return
        now = self._context.clock()
        self._pauses.tick(now)
        self.send(messages.Beat(self._context.silence.pause))
        if self._beats.is_lost(self._last_received, now):
            self._client.connection.close("the hub is silent")


_LOG = logging.getLogger(__name__)

_SHORT_TIMEOUT_SECONDS = 1.2
"""Time to connect to a machine that did not answer before: enough for TCP's second attempt."""


@dataclass
class HubWatch:
    """A waiting node's connection to at most one hub. Not thread-safe.

    Args:
        reachability: receives hubs that cannot be reached.
    """

    context: Context
    reachability: Reachability
    link: Link | None = field(default=None, init=False)
    _incarnation: str = field(default="", init=False)

    def connect(self, to: Member, greeting: Watch, purpose: str, timeout: float | None = None) -> OSError | None:
        """Send a hub what this node waits for, on a new connection unless there is one to it.

        Args:
            greeting: what this node waits for.
            purpose: description of the hub's node for log messages.
            timeout: seconds to connect in, too short to conclude that the node cannot be reached; ``None`` for the
                heartbeat timeout.

        Returns:
            ``None`` if connected, else why not.
        """
        if self.link is not None and not self.link.broken and self._incarnation == to.incarnation:
            self.link.send(greeting)
            return None
        self.close()
        seconds = self.context.silence.timeout if timeout is None else timeout
        if self.reachability.is_hub_unreachable(to.incarnation):
            seconds = min(seconds, _SHORT_TIMEOUT_SECONDS)
        try:
            self.link, self._incarnation = Link(self.context, to, greeting, seconds), to.incarnation
        except OSError as error:
            if timeout is None and is_unreachable(error):
                self.reachability.failed(to, purpose, error, seconds)
            else:
                _LOG.info("The hub of %s cannot be reached: %s", to.node, error)
            return error
        self.reachability.reached(to.incarnation, "hub")
        return None

    def send(self, message: Message) -> None:
        """Send a message to the hub, if this node is connected to one."""
        if self.link is not None:
            self.link.send(message)

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()
            self.link = None


@dataclass(frozen=True)
class Assignment:
    """A node's rank in a sealed round.

    Args:
        listener: listening socket on which rank 0 must serve the round's store; ``None`` on other ranks.
    """

    round: Round
    rank: int
    listener: socket.socket | None

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the round's store."""
        first = self.round.members[0]
        return first.host, first.store_port

    @property
    def global_ranks(self) -> range:
        """Global ranks of the node's workers."""
        first = sum(member.slots for member in self.round.members[: self.rank])
        return range(first, first + self.round.members[self.rank].slots)


_CONNECT_SECONDS = 1.0
"""Time after which a node that still tries to connect to rank 0's hub reports that it cannot."""


class Membership:
    """Connection of a member to rank 0's hub. For the agent's thread, except for methods marked thread-safe."""

    def __init__(self, context: Context, machine: Node) -> None:
        self._context = context
        self._machine = machine
        self._listener: socket.socket | None = None
        self._link: Link | None = None
        self._failed_number = 0

    @property
    def assignment(self) -> Assignment:
        """The assignment in the round joined last."""
        machine = self._machine
        assert machine.round is not None, "no round was joined yet"
        return Assignment(machine.round, machine.rank, self._listener)

    @property
    def connected(self) -> bool:
        """Whether there is a :attr:`link`: false before the first round and after :meth:`disconnect`."""
        return self._link is not None

    @property
    def is_linked(self) -> bool:
        """Whether there is a connection to rank 0's hub that has not ended. Thread-safe."""
        link = self._link  # once: the agent's thread may disconnect meanwhile
        return link is not None and not link.broken

    @property
    def link(self) -> Link:
        """The connection to rank 0's hub."""
        assert self._link is not None, "this node is not connected to rank 0's hub"
        return self._link

    def enter(self, round_: Round, rank: int, listener: socket.socket, timeout: float | None = None) -> None:
        """Connect to rank 0's hub of a sealed round.

        Args:
            listener: listening socket for the round's store, which the assignment owns on rank 0.
            timeout: seconds to connect in; ``None`` for the heartbeat timeout.

        Raises:
            OSError: rank 0's hub cannot be reached.
        """
        self._listener = listener if rank == 0 else None
        first = round_.members[0]
        self.disconnect()
        try:
            self._link = Link(self._context, first, MemberHello(round_.number), timeout)
        except OSError:
            self._failed_number = round_.number
            raise

    def reached_leader(self, number: int) -> bool | None:
        """Return whether this node has reached rank 0's hub of a round, ``None`` if it still tries. Thread-safe."""
        link = self._link
        if self._machine.last_round != number or not number:
            return None
        if link is not None:
            return not link.broken
        seconds = self._context.clock() - self._machine.entered
        return False if number == self._failed_number or seconds > _CONNECT_SECONDS else None

    def send_to_leader(self, message: Message) -> None:
        """Send to rank 0's hub, if there is a connection to it. Thread-safe."""
        if (link := self._link) is not None:
            link.send(message)

    def disconnect(self) -> None:
        """End the connection to rank 0's hub, which reports this node as lost within milliseconds."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def leave(self) -> None:
        """End the connection and close the assignment's listener."""
        self.disconnect()
        if self._listener is not None:
            self._listener.close()  # without effect where the store has taken it over
