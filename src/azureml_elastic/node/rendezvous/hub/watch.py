"""The hub of another node to which a waiting node is connected."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from azureml_elastic.node.core.messages import RoundChanged, Watch
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, is_unreachable

__all__ = ["HubWatch"]

_LOG = logging.getLogger(__name__)

_SHORT_TIMEOUT_SECONDS = 1.2
"""Time to connect to a machine that did not answer before: enough for TCP's second attempt."""


@dataclass
class HubWatch:
    """A waiting node's connection to at most one hub. Not thread-safe.

    Args:
        context: settings and shared objects.
        reachability: receives hubs that cannot be reached.

    Attributes:
        link: the connection, ``None`` without one.
        member: the node of the hub.
    """

    context: Context
    reachability: Reachability
    link: Link | None = field(default=None, init=False)
    member: Member | None = field(default=None, init=False)
    _greeting: Watch | None = field(default=None, init=False)

    def connect(
        self, member: Member, round_: Round, me: Member, purpose: str, timeout: float | None = None
    ) -> bool | None:
        """Connect to this member's hub, or send it this node's state if it is new.

        Args:
            member: node of the hub.
            round_: newest version of the row that this node has seen.
            me: this node; in an open round, the row with which it wants to be a member.
            purpose: description of the hub's node for log messages.
            timeout: seconds to connect in, too short to conclude that the node cannot be reached; ``None`` for the
                heartbeat timeout.

        Returns:
            ``None`` if connected, else whether the machine refused the connection.
        """
        is_open = round_.state == "open"
        me = self.reachability.marked(me, member.incarnation)
        candidacy = me if is_open else None
        greeting = Watch(round_.number, is_open, me.strikes, me.unreached, candidacy)
        link = self.link
        same = self.member is not None and self.member.incarnation == member.incarnation
        if link is not None and same and not link.broken:
            if greeting != self._greeting:
                link.position = None
                link.send(greeting)
                self.member, self._greeting = member, greeting
            return None
        self.close()
        seconds = self.context.heartbeat_timeout if timeout is None else timeout
        if self.reachability.is_hub_unreachable(member.incarnation):
            seconds = min(seconds, _SHORT_TIMEOUT_SECONDS)
        try:
            self.link = Link(self.context, member, greeting, seconds)
        except OSError as error:
            if timeout is None and is_unreachable(error):
                self.reachability.failed(member, purpose, error, seconds)
            else:
                _LOG.info("The hub of %s cannot be reached: %s", member.node, error)
            return isinstance(error, ConnectionRefusedError)
        self.reachability.reached(member.incarnation, "hub")
        self.member, self._greeting = member, greeting
        return None

    def forward(self, round_: Round) -> None:
        """Send the hub a version of the round, unless the hub has sent it."""
        if self.link is not None and round_.is_newer_than(self.link.received):
            self.link.send(RoundChanged(round_))

    def take_read_request(self) -> bool:
        """Return, once, whether the hub has sent that the row has changed, but not to what."""
        return self.link is not None and self.link.take_read_request()

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()
            self.link = self.member = None
