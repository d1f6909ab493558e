"""A node's connection to a hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.ipc import Connection, MessageClient, Peer
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.join_events import HubSent, LinkEnded
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.training_events import FromLeader
from azureml_elastic.node.rendezvous.context import Context

__all__ = ["Link"]


_ESTABLISHED_SECONDS = 0.5
"""Time in which a hub knows a new member, so that it notices at once if the member dies next; a frozen hub does not."""


class Link:
    """A connection to a hub, with heartbeats in both directions.

    Args:
        context: settings; ``received`` gets what the hub sends and the end of the connection, and ``inbox`` broadcasts.
        member: node of the hub.
        greeting: first message, ``Hello`` or ``Watch``.
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
        greeting: messages.Hello | messages.Watch,
        timeout: float | None = None,
    ) -> None:
        self._context = context
        self._pauses = PauseDetector(context.clock(), context.tick)
        self._last_received = context.clock()
        self._beats = BeatWatch(context.silence, self._pauses, self._last_received)
        self._round = greeting.round
        self._has_answered = False
        self.broken = False
        self._client: MessageClient | None = None  # the first tick may come before it is set
        seconds = context.heartbeat_timeout if timeout is None else timeout
        self._client = context.runtime.dial(
            (member.host, member.hub_port),
            self._on_message,
            self._on_close,
            self._on_tick,
            context.tick,
            seconds,
            context.authenticator,
            Peer(member.node, member.incarnation),
        )
        self.send(greeting)
        if isinstance(greeting, messages.Hello):
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
            if self._has_answered:
                return
        match message:
            case messages.Broadcast():
                self._context.inbox.put(self._round, FromLeader(message.body))
            case messages.RoundChanged(round=Round() as round_) if not self._context.latest.accept(round_):
                self._put(HubSent(message))
                self._put(HubSent(messages.RoundChanged(None)))
            case _:
                self._put(HubSent(message))
        self._has_answered = True
        self._context.wake.set()

    def _on_close(self, connection: Connection) -> None:
        now = self._context.clock()
        was_given_up = self._pauses.was_given_up(self._context.silence.smallest(now), now)
        self.broken = True
        self._put(LinkEnded(connection.refused, was_given_up))
        self._context.wake.set()

    def _put(self, event: HubSent | LinkEnded) -> None:
        self._context.received.append((self, event))

    def _on_tick(self) -> None:
        if self._client is None:
            return
        now = self._context.clock()
        self._pauses.tick(now)
        self.send(messages.Beat(self._context.silence.pause))
        if self._beats.is_lost(self._last_received, now):
            self._client.connection.close("the hub is silent")
