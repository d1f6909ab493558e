"""What rank 0's hub has sent to a member of its round."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.node.core import messages
from azureml_elastic.node.core.hub_state import HubView
from azureml_elastic.node.core.join_events import HubSent, LinkEnded
from azureml_elastic.node.core.replicas import room_for
from azureml_elastic.node.core.round import Limits, Round
from azureml_elastic.node.core.training_events import RoundSeen

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

    def see(
        self, round_: Round, node: str, view: HubView, *, over: bool, limits: Limits, debounce: float, now: float
    ) -> RoundSeen:
        """Return what is known of a round.

        Args:
            round_: the round.
            node: the member.
            view: what its own hub knows, where it is rank 0.
            over: whether the round has ended in the table.
            limits: node counts.
            debounce: seconds in which no further spare may come before room is made.
            now: monotonic seconds.
        """
        lost = self.lost | view.lost
        was_given_up = view.was_given_up or self.was_given_up
        if self.broken and not was_given_up:
            lost |= {round_.members[0].node} - {node}
        spares = view.spares(now, debounce)
        has_room = room_for(spares, len(round_.members), limits.maximum, limits.nodes_per_replica)
        return RoundSeen(
            lost=lost - {node},
            over=over or was_given_up or self.broken or node in lost,
            waiting=spares if has_room else frozenset(),
            all_done=self.all_done,
            was_given_up=was_given_up,
        )

    def take_read_request(self) -> bool:
        """Return, once, whether the row must be read."""
        request, self.must_read = self.must_read, False
        return request
