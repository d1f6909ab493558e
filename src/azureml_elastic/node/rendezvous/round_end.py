"""How a node ends its round or the run."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from azureml_elastic.errors import TableError
from azureml_elastic.node.core.actions import AwaitEnd, Close, Reopen
from azureml_elastic.node.core.joining import greeting_of
from azureml_elastic.node.core.messages import RoundChanged
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.round_ends import EndFacts, left_in_order, version_after
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import HubWatch, Membership
from azureml_elastic.node.rendezvous.reachability import Reachability, describe_absence
from azureml_elastic.node.rendezvous.rows import Rows

_LOG = logging.getLogger(__name__)

_MAX_DESCRIBED = 3
"""Largest number of members that never connected whose rows are read for the reason."""


@dataclass(frozen=True)
class RoundEnd:
    """The end of this node's rounds. For the agent's thread.

    Args:
        watch: connection to the hub of the node that should end the round.
        reachability: source of the advice about nodes that could not connect.
    """

    context: Context
    membership: Membership
    machine: Node
    rows: Rows
    hub: Hub
    watch: HubWatch
    reachability: Reachability

    def await_other(self, how: AwaitEnd) -> None:
        """Connect to the hub of the survivor that is to end the round."""
        greeting = greeting_of(self.reachability.marked(self.machine.me), self.membership.assignment.round)
        self.watch.connect(how.by, greeting, "the next to end the round", how.timeout)

    def left_in_order(self, lost: frozenset[str]) -> frozenset[str]:
        """Return the lost members that have left before they could enter the round, according to their rows."""
        absent = self.machine.absent(self.hub.view()) & lost
        rows = [self._row(member) for member in self.membership.assignment.round.members if member.node in absent]
        return left_in_order([row for row in rows if row is not None])

    def _row(self, member: Member) -> Member | None:
        """Return the present row of a member, ``None`` where it is not known or that of another process."""
        with contextlib.suppress(TableError):
            row = self.rows.read_member(member.node)
            return row if row is not None and row.incarnation == member.incarnation else None
        return None

    def _describe_absent(self, round_: Round, absent: frozenset[str]) -> str:
        """Return why members have never connected to rank 0's hub, according to their rows."""
        members = [member for member in round_.members if member.node in absent]
        seconds = self.context.timings.join_timeout.total_seconds()
        first = round_.members[0]
        texts = [describe_absence(member, self._row(member), first, seconds) for member in members[:_MAX_DESCRIBED]]
        if len(members) > _MAX_DESCRIBED:
            texts.append(f"and {len(members) - _MAX_DESCRIBED} more")
        reason = "; ".join(texts)
        _LOG.warning("Members of round %d have not connected: %s. %s", round_.number, reason, self.reachability.advice)
        return reason

    def write(self, how: Reopen | Close) -> Round | None:
        """Write what follows the round and send it to all connected nodes.

        Returns:
            What this node has written; ``None`` where another one was first, and nothing is charged.
        """
        round_ = self.membership.assignment.round
        view, absent = self.hub.view(), frozenset[str]()
        if isinstance(how, Reopen) and not how.failures:
            absent = self.machine.absent(view) & how.lost
        why = self._describe_absent(round_, absent) if absent else ""
        facts = EndFacts(self.context.clock() - self.machine.entered, view.waiting, absent, why)
        limit = self.context.timings.max_failed_rounds
        to = version_after(round_, how, facts, max_failed_rounds=limit, advice=self.reachability.advice)
        newer = to if self.rows.end_round(self.machine.last_round, to) else self.context.latest.after(round_)
        if newer is not None:
            self.hub.publish(newer)  # members wait for rank 0, whichever node was first
        if newer is not to:
            return None
        self.membership.send_to_leader(RoundChanged(to))
        return to
