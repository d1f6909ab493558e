"""A node's connection to the hub of another node (or its own)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.spec import RendezvousTimings
from azureml_elastic.wire import Connection, LineClient

__all__ = ["Link"]


class Link:
    """One connection to a hub, with beats in both directions.

    Args:
        address: host and port of the hub.
        greeting: the first message, ``hello`` or ``watch``.
        timings: beats and patience.
        wake: called, from the link's thread, when something has changed.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        greeting: Mapping[str, Any],
        timings: RendezvousTimings,
        wake: Callable[[], None],
    ) -> None:
        self.address = address
        self._timings = timings
        self._wake = wake
        self._lock = threading.Lock()
        self._last_heard = time.monotonic()
        self._lost_nodes: set[str] = set()
        self._messages: list[Mapping[str, Any]] = []
        self.broken = False
        self.changed = False
        self.all_done = False
        self._client = LineClient(
            address,
            on_message=self._on_message,
            on_close=self._on_close,
            on_tick=self._on_tick,
            tick=timings.heartbeat_interval.total_seconds() / 2,
            timeout=timings.heartbeat_timeout.total_seconds(),
        )
        self._client.send(greeting)

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Members that the hub has called lost."""
        with self._lock:
            return frozenset(self._lost_nodes)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send to the hub; silently nothing when the connection is broken, which ``broken`` tells."""
        self._client.send(message)

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Return and forget what rank 0's agent has broadcast, oldest first."""
        with self._lock:
            messages, self._messages = self._messages, []
            return messages

    def close(self) -> None:
        """Drop the connection: a member whose workers are not done is lost to the round."""
        self._client.close()

    def _on_message(self, _: Connection, message: Mapping[str, Any]) -> None:
        self._last_heard = time.monotonic()
        op = message.get("op")
        if op == "beat":
            return
        with self._lock:
            if op == "lost":
                self._lost_nodes.update(message["nodes"])
            elif op == "changed":
                self.changed = True
            elif op == "all_done":
                self.all_done = True
            else:
                self._messages.append(message)
        self._wake()

    def _on_close(self, _: Connection) -> None:
        self.broken = True
        self._wake()

    def _on_tick(self) -> None:
        self._client.send({"op": "beat"})
        if time.monotonic() - self._last_heard > self._timings.heartbeat_timeout.total_seconds():
            self._client.connection.close("the hub is silent")
