"""What rank 0's hub has sent to a member of its round."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.node.core import messages
from azureml_elastic.node.core.join_events import HubSent, LinkEnded

__all__ = ["HubReports"]


@dataclass
class HubReports:
    """What a member knows of its round from its connection to rank 0's hub.

    Attributes:
        lost: members that are gone.
        absent: those of them that have never connected to the hub.
        all_done: whether the workers of all members have succeeded.
        must_read: whether the round has changed, and the hub did not send to what.
        broken: whether the connection has ended.
        was_given_up: whether it has ended because this process did not run for so long that the hub has given it up.
    """

    lost: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    all_done: bool = False
    must_read: bool = False
    broken: bool = False
    was_given_up: bool = False

    def take(self, event: HubSent | LinkEnded) -> None:
        """Record what the hub has sent, or that the connection has ended."""
        match event:
            case LinkEnded():
                self.broken, self.was_given_up = True, event.was_given_up
            case HubSent(message=messages.Lost() as message):
                self.lost |= {*message.nodes}
                self.absent |= {*message.absent}
            case HubSent(message=messages.AllDone()):
                self.all_done = True
            case HubSent(message=messages.RoundChanged(round=None)):
                self.must_read = True

    def take_read_request(self) -> bool:
        """Return, once, whether the row must be read."""
        request, self.must_read = self.must_read, False
        return request
