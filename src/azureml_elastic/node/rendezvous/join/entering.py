"""Entering a sealed round, also where rank 0's node does not answer.

A machine that refuses the connection has lost its agent: the round is over. One that does not answer may be gone or cut
off, or this node is cut off. The majority of members decides: where most have reached rank 0's node, the round goes on
without this one, which marks its row as left and keeps trying until the round has changed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import dataclass, replace

from azureml_elastic.errors import TableUnavailable
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.host.addresses import format_address
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.join.sleeper import Sleeper
from azureml_elastic.node.rendezvous.membership import Membership
from azureml_elastic.node.rendezvous.reachability.quorum_check import is_leader_unreachable, query_members
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, UnreachablePair, is_unreachable
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.state.rows import Rows
from azureml_elastic.node.rendezvous.table_heartbeat import StaleHeartbeat, TableHeartbeat

__all__ = ["LeaderLostError", "RoundEntry"]

_LOG = logging.getLogger(__name__)

_RETRY_SECONDS = (0.5, 2.0)
"""First and longest pause between attempts to enter a round that may go on without this node."""

_RETRY_TIMEOUT_SECONDS = 1.2
"""Time to connect in a further attempt: enough for TCP's second one."""

_KEY_TRIES = 4
"""Further attempts to enter a round whose hub holds another key of the run than this node."""


class LeaderLostError(Exception):
    """The round must be reopened without rank 0's node; the message is the reason."""


@dataclass(frozen=True)
class RoundEntry:
    """Entry of this node into sealed rounds. Not thread-safe.

    Args:
        context: settings and shared objects.
        membership: connects to rank 0's hub.
        rows: table rows.
        heartbeat: table heartbeat, which shows whether the round runs.
        reachability: receives unreachable pairs.
        sleeper: pauses between attempts.
    """

    context: Context
    membership: Membership
    rows: Rows
    heartbeat: TableHeartbeat
    reachability: Reachability
    sleeper: Sleeper

    def enter(self, round_: Round, rank: int, listener: socket.socket) -> Assignment | None:
        """Enter a round.

        Args:
            round_: sealed round.
            rank: rank of this node in it.
            listener: listening socket for the round's store.

        Returns:
            The assignment, or ``None`` where the round has changed meanwhile.

        Raises:
            LeaderLostError: the round must be reopened without rank 0's node.
        """
        me, first = self.membership.me, round_.members[0]
        try:
            assignment = self.membership.enter(round_, rank, listener)
            for _ in range(_KEY_TRIES):
                if not self.membership.link.refused:
                    break
                self.sleeper.sleep(_RETRY_SECONDS[0])
                self._refresh_key()
                assignment = self.membership.enter(round_, rank, listener)
        except OSError as error:
            if not is_unreachable(error):
                _LOG.warning("Rank 0's node %s of round %d cannot be reached: %s", first.node, round_.number, error)
                raise LeaderLostError(_refusal(me, first, error)) from error
            purpose = f"rank 0 of round {round_.number}"
            pair = self.reachability.failed(first, purpose, error, self.context.heartbeat_timeout)
        else:
            return assignment
        verdict = is_leader_unreachable(query_members(self.context, round_, me.node))
        if verdict or (verdict is None and self.heartbeat.round() != round_.number):
            raise LeaderLostError(str(pair))
        return self._keep_trying(round_, rank, listener, pair)

    def _refresh_key(self) -> None:
        """Read the run's key again, as rank 0's hub holds another one."""
        self.membership.disconnect()
        with contextlib.suppress(TableUnavailable):
            self.rows.refresh_key()

    def _keep_trying(
        self, round_: Round, rank: int, listener: socket.socket, pair: UnreachablePair
    ) -> Assignment | None:
        me, first = self.membership.me, round_.members[0]
        _LOG.warning("Round %d may go on without this node, which keeps trying to enter it.", round_.number)
        self.rows.write_member(
            replace(self.reachability.marked(me), state="left", reason=str(pair)),
            lambda: self.context.latest.after(round_) is not None,
        )
        pause, longest = _RETRY_SECONDS
        stale = StaleHeartbeat(self.heartbeat)
        stale.check()
        while True:
            self.sleeper.sleep(pause)
            pause = min(longest, 1.5 * pause)
            if self.context.latest.after(round_) is not None or self.rows.read_round().is_newer_than(round_):
                return None
            try:
                assignment = self.membership.enter(round_, rank, listener, _RETRY_TIMEOUT_SECONDS)
            except OSError as error:
                if not is_unreachable(error):
                    raise LeaderLostError(_refusal(me, first, error)) from error
            else:
                self.reachability.reached(first.incarnation, "hub")
                # Its row says that this node has left: the next round would not wait for it.
                self.rows.write_member(replace(me, round=round_.number))
                return assignment
            if stale.check():
                raise LeaderLostError(str(pair))


def _refusal(me: Member, leader: Member, error: OSError) -> str:
    return f"{me.node} cannot reach {leader.node} at {format_address(leader.host, leader.hub_port)}: {error}"
