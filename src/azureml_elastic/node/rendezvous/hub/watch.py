"""The one hub of another node that a node watches while it waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, is_unreachable
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["Watch"]

_LOG = logging.getLogger(__name__)

_BRIEF_SECONDS = 1.2
"""To connect in, to a machine that did not answer before: long enough for the second attempt of TCP."""


class Watch:
    """A node's connection to the hub that it watches. For one thread.

    Args:
        reach: takes note of hubs that cannot be reached.
        timings: the patience.
        wake: called from another thread when the hub has said something.
        machine: to connect from.

    Attributes:
        link: the connection, ``None`` while no hub is watched.
        member: whose hub it is.
    """

    def __init__(
        self, reach: Reachability, timings: RendezvousTimings, wake: Callable[[], None], machine: Runtime
    ) -> None:
        self._reach = reach
        self._timings = timings
        self._wake = wake
        self._machine = machine
        self._greeting: Mapping[str, Any] = {}
        self.link: Link | None = None
        self.member: Member | None = None

    def begin(
        self, member: Member, round_: Round, me: Member, purpose: str, patience: float | None = None
    ) -> bool | None:
        """Watch this member's hub; ``None``, or if it cannot be reached, whether its machine has refused.

        Args:
            member: whose hub it is.
            round_: the version of the row that this node has seen.
            me: this node; in an open round, what it wants to be in it.
            purpose: what the member is to this node.
            patience: seconds to connect in, too short to conclude anything; ``None`` for as long as silence is borne.
        """
        greeting = _greeting(round_, self._reach.marked(me, member.incarnation), member)
        link = self.link
        same = self.member is not None and self.member.incarnation == member.incarnation
        if link is not None and same and not link.broken:
            if greeting != self._greeting:
                link.place = None
                link.send(greeting)
                self.member, self._greeting = member, greeting
            return None
        self.end()
        seconds = self._timings.heartbeat_timeout.total_seconds() if patience is None else patience
        if self._reach.knows(member.incarnation):
            seconds = min(seconds, _BRIEF_SECONDS)
        try:
            address = (member.host, member.hub_port)
            self.link = Link(address, greeting, self._timings, self._wake, self._machine, seconds)
        except OSError as error:
            if patience is None and is_unreachable(error):
                self._reach.failed(member, purpose, error, seconds)
            else:
                _LOG.info("The hub of %s cannot be reached: %s", member.node, error)
            return isinstance(error, ConnectionRefusedError)
        self._reach.reached(member.incarnation, "hub")
        self.member, self._greeting = member, greeting
        return None

    def end(self) -> None:
        """Stop watching."""
        if self.link is not None:
            self.link.close()
            self.link = self.member = None


def _greeting(round_: Round, me: Member, to: Member) -> dict[str, Any]:
    """Return what to say to a hub: which version of the row this node has seen, and what it wants to be in it."""
    is_open = round_.state == "open"
    whoami: dict[str, Any] = {"op": "watch", "to": to.incarnation, "node": me.node, "incarnation": me.incarnation}
    if me.unreached:
        whoami["unreached"] = list(me.unreached)
    seen = {"round": round_.number, "open": is_open}
    return {**whoami, "strikes": me.strikes, **seen, "candidacy": me.to_value() if is_open else None}
