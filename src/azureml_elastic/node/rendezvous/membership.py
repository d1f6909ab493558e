"""A node's assignment in a round, and its connection to the hub of rank 0's node."""

from __future__ import annotations

import socket
from collections.abc import Callable

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.hub.messages import Hello, Message
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.round_codec import LatestRound

__all__ = ["Membership"]

_CONNECT_SECONDS = 1.0
"""Time after which a node that still tries to reach rank 0's hub counts as one that cannot."""


class Membership:
    """The round that this node has joined last. For the agent's thread, except for methods marked thread-safe.

    Args:
        node: name of this node.
        incarnation: incarnation of this node.
        timings: heartbeat interval and timeout.
        wake: callback from other threads when the hub has sent something.
        runtime: clock and sockets.
        latest: receives each version of the round that the hub sends.

    Attributes:
        assignment: place in the round joined last, ``None`` before the first.
        link: connection to rank 0's hub; ``None`` before the first round and after :meth:`disconnect`.
        over: whether the round is known to have ended.
    """

    def __init__(
        self,
        node: str,
        incarnation: str,
        timings: RendezvousTimings,
        wake: Callable[[], None],
        runtime: Runtime,
        latest: LatestRound,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._timings = timings
        self._wake = wake
        self._runtime = runtime
        self._latest = latest
        self._since = 0.0
        self._failed_number = 0
        self.assignment: Assignment | None = None
        self.link: Link | None = None
        self.over = False

    @property
    def leads(self) -> bool:
        """Whether this node is rank 0 of its round."""
        return self.assignment is not None and self.assignment.rank == 0

    @property
    def seconds(self) -> float:
        """Seconds since this node got its assignment."""
        return self._runtime.clock() - self._since

    def rank_in(self, round_: Round) -> int | None:
        """Return the rank of this incarnation in a sealed round, ``None`` if it has none or has been in it before."""
        already = self.assignment is not None and self.assignment.round.number >= round_.number
        return None if already else round_.rank_of(self._node, self._incarnation)

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
        self.assignment = assignment = Assignment(round_, rank, listener if rank == 0 else None)
        self.over, self._since = False, self._runtime.clock()
        first = round_.members[0]
        try:
            self.link = Link(
                (first.host, first.hub_port),
                Hello(self._node, round_.number, first.incarnation),
                self._timings,
                self._wake,
                runtime=self._runtime,
                timeout=timeout,
                latest=self._latest,
            )
        except OSError:
            self._failed_number = round_.number
            raise
        return assignment

    def is_in(self, number: int, node: str) -> bool:
        """Return whether this node and another one are still in the round of this number. Thread-safe."""
        link, assignment = self.link, self.assignment
        if link is None or assignment is None or assignment.round.number != number or self.over or link.broken:
            return False
        return node not in link.lost

    def reached_leader(self, number: int) -> bool | None:
        """Return whether this node has reached rank 0's hub of a round, ``None`` if it still tries. Thread-safe."""
        link, assignment = self.link, self.assignment
        if assignment is None or assignment.round.number != number:
            return None
        if link is not None:
            return not link.broken
        return False if number == self._failed_number or self.seconds > _CONNECT_SECONDS else None

    def send_to_leader(self, message: Message) -> None:
        """Send to rank 0's hub, if there is a connection to it. Thread-safe."""
        link = self.link
        if link is not None:
            link.send(message)

    def disconnect(self) -> None:
        """End the connection to rank 0's hub, which reports this node as lost within milliseconds."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def leave(self) -> None:
        """End the connection and close the assignment's listener."""
        self.disconnect()
        if self.assignment is not None and self.assignment.listener is not None:
            self.assignment.listener.close()  # without effect where the store has taken it over
