"""Where a node waits for a place: for the seal of an open round, or as a spare beside a running one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import Link
from azureml_elastic.node.rendezvous.round import Limits, Member, Patience, Round, candidates, reopened, seal
from azureml_elastic.node.rendezvous.rows import Rows
from azureml_elastic.node.rendezvous.witness import Witness
from azureml_elastic.spec import RendezvousTimings

__all__ = ["Lobby"]

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = (0.1, 2.0)
"""The first and the longest pause between two reads by the node that is about to seal, or that nobody tells."""

_WATCH_SECONDS = 10.0
"""The longest for a node that another one's hub will tell, in case that node is mistaken."""


class Lobby:
    """One node's waits. It watches the hub of the node that will act, and reads the table when it is told to.

    Args:
        rows: of the rendezvous.
        hub: this node's own, whose watchers are told what this node sees.
        witness: looked at where rank 0's hub cannot be reached.
        limits: node counts.
        timings: the patience.
        sleep: waits for some seconds or until woken, and returns whether it was woken; may raise to end the wait.
        wake: wakes the sleeper, from any thread.
    """

    def __init__(
        self,
        rows: Rows,
        hub: Hub,
        witness: Witness,
        limits: Limits,
        timings: RendezvousTimings,
        sleep: Callable[[float], bool],
        wake: Callable[[], None],
    ) -> None:
        self._rows = rows
        self._hub = hub
        self._witness = witness
        self._limits = limits
        self._timings = timings
        self._sleep = sleep
        self._wake = wake
        self._link: Link | None = None

    def wait_for_seal(self, round_: Round, me: Member) -> Round:
        """Ask for a place in an open round, wait until someone, perhaps this node, has moved it, and return it."""
        self._rows.write_member(me)
        patience = Patience(round_, self._limits, self._timings)
        pause, longest = _POLL_SECONDS
        while True:
            members = self._rows.members()
            if patience.time_to_seal(members, me.node):
                return self._seal(round_, members)
            first = (candidates(round_, members) or [me])[0]
            if first.node == me.node:
                # Whoever arrives watches this node's hub, which wakes it up.
                woken = self._sleep(min(pause, patience.next_look))
            elif self._watch(first, me, round_.number):
                woken = self._wait_for_sealer(min(_WATCH_SECONDS, patience.next_look))
            else:
                woken = self._sleep(pause)
            pause = _POLL_SECONDS[0] if woken else min(longest, pause * 1.5)
            current = self._rows.read_round()
            if current.number != round_.number or current.state != "open":
                self._hub.changed(current.number)
                return current

    def wait_beside(self, round_: Round, me: Member) -> None:
        """Wait as a spare beside a running round, until its row may have changed."""
        first = round_.members[0]
        patience = 2 * self._timings.witness_interval.total_seconds()
        sign, since = self._witness.look(), time.monotonic()
        watching = self._watch(first, me)
        while not self._told():
            self._sleep(self._timings.witness_interval.total_seconds() if watching else _POLL_SECONDS[0] * 3)
            if self._rows.read_round() != round_:
                return
            watching = self._watch(first, me)
            if watching or (seen := self._witness.look()) != sign:
                sign, since = (sign if watching else seen), time.monotonic()
            elif time.monotonic() - since > patience:
                _LOG.warning("Round %d gives no sign of life; it is given up.", round_.number)
                everyone = [member.node for member in round_.members]
                reason = f"no sign of life from {first.node}"
                self._rows.replace_round(reopened(round_, reason, lost=everyone, waiting=[me.node]))
                return

    def leave(self) -> None:
        """Stop watching."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _wait_for_sealer(self, seconds: float) -> bool:
        """Wait until the node that should seal says that it has, is gone, or takes too long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._told() or self._link is None or self._link.broken:
                return True
            self._sleep(left)
        return False

    def _seal(self, round_: Round, members: list[Member]) -> Round:
        sealed = seal(round_, members, self._limits)
        if not self._rows.replace_round(sealed):
            _LOG.info("Another node was first to move round %d.", round_.number)
            sealed = self._rows.read_round()
        self._hub.changed(round_.number)
        return sealed

    def _watch(self, member: Member, me: Member, number: int = 0) -> bool:
        """Be told by this member's hub when something changes; false when it cannot be reached.

        Args:
            member: whose hub.
            me: this node.
            number: the open round that this node waits for; 0 to be told to read the row now.
        """
        address = (member.host, member.hub_port)
        if self._link is not None and self._link.address == address and not self._link.broken:
            return True
        self.leave()
        greeting = {"op": "watch", "node": me.node, "incarnation": me.incarnation, "round": number}
        try:
            self._link = Link(address, greeting, self._timings, self._wake)
        except OSError as error:
            _LOG.info("The hub of %s cannot be reached: %s", member.node, error)
            return False
        return True

    def _told(self) -> bool:
        """Return, once for each time, whether the watched hub has said that the row has changed."""
        link = self._link
        if link is None or not link.changed:
            return False
        link.changed = False
        return True
