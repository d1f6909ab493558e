"""A node's connection to a hub."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import Connection, MessageClient
from azureml_elastic.node.rendezvous.hub.messages import (
    CODEC,
    AllDone,
    Beat,
    Broadcast,
    Lost,
    Message,
    Report,
    RoundChanged,
    SealPosition,
)
from azureml_elastic.node.rendezvous.hub.pause_detection import PauseDetector
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.round_codec import LatestRound

__all__ = ["Link"]


class Link:
    """A connection to a hub, with heartbeats in both directions.

    Args:
        address: host and port of the hub.
        greeting: first message, :``Hello`` or ``Watch``.
        timings: heartbeat interval and timeout.
        wake: callback from the link's thread when something has changed.
        runtime: clock and sockets.
        timeout: seconds to connect in; ``None`` for the heartbeat timeout.
        latest: receives each version of the round that the hub sends.

    Attributes:
        answered: whether the hub has sent anything yet.
        broken: whether the connection has ended other than by :meth:`close`.
        was_paused: whether this process itself did not run for longer than the heartbeat timeout, so that it was given
            up by the others, and not the hub by it.
        must_read: whether the round has changed and the hub did not send to what; reset by the owner.
        received: newest version of the round's row that the hub has sent, ``None`` before the first.
        position: position among the candidates that should seal; see ``SealPosition``.
        called: whether the hub has sent a position again; reset by the owner.
        unreachable_from: members of the hub's round that cannot reach this node.
        all_done: whether the workers of all members have succeeded.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        greeting: Message,
        timings: RendezvousTimings,
        wake: Callable[[], None],
        *,
        runtime: Runtime | None = None,
        timeout: float | None = None,
        latest: LatestRound | None = None,
    ) -> None:
        runtime = runtime or Runtime()
        self._wake = wake
        self._clock = runtime.clock
        self._latest = latest or LatestRound()
        self._lock = threading.Lock()
        tick = timings.heartbeat_interval.total_seconds() / 2
        self._timeout = timings.heartbeat_timeout.total_seconds()
        self._pauses = PauseDetector(self._clock, tick)
        self._last_received = self._clock()
        self._lost: set[str] = set()
        self._absent: set[str] = set()
        self._broadcasts: list[Mapping[str, Any]] = []
        self.answered = False
        self.broken = False
        self.was_paused = False
        self.must_read = False
        self.received: Round | None = None
        self.position: int | None = None
        self.called = False
        self.unreachable_from: tuple[str, ...] = ()
        self.all_done = False
        self._client: MessageClient | None = None  # the first tick may come before it is set
        self._client = runtime.dial(
            address,
            self._on_message,
            self._on_close,
            self._on_tick,
            tick,
            self._timeout if timeout is None else timeout,
        )
        self.send(greeting)

    @property
    def lost(self) -> frozenset[str]:
        """Members that the hub has reported as lost."""
        with self._lock:
            return frozenset(self._lost)

    @property
    def absent(self) -> frozenset[str]:
        """Those of the lost members that have never connected to the hub."""
        with self._lock:
            return frozenset(self._absent)

    def send(self, message: Message) -> None:
        """Send to the hub; does nothing when the connection is broken."""
        if self._client is not None:
            self._client.send(CODEC.encode(message))

    def report(self, body: Mapping[str, Any]) -> None:
        """Send a message to the agent of the hub's node."""
        self.send(Report(body))

    def take_broadcasts(self) -> list[Mapping[str, Any]]:
        """Return and forget the messages that rank 0's agent has broadcast, oldest first."""
        with self._lock:
            broadcasts, self._broadcasts = self._broadcasts, []
            return broadcasts

    def close(self) -> None:
        """End the connection: a member whose workers are not done is lost to the round."""
        if self._client is not None:
            self._client.close()

    def _on_message(self, connection: Connection, fields: Mapping[str, Any]) -> None:
        self._last_received = self._clock()
        self.answered = True
        message = CODEC.receive(connection, fields)
        if message is None or isinstance(message, Beat):
            return
        with self._lock:
            match message:
                case RoundChanged(round=None):
                    self.must_read = True
                case RoundChanged(round=Round() as round_):
                    self._latest.observe(round_)
                    if round_.is_newer_than(self.received):
                        self.received = round_
                case SealPosition():
                    self.position = message.position
                    self.called = message.position is not None
                    self.unreachable_from = message.unreachable_from
                case Lost():
                    self._lost.update(message.nodes)
                    self._absent.update(message.absent)
                case AllDone():
                    self.all_done = True
                case Broadcast():
                    self._broadcasts.append(message.body)
        self._wake()

    def _on_close(self, _: Connection) -> None:
        self._check_pause()
        self.broken = True
        self._wake()

    def _on_tick(self) -> None:
        if self._client is None:
            return
        self._check_pause()
        self.send(Beat())
        if self._pauses.silence(self._last_received) > self._timeout:
            self._client.connection.close("the hub is silent")

    def _check_pause(self) -> None:
        if self._pauses.tick() > self._timeout:
            self.was_paused = True
