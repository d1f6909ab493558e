"""The queue of what agents have sent to the agent's thread in a round."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from azureml_elastic.ipc.agent_messages import BroadcastBody, ReportBody

__all__ = ["Event", "FromLeader", "FromMember", "Inbox"]


@dataclass(frozen=True)
class FromLeader:
    """Broadcast of rank 0's agent."""

    round: int
    body: BroadcastBody


@dataclass(frozen=True)
class FromMember:
    """Report of a node's agent to this one, which is rank 0's."""

    round: int
    node: str
    body: ReportBody


Event = FromLeader | FromMember


class Inbox:
    """Queue of events in the order of their arrival. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)

    def take(self, number: int) -> list[Event]:
        """Remove and return the events of a round; those of earlier rounds are dropped, later ones stay."""
        with self._lock:
            events = [event for event in self._events if event.round == number]
            self._events = [event for event in self._events if event.round > number]
            return events
