"""The messages between the agents of a run.

A member of a round sends :class:`MemberHello` to the hub of rank 0's node, then :class:`Beat`, :class:`Done`,
:class:`Report`, :class:`Unreachable`, :class:`Reached` and :class:`RoundChanged`. A node that waits for a round sends
:class:`Watch` to a hub, then :class:`Beat` and :class:`RoundChanged`. Any node may send :class:`LeaderQuery`, which the
hub answers with :class:`LeaderAnswer`.

A hub sends :class:`Beat` and :class:`RoundChanged` to all, :class:`SealPosition` to waiting nodes, and :class:`Lost`,
:class:`AllDone` and :class:`Broadcast` to members.

A node that has a shard of a snapshot for another sends :class:`ShardOffer` to that node's hub, on a connection of its
own; see :mod:`~azureml_elastic.node.agent.shard_transfer`.

The sender's name and incarnation are those that it has proved in the connection's handshake.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from azureml_elastic.ipc.agent_messages import BROADCASTS, REPORTS, BroadcastBody, ReportBody
from azureml_elastic.ipc.message import Count, MessageCodec, Name, ShardDescription, Text
from azureml_elastic.node.core.round import Member, Round

_MAX_BYTES = 8 << 20
"""Longest row in bytes: more than the table takes, so that a short text cannot fill the memory."""


@lru_cache(maxsize=4)  # the same round goes to the node's own hub and to another one
def pack(round_: Round) -> str:
    """Return the round as text for a message.

    A thousand members are 200 KB of JSON, which a hub would encode for each of a thousand nodes; a compressed text
    without characters to escape costs almost nothing.
    """
    return base64.b64encode(zlib.compress(json.dumps(round_.to_value(), separators=(",", ":")).encode(), 1)).decode()


@lru_cache(maxsize=8)  # the same round arrives from several hubs
def unpack(text: str) -> Round:
    """Return the round that :func:`pack` has packed.

    Raises:
        ValueError: the text is not a packed round.
    """
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        if stream.eof:
            return Round.from_value(json.loads(data))
    except (zlib.error, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{text[:40]!r} is no packed round: {error}") from error
    raise ValueError(f"{text[:40]!r} is no packed round: it is cut off, or longer than {_MAX_BYTES} bytes")


def _unpack(text: object) -> Round | None:
    return None if text is None else unpack(str(text))


def _pack(round_: Round | None) -> str | None:
    return None if round_ is None else pack(round_)


class Message:
    """Base of all messages."""


@dataclass(frozen=True)
class Beat(Message):
    """Sign of life, in both directions.

    Args:
        pause: longest pause of a node that the sender knows of, in seconds.
    """

    pause: float = 0.0


@dataclass(frozen=True)
class RoundChanged(Message):
    """The round's row has changed to this version; ``None`` where the receiver must read it in the table."""

    round: Annotated[Round | None, PlainValidator(_unpack), PlainSerializer(_pack)] = None


@dataclass(frozen=True)
class MemberHello(Message):
    """First message of a member of a sealed round."""

    round: Count


@dataclass(frozen=True)
class Done(Message):
    """The workers of the member's node have succeeded."""


@dataclass(frozen=True)
class Report(Message):
    """Message of a member's agent to rank 0's agent."""

    body: Annotated[ReportBody, PlainValidator(REPORTS.decode), PlainSerializer(REPORTS.encode)]


@dataclass(frozen=True)
class Reached(Message):
    """The member can reach the node of this incarnation again."""

    incarnation: Name


@dataclass(frozen=True)
class Watch(Message):
    """A node waits, beside a sealed round or for the seal of an open one.

    Args:
        round: number of the round in the newest row version that the node has seen.
        strikes: number of strikes against the node's machine.
        unreached: incarnations of the nodes that it cannot reach.
        candidacy: the row with which it wants to be in the open round.
    """

    round: Count
    is_open: bool = False
    strikes: Count = 0
    unreached: tuple[Name, ...] = ()
    candidacy: Member | None = None


@dataclass(frozen=True)
class LeaderQuery(Message):
    """Request to report whether the hub's node has reached rank 0's hub of this round."""

    round: Count


@dataclass(frozen=True)
class LeaderAnswer(Message):
    """Answer to a :class:`LeaderQuery`; ``None`` where the hub's node does not know yet."""

    reached: bool | None = None


@dataclass(frozen=True)
class SealPosition(Message):
    """Position of a waiting node among the candidates that the hub has chosen to seal the open round.

    Args:
        position: 0 for the node that should seal, larger for nodes that should be ready to, ``None`` for all others.
        unreachable_from: members that cannot reach the node, because of which the round makes no room for it.
    """

    position: Count | None = None
    unreachable_from: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Lost(Message):
    """Members are gone; those that have never connected are ``absent``, too."""

    nodes: tuple[Name, ...]
    absent: tuple[Name, ...] = ()


@dataclass(frozen=True)
class AllDone(Message):
    """The workers of all members have succeeded."""


@dataclass(frozen=True)
class Broadcast(Message):
    """Message of rank 0's agent to the agents of all members."""

    body: Annotated[BroadcastBody, PlainValidator(BROADCASTS.decode), PlainSerializer(BROADCASTS.encode)]


@dataclass(frozen=True)
class ShardOffer(Message):
    """A node wants this one to hold a shard, which it sends on this connection."""

    shard: ShardDescription


@dataclass(frozen=True)
class ShardReady(Message):
    """There is memory for the shard: its bytes can be sent, over TLS."""


@dataclass(frozen=True)
class ShardHeld(Message):
    """The node holds the shard."""


@dataclass(frozen=True)
class ShardRefused(Message):
    """The node does not hold the shard."""

    reason: Text


CODEC: MessageCodec[Message] = MessageCodec(*Message.__subclasses__())
