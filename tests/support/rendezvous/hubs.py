"""A hub and connections to hubs without a rendezvous around them."""

from __future__ import annotations

import time

from azureml_elastic.config import RendezvousTimings
from azureml_elastic.ipc import KEY_BYTES, Peer
from azureml_elastic.node.core.node import Node
from azureml_elastic.node.core.round import Limits, Member
from azureml_elastic.node.rendezvous.context import Context, Runtime
from azureml_elastic.node.rendezvous.hub import Hub
from azureml_elastic.node.rendezvous.link import Membership


class PausableRuntime(Runtime):
    """A runtime whose clock can be moved forward, as after a pause of the process."""

    offset = 0.0

    def clock(self) -> float:
        return time.monotonic() + self.offset


def make_context(timings: RendezvousTimings | None = None, runtime: Runtime | None = None, node: str = "h") -> Context:
    context = Context(Limits(1, 8), timings or RendezvousTimings(), runtime or Runtime(), Peer(node, f"i-{node}"))
    context.authenticator.key = bytes(KEY_BYTES)
    return context


def hub_at(port: int) -> Member:
    """Return the row of the node whose hub has this port."""
    return Member("h", "", host="127.0.0.1", hub_port=port)


def start_hub(context: Context | None = None) -> Hub:
    context = context or make_context()
    me = Member(context.authenticator.me.name, context.authenticator.me.incarnation)
    machine = Node(me, context.limits, context.timings, context.latest)
    return Hub(context, context.runtime.listen("127.0.0.1", 100), Membership(context, machine))
