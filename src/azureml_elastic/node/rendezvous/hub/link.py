"""A node's connection to the hub of another node (or its own)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import Connection, LineClient
from azureml_elastic.node.rendezvous.hub.pause_detection import PauseDetector
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.round_codec import newer, unpack

__all__ = ["Link"]


class Link:
    """One connection to a hub, with beats in both directions.

    Args:
        address: host and port of the hub.
        greeting: the first message, ``hello`` or ``watch``.
        timings: beats and patience.
        wake: called, from the link's thread, when something has changed.
        machine: to dial from.
        patience: seconds to connect in; ``None`` for as long as silence is borne.

    Attributes:
        heard: whether the hub has said anything yet.
        broken: whether the connection has ended, but not by :meth:`close`.
        changed: whether the round has moved and the hub did not say to what; for the owner to reset.
        news: the newest version of the round's row that the hub has told, ``None`` before the first.
        place: in the line of those that should look after an open round; see the hub's messages.
        called: whether the hub has told the place once more; for the owner to reset.
        apart: members of the hub's round that cannot reach this node, for which it makes no room.
        all_done: whether all members' workers have ended well.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        greeting: Mapping[str, Any],
        timings: RendezvousTimings,
        wake: Callable[[], None],
        machine: Runtime | None = None,
        patience: float | None = None,
    ) -> None:
        machine = machine or Runtime()
        self.address = address
        self._wake = wake
        self._clock = machine.clock
        self._lock = threading.Lock()
        tick, timeout = (span.total_seconds() for span in (timings.heartbeat_interval / 2, timings.heartbeat_timeout))
        self._timeout = timeout
        self._attention = PauseDetector(self._clock, tick)
        self._last_heard = self._clock()
        self._lost_nodes: set[str] = set()
        self._absent: set[str] = set()
        self._messages: list[Mapping[str, Any]] = []
        self.heard = False
        self.broken = False
        self.stood_still = False
        """Whether this machine itself did not run for so long that the others have given it up, not it the hub."""
        self.changed = False
        self.news: Round | None = None
        self.place: int | None = None
        self.called = False
        self.apart: tuple[str, ...] = ()
        self.all_done = False
        self._client: LineClient | None = None
        self._client = machine.dial(
            address,
            self._on_message,
            self._on_close,
            self._on_tick,
            tick,
            timeout if patience is None else patience,
        )
        self.send(greeting)

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Members that the hub has called lost."""
        with self._lock:
            return frozenset(self._lost_nodes)

    @property
    def absent(self) -> frozenset[str]:
        """Those of them that have never come to the hub."""
        with self._lock:
            return frozenset(self._absent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send to the hub; silently nothing when the connection is broken, which ``broken`` tells."""
        if self._client is not None:
            self._client.send(message)

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Return and forget what rank 0's agent has broadcast, oldest first."""
        with self._lock:
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Drop the connection: a member whose workers are not done is lost to the round."""
        if self._client is not None:
            self._client.close()

    def _on_message(self, _: Connection, message: Mapping[str, Any]) -> None:
        self._last_heard = self._clock()
        self.heard = True
        op = message.get("op")
        if op == "beat":
            return
        with self._lock:
            if op == "lost":
                self._lost_nodes.update(message["nodes"])
                self._absent.update(message.get("absent", ()))
            elif op == "changed":
                self._take_news(message)
            elif op == "line":
                self.place = message["place"]
                self.called = self.place is not None
                self.apart = tuple(message.get("apart", ()))
            elif op == "all_done":
                self.all_done = True
            else:
                self._messages.append(message)
        self._wake()

    def _take_news(self, message: Mapping[str, Any]) -> None:
        if "row" not in message:
            self.changed = True
            return
        round_ = unpack(message["row"])
        if newer(round_, self.news):
            self.news = round_

    def _on_close(self, _: Connection) -> None:
        self._look_at_own_clock()
        self.broken = True
        self._wake()

    def _on_tick(self) -> None:
        if self._client is None:
            return  # on a busy machine it may tick before it is known here
        self._look_at_own_clock()
        self._client.send({"op": "beat"})
        if self._attention.silence(self._last_heard) > self._timeout:
            self._client.connection.close("the hub is silent")

    def _look_at_own_clock(self) -> None:
        if self._attention.look() > self._timeout:
            self.stood_still = True
