"""A node's membership in a round: its assignment, its link to rank 0, and what it hears about the round's end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.errors import TableUnavailable
from azureml_elastic.node.rendezvous.hub.hub import Hub, HubView
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment, Status
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.round_codec import newer, pack
from azureml_elastic.node.rendezvous.state.rows import Rows
from azureml_elastic.node.rendezvous.table_heartbeat import TableHeartbeat

__all__ = ["Membership"]

_LONGEST_DEBOUNCE = 4
"""For how many times the debounce newcomers are collected while more and more of them come."""


_HESITATION_SECONDS = 1.0
"""After which a node that still tries to reach rank 0's counts as one that cannot."""


class Membership:
    """The round that this node has joined last. For one thread, the agent's.

    Args:
        node: its name.
        incarnation: of it.
        maximum: of nodes in a round.
        timings: the patience.
        rows: the run's rows.
        hub: this node's.
        witness: this node's.
        heard: takes in what came through other connections, and tells whether the round is known to be over.
        wake: called from other threads when something has happened.
        machine: that the node runs on.
    """

    def __init__(
        self,
        node: str,
        incarnation: str,
        maximum: int,
        timings: RendezvousTimings,
        *,
        rows: Rows,
        hub: Hub,
        witness: TableHeartbeat,
        heard: Callable[[Round], bool],
        wake: Callable[[], None],
        machine: Runtime,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._maximum = maximum
        self._timings = timings
        self._rows = rows
        self._hub = hub
        self._witness = witness
        self._heard = heard
        self._wake = wake
        self._machine = machine
        self._clock = machine.clock
        self._over = False
        self._since = 0.0
        self._in_vain = 0
        hub.linked = self._linked
        self.link: Link | None = None
        """The connection to rank 0's hub; none before the first round and after :meth:`drop_link`."""
        self.assignment: Assignment | None = None
        """The place in the round joined last."""

    @property
    def seconds(self) -> float:
        """How long this node has had its assignment, by its own monotonic clock."""
        return self._clock() - self._since

    def place_in(self, round_: Round) -> int | None:
        """Return the rank of this incarnation in a sealed round, ``None`` if it has none or has been in it before."""
        already = self.assignment is not None and self.assignment.round.number >= round_.number
        return None if already else round_.rank_of(self._node, self._incarnation)

    def enter(self, round_: Round, rank: int, listener: socket.socket, patience: float | None = None) -> Assignment:
        """Take an assignment.

        Args:
            round_: sealed.
            rank: of this node.
            listener: for the round's store; the assignment has it on rank 0, and is left without it on the others.
            patience: seconds to connect to rank 0's node in; ``None`` for as long as silence is borne.

        Raises:
            OSError: rank 0's node cannot be reached; the assignment is taken all the same.
        """
        self.assignment = assignment = Assignment(round_, rank, listener if rank == 0 else None)
        self._over, self._since = False, self._clock()
        if rank == 0:
            self._hub.enter(round_)
            self._witness.start(round_.number)
        else:
            self._witness.stop()
        first = round_.members[0]
        greeting = {
            "op": "hello",
            "to": first.incarnation,
            "round": round_.number,
            "node": self._node,
            "incarnation": self._incarnation,
        }
        address = (first.host, first.hub_port)
        try:
            self.link = Link(address, greeting, self._timings, self._wake, self._machine, patience)
        except OSError:
            self._in_vain = round_.number
            raise
        return assignment

    def is_on(self, number: int, node: str) -> bool:
        """Return whether this node is still in the round of this number, and that one, too; for any thread."""
        link, assignment = self.link, self.assignment
        if link is None or assignment is None or assignment.round.number != number or self._over or link.broken:
            return False
        return node not in link.lost_nodes

    def _linked(self, number: int) -> bool | None:
        """Return whether this node has reached rank 0's of this round, ``None`` while that is open; for any thread."""
        link, assignment = self.link, self.assignment
        if assignment is None or assignment.round.number != number:
            return None
        if link is not None:
            return not link.broken
        return False if number == self._in_vain or self._clock() - self._since > _HESITATION_SECONDS else None

    def status(self) -> Status:
        """Return what is known about the round; reads the table only after a hint that it has moved."""
        link, assignment = self.link, self.assignment
        if link is None or assignment is None:
            return Status()
        view = self._hub.view() if assignment.rank == 0 else HubView()
        lost = link.lost_nodes | view.lost
        self._over = self._over or link.broken or self._has_moved()
        if link.broken and not link.stood_still:
            lost |= {assignment.round.members[0].node} - {self._node}
        return Status(
            lost=lost - {self._node},
            over=self._over or self._node in lost,
            waiting=self._newcomers(view) if len(assignment.round.members) < self._maximum else frozenset(),
            all_done=link.all_done,
        )

    @property
    def absent(self) -> frozenset[str]:
        """The lost members that have never come to rank 0's node, as its hub says."""
        told = self.link.absent if self.link is not None else frozenset()
        leads = self.assignment is not None and self.assignment.rank == 0
        return told | self._hub.view().absent if leads else told

    def has_heard_of_the_next(self) -> bool:
        """Return whether somebody has told this node that its round is over."""
        assert self.assignment is not None
        if self.link is not None and self.link.news is not None:
            self._rows.heard(self.link.news)
        return self._heard(self.assignment.round)

    def newest(self, after: Round) -> Round:
        """Return the version of the round's row that this node was told, if it is newer than this one, or read it."""
        newest = self._rows.newest if self.has_heard_of_the_next() else None
        return newest if newest is not None and newer(newest, after) else self._rows.read_round()

    def tell(self, row: Round) -> None:
        """Tell everybody within reach what this node has written."""
        self._hub.changed(row)
        if self.link is not None:
            self.link.send({"op": "changed", "row": pack(row)})

    def tell_leader(self, message: Mapping[str, Any]) -> None:
        """Send to rank 0's hub, where there is a connection to it; from any thread."""
        link = self.link
        if link is not None:
            link.send(message)

    def drop_link(self) -> None:
        """Break the connection to rank 0, which tells everyone in milliseconds that this node is gone."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def leave(self) -> None:
        """Give the assignment up."""
        self.drop_link()
        if self.assignment is not None and self.assignment.listener is not None:
            self.assignment.listener.close()  # nothing where the store has taken it over

    def _newcomers(self, view: HubView) -> frozenset[str]:
        """Return the nodes that wait outside, once they have done so for the debounce."""
        if view.waiting_since is None or view.waiting_latest is None:
            return frozenset()
        debounce = self._timings.rescale_debounce.total_seconds()
        now = self._clock()
        due = now - view.waiting_latest >= debounce or now - view.waiting_since >= _LONGEST_DEBOUNCE * debounce
        return view.waiting if due else frozenset()

    def _has_moved(self) -> bool:
        """Return whether this node was told that the round is over; read the row where that was only a hint."""
        assert self.assignment is not None
        assert self.link is not None
        if self.has_heard_of_the_next():
            return True
        if not self.link.changed:
            return False
        self.link.changed = False
        try:
            current = self._rows.read_round_now()
        except TableUnavailable:
            self.link.changed = True
            return False
        return current.number != self.assignment.round.number or current.state != "sealed"
