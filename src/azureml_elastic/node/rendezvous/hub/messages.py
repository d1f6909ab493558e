"""The messages between the agents of a run.

A member of a round sends :class:`Hello` to the hub of rank 0's node, then :class:`Beat`, :class:`Done`,
:class:`Report`, :class:`Unreachable`, :class:`Reached` and :class:`RoundChanged`. A node that waits for a round sends
:class:`Watch` to a hub, then :class:`Beat` and :class:`RoundChanged`. Any node may send :class:`LeaderQuery`, which the
hub answers with :class:`LeaderAnswer`.

A hub sends :class:`Beat` and :class:`RoundChanged` to all, :class:`SealPosition` to waiting nodes, and :class:`Lost`,
:class:`AllDone` and :class:`Broadcast` to members.

``to`` is the incarnation for which a message is meant: the port of a node that has died may belong to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import PlainSerializer, PlainValidator

from azureml_elastic.ipc.message import MessageCodec
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.round_codec import pack, unpack

__all__ = [
    "CODEC",
    "AllDone",
    "Beat",
    "Broadcast",
    "Done",
    "Greeting",
    "Hello",
    "LeaderAnswer",
    "LeaderQuery",
    "Lost",
    "Message",
    "Reached",
    "Report",
    "RoundChanged",
    "SealPosition",
    "Unreachable",
    "Watch",
]


def _unpack(text: object) -> Round | None:
    return None if text is None else unpack(str(text))


def _pack(round_: Round | None) -> str | None:
    return None if round_ is None else pack(round_)


@dataclass(frozen=True)
class Beat:
    """Sign of life, in both directions."""


@dataclass(frozen=True)
class RoundChanged:
    """The round's row has changed.

    Args:
        round: the new version, ``None`` where the receiver must read it in the table.
    """

    round: Annotated[Round | None, PlainValidator(_unpack), PlainSerializer(_pack)] = None


@dataclass(frozen=True)
class Hello:
    """First message of a member of a sealed round."""

    node: str
    round: int
    to: str = ""


@dataclass(frozen=True)
class Done:
    """The workers of the member's node have succeeded."""


@dataclass(frozen=True)
class Report:
    """Message to rank 0's agent.

    Args:
        body: JSON object for the agent.
    """

    body: Mapping[str, Any]


@dataclass(frozen=True)
class Unreachable:
    """The member cannot reach another node.

    Args:
        text: description with both names.
    """

    text: str


@dataclass(frozen=True)
class Reached:
    """The member can reach another node again.

    Args:
        incarnation: incarnation of that node.
    """

    incarnation: str


@dataclass(frozen=True)
class Watch:
    """A node waits, beside a sealed round or for the seal of an open one.

    Args:
        node: name of the node.
        incarnation: incarnation of the node.
        round: number of the round in the newest row version that the node has seen.
        is_open: whether that round is open.
        to: incarnation of the hub's node.
        strikes: number of strikes against the node's machine.
        unreached: incarnations of the nodes that it cannot reach.
        candidacy: the row with which it wants to be in the open round.
    """

    node: str
    incarnation: str
    round: int
    is_open: bool = False
    to: str = ""
    strikes: int = 0
    unreached: tuple[str, ...] = ()
    candidacy: Member | None = None


@dataclass(frozen=True)
class LeaderQuery:
    """Request to report whether the hub's node has reached rank 0's hub of this round."""

    round: int
    to: str = ""


@dataclass(frozen=True)
class LeaderAnswer:
    """Answer to a :class:`LeaderQuery`; ``None`` where the hub's node does not know yet."""

    reached: bool | None = None


@dataclass(frozen=True)
class SealPosition:
    """Position of a waiting node among the candidates that the hub has chosen to seal the open round.

    Args:
        position: 0 for the node that should seal, larger for nodes that should be ready to, ``None`` for all others.
        unreachable_from: members that cannot reach the node, because of which the round makes no room for it.
    """

    position: int | None = None
    unreachable_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lost:
    """Members are gone.

    Args:
        nodes: names of the members.
        absent: those of them that have never connected.
    """

    nodes: tuple[str, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class AllDone:
    """The workers of all members have succeeded."""


@dataclass(frozen=True)
class Broadcast:
    """Message of rank 0's agent to the agents of all members.

    Args:
        body: JSON object for the agents.
    """

    body: Mapping[str, Any]


Message = (
    Beat
    | RoundChanged
    | Hello
    | Done
    | Report
    | Unreachable
    | Reached
    | Watch
    | LeaderQuery
    | LeaderAnswer
    | SealPosition
    | Lost
    | AllDone
    | Broadcast
)

Greeting = Hello | Watch | LeaderQuery
"""The messages with which a node opens a connection to a hub."""

CODEC: MessageCodec[Message] = MessageCodec(*get_args(Message))
