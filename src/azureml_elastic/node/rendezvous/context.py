"""The settings and objects that all parts of one node's rendezvous share."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import Authenticator, Peer
from azureml_elastic.node.core.join_events import HubSent, LinkEnded
from azureml_elastic.node.core.pauses import SilenceLimit
from azureml_elastic.node.core.round import Limits
from azureml_elastic.node.rendezvous.inbox import Inbox
from azureml_elastic.node.rendezvous.local_node import Surroundings
from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.shared_round import SharedNewestRound

if TYPE_CHECKING:
    from azureml_elastic.node.rendezvous.hub.link import Link

__all__ = ["Context"]


class Context:
    """Settings and shared objects of one node's rendezvous.

    Args:
        limits: node counts of a round.
        timings: heartbeat interval and timeouts.
        runtime: clock, threads and sockets.
        me: this node's name and incarnation.
        surroundings: the rest of the node; by default none.
        wake: event for the agent's thread; ``None`` for a new one.

    Attributes:
        authenticator: this node's part in the handshakes with other nodes; gets the run's key once it is read.
        clock: clock in monotonic seconds.
        wake: event for the agent's thread; other threads set it when a hub has sent something or the state has changed.
        inbox: messages of other agents for the agent's thread.
        received: what hubs have sent on connections of this node, and the ends of these, for the agent's thread.
        latest: newest version of the round that this node has read, written or received.
        heartbeat_timeout: silence in seconds after which a peer counts as lost.
        tick: seconds between two heartbeats of a connection.
        silence: limit of the silence of the nodes of a round.
    """

    def __init__(
        self,
        limits: Limits,
        timings: RendezvousTimings,
        runtime: Runtime,
        me: Peer,
        surroundings: Surroundings | None = None,
        wake: threading.Event | None = None,
    ) -> None:
        self.limits = limits
        self.timings = timings
        self.runtime = runtime
        self.surroundings = surroundings or Surroundings()
        self.authenticator = Authenticator(me, "hub")
        self.clock = runtime.clock
        self.wake = wake or runtime.event()
        self.inbox = Inbox()
        self.received: deque[tuple[Link, HubSent | LinkEnded]] = deque()
        self.latest = SharedNewestRound()
        self.heartbeat_timeout = timings.heartbeat_timeout.total_seconds()
        self.tick = timings.heartbeat_interval.total_seconds() / 2
        self.silence = SilenceLimit(timings)
