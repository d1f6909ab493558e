"""The majority's view of whether rank 0's node can be reached.

Where rank 0's node does not answer, either it is gone or cut off, and the round must go on without it; or this node is
cut off, and the round must go on without this one. A node that decided that alone could end a round that works.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from azureml_elastic.ipc import Connection, Peer
from azureml_elastic.node.core.messages import CODEC, LeaderAnswer, LeaderQuery
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.context import Context

__all__ = ["query_members"]

_MAX_QUERIES = 8
"""Largest number of members that are queried."""

_TIMEOUT_SECONDS = 1.2
"""Long enough for TCP's second attempt, which follows the first after a second."""


def query_members(context: Context, round_: Round, node: str) -> list[bool | None]:
    """Query members of a sealed round whether they have reached rank 0's node.

    Args:
        context: settings and shared objects.
        round_: sealed round.
        node: name of this node, which is not queried.

    Returns:
        The answers, ``None`` for each member that did not answer.
    """
    runtime = context.runtime
    others = [member for member in round_.members[1:] if member.node != node][:_MAX_QUERIES]
    answers: list[bool | None] = [None] * len(others)

    def query(index: int, member: Member) -> None:
        answered = runtime.event()

        def on_message(connection: Connection, fields: Mapping[str, Any]) -> None:
            message = CODEC.receive(connection, fields)
            if isinstance(message, LeaderAnswer):
                answers[index] = message.reached
                answered.set()

        def on_close(_: Connection) -> None:
            answered.set()

        address = (member.host, member.hub_port)
        try:
            client = runtime.dial(
                address,
                on_message,
                on_close,
                lambda: None,
                _TIMEOUT_SECONDS,
                _TIMEOUT_SECONDS,
                context.authenticator,
                Peer(member.node, member.incarnation),
            )
        except OSError:
            return
        client.send(CODEC.encode(LeaderQuery(round_.number)))
        answered.wait(_TIMEOUT_SECONDS)
        client.close()

    threads = [runtime.thread(partial(query, *each), "quorum check") for each in enumerate(others)]
    for thread in threads:
        thread.start()
    until = runtime.clock() + _TIMEOUT_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - runtime.clock()))
    return list(answers)
