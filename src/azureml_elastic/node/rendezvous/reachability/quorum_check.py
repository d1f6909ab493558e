"""Whom to believe when rank 0's node does not answer: the others are asked whether they have reached it.

Either rank 0's node is gone, or cut off, and the round must go on without it; or it is this node that is cut off, and
the round must go on without *this* one. A node that decided that alone would break a round that is well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from azureml_elastic.node.rendezvous.runtime import Runtime
from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["QuorumCheck", "rank_0_is_cut_off"]

_MOST = 8
"""How many others are asked."""

_PATIENCE_SECONDS = 1.2
"""Long enough for the second attempt of TCP, which follows the first after a second."""


def rank_0_is_cut_off(answers: Sequence[bool | None]) -> bool | None:
    """Return whether most nodes cannot reach rank 0's; ``None`` where the answers do not tell.

    Args:
        answers: of other members: whether they have reached it, ``None`` where there was no answer. The node that asks
            has not.
    """
    if 2 * answers.count(False) > len(answers):
        return True
    return False if True in answers else None


class QuorumCheck:
    """Asks the hubs of other members.

    Args:
        machine: to connect from.
        node: this node's name.
    """

    def __init__(self, machine: Runtime, node: str) -> None:
        self._machine = machine
        self._node = node

    def ask(self, round_: Round) -> list[bool | None]:
        """Return whether other members of the sealed round have reached rank 0's node, ``None`` for no answer."""
        others = [member for member in round_.members[1:] if member.node != self._node][:_MOST]
        answers: list[bool | None] = [None] * len(others)
        threads = [
            self._machine.thread(partial(self._ask_one, other, round_.number, answers, index), "inquiry")
            for index, other in enumerate(others)
        ]
        for thread in threads:
            thread.start()
        until = self._machine.clock() + _PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - self._machine.clock()))
        return list(answers)

    def _ask_one(self, member: Member, number: int, answers: list[bool | None], index: int) -> None:
        answered = self._machine.event()

        def on_message(_: Any, message: Mapping[str, Any]) -> None:
            if message.get("op") == "answer":
                answers[index] = message["linked"]
                answered.set()

        on_close: Callable[[Any], None] = lambda _: answered.set()  # noqa: E731
        address = (member.host, member.hub_port)
        try:
            client = self._machine.dial(address, on_message, on_close, _nothing, _PATIENCE_SECONDS, _PATIENCE_SECONDS)
        except OSError:
            return
        client.send({"op": "ask", "to": member.incarnation, "round": number})
        answered.wait(_PATIENCE_SECONDS)
        client.close()


def _nothing() -> None:
    """Let a tick pass."""
