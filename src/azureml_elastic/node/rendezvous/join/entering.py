"""How a node gets into a sealed round, and what it does when rank 0's node does not answer.

A machine that refuses has lost its process: the round is over. One that says nothing may be gone, or cut off, or it is
this node that is cut off. Most of the members decide: where most have reached rank 0's node, the round goes on without
this one, which says so in its row and keeps trying until the round has moved.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.host.addresses import place
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.reachability.quorum_check import QuorumCheck, rank_0_is_cut_off
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, UnreachablePair, is_unreachable
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import newer
from azureml_elastic.node.rendezvous.state.rows import Rows
from azureml_elastic.node.rendezvous.table_heartbeat import TableHeartbeat

__all__ = ["Entrance"]

_LOG = logging.getLogger(__name__)

_AGAIN_SECONDS = (0.5, 2.0)
"""The first and the longest pause of a node that tries to get into a round that may go on without it."""

_BRIEF_SECONDS = 1.2
"""To connect in, for one that has failed before: long enough for the second attempt of TCP."""


class Entrance:
    """One node's way in. For one thread.

    Args:
        node: its name.
        membership: this node's.
        rows: of the rendezvous.
        witness: tells whether a round runs.
        reach: takes note of gaps.
        timings: the patience.
        rest: waits for some seconds; may raise to end the wait.
        whoami: returns this node.
        machine: that the node runs on.
    """

    def __init__(
        self,
        node: str,
        *,
        membership: Membership,
        rows: Rows,
        witness: TableHeartbeat,
        reach: Reachability,
        timings: RendezvousTimings,
        rest: Callable[[float], None],
        whoami: Callable[[], Member],
        machine: Runtime,
    ) -> None:
        self._node = node
        self._membership = membership
        self._rows = rows
        self._witness = witness
        self._reach = reach
        self._timings = timings
        self._rest = rest
        self._whoami = whoami
        self._clock = machine.clock
        self._inquiry = QuorumCheck(machine, node)

    def enter(self, round_: Round, rank: int, listener: socket.socket) -> Assignment | str | None:
        """Take an assignment.

        Args:
            round_: sealed.
            rank: of this node.
            listener: for the round's store.

        Returns:
            The assignment; or why the round must go on without rank 0's node; or ``None`` where it has moved meanwhile.
        """
        first = round_.members[0]
        try:
            return self._membership.enter(round_, rank, listener)
        except OSError as error:
            if not is_unreachable(error):
                _LOG.warning("Rank 0's node %s of round %d cannot be reached: %s", first.node, round_.number, error)
                return f"{self._node} cannot reach {first.node} at {place(first.host, first.hub_port)}: {error}"
            seconds = self._timings.heartbeat_timeout.total_seconds()
            gap = self._reach.failed(first, f"rank 0 of round {round_.number}", error, seconds)
        verdict = rank_0_is_cut_off(self._inquiry.ask(round_))
        if verdict or (verdict is None and self._witness.round() != round_.number):
            return str(gap)
        return self._keep_trying(round_, rank, listener, gap)

    def _keep_trying(
        self, round_: Round, rank: int, listener: socket.socket, gap: UnreachablePair
    ) -> Assignment | str | None:
        first = round_.members[0]
        _LOG.warning("Round %d may go on without this node, which keeps trying to get in.", round_.number)
        self._rows.write_member(
            replace(self._whoami(), state="left", reason=str(gap)),
            self._membership.has_heard_of_the_next,
        )
        pause, longest = _AGAIN_SECONDS
        sign, since = self._witness.look(), self._clock()
        while True:
            self._rest(pause)
            pause = min(longest, 1.5 * pause)
            if self._membership.has_heard_of_the_next() or newer(self._rows.read_round(), round_):
                return None
            try:
                assignment = self._membership.enter(round_, rank, listener, _BRIEF_SECONDS)
            except OSError as error:
                if not is_unreachable(error):
                    return f"{self._node} cannot reach {first.node} at {place(first.host, first.hub_port)}: {error}"
            else:
                self._reach.reached(first.incarnation, "hub")
                # Nobody waits for a node that has left; this one has come after all.
                self._rows.write_member(replace(self._whoami(), round=round_.number))
                return assignment
            seen = self._witness.look()
            if seen != sign:
                sign, since = seen, self._clock()
            elif self._clock() - since > 2 * self._timings.table_heartbeat_interval.total_seconds():
                return str(gap)
