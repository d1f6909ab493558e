"""The hub of another node to which a waiting node is connected."""

from __future__ import annotations

import logging
from collections.abc import Callable

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.node.rendezvous.hub.link import Link
from azureml_elastic.node.rendezvous.hub.messages import RoundChanged, Watch
from azureml_elastic.node.rendezvous.reachability.reachability import Reachability, is_unreachable
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import LatestRound

__all__ = ["HubWatch"]

_LOG = logging.getLogger(__name__)

_SHORT_TIMEOUT_SECONDS = 1.2
"""Time to connect to a machine that did not answer before: enough for TCP's second attempt."""


class HubWatch:
    """A waiting node's connection to at most one hub. Not thread-safe.

    Args:
        reachability: receives hubs that cannot be reached.
        timings: heartbeat interval and timeout.
        wake: callback from another thread when the hub has sent something.
        runtime: clock and sockets.
        latest: receives each version of the round that the hub sends.

    Attributes:
        link: the connection, ``None`` without one.
        member: the node of the hub.
    """

    def __init__(
        self,
        reachability: Reachability,
        timings: RendezvousTimings,
        wake: Callable[[], None],
        runtime: Runtime,
        latest: LatestRound,
    ) -> None:
        self._reachability = reachability
        self._timings = timings
        self._wake = wake
        self._runtime = runtime
        self._latest = latest
        self._greeting: Watch | None = None
        self.link: Link | None = None
        self.member: Member | None = None

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
        greeting = _greeting(round_, self._reachability.marked(me, member.incarnation), member)
        link = self.link
        same = self.member is not None and self.member.incarnation == member.incarnation
        if link is not None and same and not link.broken:
            if greeting != self._greeting:
                link.position = None
                link.send(greeting)
                self.member, self._greeting = member, greeting
            return None
        self.close()
        seconds = self._timings.heartbeat_timeout.total_seconds() if timeout is None else timeout
        if self._reachability.is_hub_unreachable(member.incarnation):
            seconds = min(seconds, _SHORT_TIMEOUT_SECONDS)
        address = (member.host, member.hub_port)
        try:
            self.link = Link(
                address,
                greeting,
                self._timings,
                self._wake,
                runtime=self._runtime,
                timeout=seconds,
                latest=self._latest,
            )
        except OSError as error:
            if timeout is None and is_unreachable(error):
                self._reachability.failed(member, purpose, error, seconds)
            else:
                _LOG.info("The hub of %s cannot be reached: %s", member.node, error)
            return isinstance(error, ConnectionRefusedError)
        self._reachability.reached(member.incarnation, "hub")
        self.member, self._greeting = member, greeting
        return None

    def forward(self, round_: Round) -> None:
        """Send the hub a version of the round, unless the hub has sent it."""
        if self.link is not None and round_.is_newer_than(self.link.received):
            self.link.send(RoundChanged(round_))

    def take_read_request(self) -> bool:
        """Return, once, whether the hub has sent that the row has changed, but not to what."""
        if self.link is None or not self.link.must_read:
            return False
        self.link.must_read = False
        return True

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()
            self.link = self.member = None


def _greeting(round_: Round, me: Member, to: Member) -> Watch:
    is_open = round_.state == "open"
    return Watch(
        me.node,
        me.incarnation,
        round_.number,
        is_open,
        to.incarnation,
        me.strikes,
        me.unreached,
        me if is_open else None,
    )
