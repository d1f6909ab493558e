"""A node's connection to a hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from azureml_elastic.ipc import Connection, MessageClient, Peer
from azureml_elastic.node.core import messages
from azureml_elastic.node.core.pauses import BeatWatch, PauseDetector
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.inbox import FromLeader

__all__ = ["Link"]


_ESTABLISHED_SECONDS = 0.5
"""Time in which a hub knows a new member, so that it notices at once if the member dies next; a frozen hub does not."""


class Link:
    """A connection to a hub, with heartbeats in both directions.

    Args:
        context: settings; ``wake`` is set when something has changed, and broadcasts are put into ``inbox``.
        member: node of the hub.
        greeting: first message, ``Hello`` or ``Watch``.
        timeout: seconds to connect in; ``None`` for the heartbeat timeout.

    Attributes:
        answered: whether the hub has sent anything yet.
        broken: whether the connection has ended other than by :meth:`close`.
        refused: whether it has ended because the hub does not hold this node's key of the run.
        was_given_up: whether the connection has ended because this process itself did not run for so long that the hub
            has given it up.
        must_read: whether the round has changed and the hub did not send to what; reset by the owner.
        received: newest version of the round's row that the hub has sent, ``None`` before the first.
        position: position among the candidates that should seal; see ``SealPosition``.
        called: whether the hub has sent a position again; reset by the owner.
        unreachable_from: members of the hub's round that cannot reach this node.
        lost: members that the hub has reported as lost.
        absent: those of the lost members that have never connected to the hub.
        all_done: whether the workers of all members have succeeded.

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
        self.answered = False
        self.broken = False
        self.refused = False
        self.was_given_up = False
        self.must_read = False
        self.received: Round | None = None
        self.position: int | None = None
        self.called = False
        self.unreachable_from: tuple[str, ...] = ()
        self.lost: frozenset[str] = frozenset()
        self.absent: frozenset[str] = frozenset()
        self.all_done = False
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

    def send(self, message: messages.Message) -> None:
        """Send to the hub; does nothing when the connection is broken."""
        if self._client is not None:
            self._client.send(messages.CODEC.encode(message))

    def take_read_request(self) -> bool:
        """Return, once, whether the hub has sent that the row has changed, but not to what."""
        request, self.must_read = self.must_read, False
        return request

    def close(self) -> None:
        """End the connection: a member whose workers are not done is lost to the round."""
        if self._client is not None:
            self._client.close()

    def _on_message(self, connection: Connection, fields: Mapping[str, Any]) -> None:
        self._last_received = self._context.clock()
        self.answered = True
        message = messages.CODEC.receive(connection, fields)
        if message is None:
            return
        if isinstance(message, messages.Beat):
            self._context.silence.learn(message.pause, self._last_received)
            return
        match message:
            case messages.RoundChanged(round=None):
                self.must_read = True
            case messages.RoundChanged(round=Round() as round_):
                if round_.is_newer_than(self.received):
                    self.received = round_
                    self.must_read = self.must_read or not self._context.latest.accept(round_)
            case messages.SealPosition():
                self.position = message.position
                self.called = message.position is not None
                self.unreachable_from = message.unreachable_from
            case messages.Lost():
                self.absent |= {*message.absent}
                self.lost |= {*message.nodes}
            case messages.AllDone():
                self.all_done = True
            case messages.Broadcast():
                self._context.inbox.put(FromLeader(self._round, message.body))
        self._context.wake.set()

    def _on_close(self, connection: Connection) -> None:
        now = self._context.clock()
        self.was_given_up = self._pauses.was_given_up(self._context.silence.smallest(now), now)
        self.refused = connection.refused
        self.broken = True
        self._context.wake.set()

    def _on_tick(self) -> None:
        if self._client is None:
            return
        now = self._context.clock()
        self._pauses.tick(now)
        self.send(messages.Beat(self._context.silence.pause))
        if self._beats.is_lost(self._last_received, now):
            self._client.connection.close("the hub is silent")
