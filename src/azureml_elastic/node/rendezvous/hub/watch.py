"""The hub of another node to which a waiting node is connected."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from azureml_elastic.node.core.messages import Message, Watch
from azureml_elastic.node.core.round import Member
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
    """

    context: Context
    reachability: Reachability
    link: Link | None = field(default=None, init=False)
    _incarnation: str = field(default="", init=False)

    def connect(self, to: Member, greeting: Watch, purpose: str, timeout: float | None = None) -> OSError | None:
        """Send a hub what this node waits for, on a new connection unless there is one to it.

        Args:
            to: node of the hub.
            greeting: what this node waits for.
            purpose: description of the hub's node for log messages.
            timeout: seconds to connect in, too short to conclude that the node cannot be reached; ``None`` for the
                heartbeat timeout.

        Returns:
            ``None`` if connected, else why not.
        """
        if self.link is not None and not self.link.broken and self._incarnation == to.incarnation:
            self.link.send(greeting)
            return None
        self.close()
        seconds = self.context.heartbeat_timeout if timeout is None else timeout
        if self.reachability.is_hub_unreachable(to.incarnation):
            seconds = min(seconds, _SHORT_TIMEOUT_SECONDS)
        try:
            self.link, self._incarnation = Link(self.context, to, greeting, seconds), to.incarnation
        except OSError as error:
            if timeout is None and is_unreachable(error):
                self.reachability.failed(to, purpose, error, seconds)
            else:
                _LOG.info("The hub of %s cannot be reached: %s", to.node, error)
            return error
        self.reachability.reached(to.incarnation, "hub")
        return None

    def send(self, message: Message) -> None:
        """Send a message to the hub, if this node is connected to one."""
        if self.link is not None:
            self.link.send(message)

    def close(self) -> None:
        """End the connection."""
        if self.link is not None:
            self.link.close()
            self.link = None
