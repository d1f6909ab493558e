"""The queue of what agents have sent to the agent's thread in a round."""

from __future__ import annotations

import threading

from azureml_elastic.node.core.training_events import FromLeader, FromMember

__all__ = ["Inbox"]


class Inbox:
    """Queue of messages in the order of their arrival. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[tuple[int, FromLeader | FromMember]] = []

    def put(self, number: int, message: FromLeader | FromMember) -> None:
        """Add a message of the round with this number."""
        with self._lock:
            self._messages.append((number, message))

    def take(self, number: int) -> list[FromLeader | FromMember]:
        """Remove and return the messages of a round; those of earlier rounds are dropped, later ones stay."""
        with self._lock:
            messages = [message for of, message in self._messages if of == number]
            self._messages = [(of, message) for of, message in self._messages if of > number]
            return messages
