"""A node's assignment in a round, and its connection to the hub of rank 0's node."""

from __future__ import annotations

import socket

from azureml_elastic.node.core.failures import FailureRecord, aged
from azureml_elastic.node.core.hub_reports import HubReports
from azureml_elastic.node.core.messages import Hello, Message
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.state.assignment import Assignment

__all__ = ["Membership"]

_CONNECT_SECONDS = 1.0
"""Time after which a node that still tries to connect to rank 0's hub reports that it cannot."""


class Membership:
    """The round that this node has joined last. For the agent's thread, except for methods marked thread-safe.

    Args:
        context: settings and shared objects.
        me: row of this node.

    Attributes:
        me: row of this node, with the number of strikes that was read last.
        over: whether the round is known to have ended.
        reports: what rank 0's hub has sent.
    """

    def __init__(self, context: Context, me: Member) -> None:
        self._context = context
        self._assignment: Assignment | None = None
        self._link: Link | None = None
        self._since = 0.0
        self._failed_number = 0
        self.me = me
        self.over = False
        self.reports = HubReports()

    @property
    def assignment(self) -> Assignment:
        """The assignment in the round joined last."""
        assert self._assignment is not None, "no round was joined yet"
        return self._assignment

    @property
    def last_round(self) -> int:
        """Number of the round joined last, 0 before the first."""
        return self._assignment.round.number if self._assignment else 0

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self._assignment is not None and self._assignment.rank == 0

    @property
    def seconds(self) -> float:
        """Seconds since this node got its assignment."""
        return self._context.clock() - self._since

    @property
    def failures(self) -> tuple[FailureRecord, ...]:
        """The run's worker failures that still count, aged as if the round ended now."""
        return aged(self.assignment.round.failures, self.seconds)

    @property
    def connected(self) -> bool:
        """Whether there is a :attr:`link`: false before the first round and after :meth:`disconnect`."""
        return self._link is not None

    @property
    def link(self) -> Link:
        """The connection to rank 0's hub."""
        assert self._link is not None, "this node is not connected to rank 0's hub"
        return self._link

    def enter(self, round_: Round, rank: int, listener: socket.socket, timeout: float | None = None) -> Assignment:
        """Take the assignment in a sealed round, and connect to rank 0's hub.

        Args:
            round_: sealed round.
            rank: rank of this node in it.
            listener: listening socket for the round's store, which the assignment owns on rank 0.
            timeout: seconds to connect in; ``None`` for the heartbeat timeout.

        Raises:
            OSError: rank 0's hub cannot be reached; the assignment is set all the same.
        """
        self._assignment = assignment = Assignment(round_, rank, listener if rank == 0 else None)
        self.over, self._since, self.reports = False, self._context.clock(), HubReports()
        first = round_.members[0]
        self.disconnect()
        try:
            self._link = Link(self._context, first, Hello(round_.number), timeout)
        except OSError:
            self._failed_number = round_.number
            raise
        return assignment

    def is_in(self, number: int, node: str) -> bool:
        """Return whether this node and another one are still in the round of this number. Thread-safe."""
        link = self._link
        if link is None or self.last_round != number or self.over:
            return False
        return not link.broken and node not in self.reports.lost

    def reached_leader(self, number: int) -> bool | None:
        """Return whether this node has reached rank 0's hub of a round, ``None`` if it still tries. Thread-safe."""
        link = self._link
        if self.last_round != number or not number:
            return None
        if link is not None:
            return not link.broken
        return False if number == self._failed_number or self.seconds > _CONNECT_SECONDS else None

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
        if self._assignment is not None and self._assignment.listener is not None:
            self._assignment.listener.close()  # without effect where the store has taken it over
