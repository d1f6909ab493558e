"""What happens to a node that joins a round, and what it does then; see :mod:`~azureml_elastic.node.core.joiner`.

An action whose docstring ends with the name of an event is a *call*: the driver performs it and brings that event
before any other. Where a newer version of the round is known than the one that the machine acts on, it does not perform
the call, and brings :class:`NewerRound` instead. At most one call is returned at a time, as the last action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from azureml_elastic.node.core.messages import Message, Watch
from azureml_elastic.node.core.round import Member, Round

__all__ = [
    "Action",
    "Call",
    "CandidatesTaken",
    "Connect",
    "ConnectFailed",
    "Connected",
    "Disconnect",
    "EndRound",
    "Enter",
    "Entered",
    "EntryFailed",
    "Event",
    "Finish",
    "Forward",
    "GetReady",
    "GotReady",
    "Greet",
    "HeartbeatRead",
    "HubSent",
    "KeyRead",
    "LinkEnded",
    "MarksChanged",
    "MembersAnswered",
    "NetworkCall",
    "NewerRound",
    "NoRoom",
    "NodeCall",
    "NudgeHeartbeat",
    "Offer",
    "Prepare",
    "Prepared",
    "QueryMembers",
    "ReadHeartbeat",
    "ReadKey",
    "ReadRound",
    "ReadRows",
    "Reopen",
    "Reopened",
    "Restore",
    "Roster",
    "RoundRead",
    "RoundTooLarge",
    "RoundWritten",
    "RowWritten",
    "RowsRead",
    "RowsUnavailable",
    "Started",
    "TableCall",
    "Take",
    "TakeCandidates",
    "TimerFired",
    "Warn",
    "Woken",
    "WriteRound",
    "WriteRow",
]

Roster = Mapping[str, Mapping[str, Any]]
"""Values of the members' rows by node. They are not parsed, since most nodes need one or two of a thousand."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The node wants to be in a round.

    Args:
        round: newest version of the round that is known.
        known: other nodes by name: the members of the round before, or the rows as they were read.
    """

    round: Round
    known: Mapping[str, Member | Mapping[str, Any]]


@dataclass(frozen=True)
class TimerFired:
    """The machine's deadline has passed."""


@dataclass(frozen=True)
class NewerRound:
    """A newer version of the round is known than the one that the machine acts on, from wherever."""

    round: Round


@dataclass(frozen=True)
class Woken:
    """This node's own hub may have received something.

    Args:
        should_seal: whether this node is among the first candidates at its hub.
        must_read: whether a hub has received that the round has changed, but not to what.
    """

    should_seal: bool = False
    must_read: bool = False


@dataclass(frozen=True)
class MarksChanged:
    """Other nodes can, or cannot, be reached than this node's row says; this is the row now."""

    me: Member


@dataclass(frozen=True)
class Connected:
    """The connection to another node's hub is there, and the greeting is sent."""


@dataclass(frozen=True)
class ConnectFailed:
    """Another node's hub cannot be reached.

    Args:
        refused: whether its machine has refused the connection.
        me: row of this node, with the nodes that it cannot reach.
    """

    refused: bool
    me: Member


@dataclass(frozen=True)
class HubSent:
    """The hub to which this node is connected has sent a message."""

    message: Message


@dataclass(frozen=True)
class LinkEnded:
    """A connection to a hub has ended other than by this node.

    Args:
        refused: whether the hub holds another key of the run.
        was_given_up: whether this process itself did not run for so long that the hub has given it up.
    """

    refused: bool = False
    was_given_up: bool = False


@dataclass(frozen=True)
class RoundRead:
    """The round's row was read."""

    round: Round


@dataclass(frozen=True)
class RowsRead:
    """All rows were read."""

    round: Round
    roster: Roster


@dataclass(frozen=True)
class RowsUnavailable:
    """The rows cannot be read now."""


@dataclass(frozen=True)
class CandidatesTaken:
    """What the other candidates have sent to this node's hub."""

    candidates: Sequence[Member]


@dataclass(frozen=True)
class Prepared:
    """The node can be a candidate.

    Args:
        wrote_round: whether this node has written the open round itself.
    """

    me: Member
    wrote_round: bool = False


@dataclass(frozen=True)
class RowWritten:
    """The node's own row was written."""


@dataclass(frozen=True)
class RoundWritten:
    """The round's row was written, or not because another node has changed it."""

    written: bool


@dataclass(frozen=True)
class RoundTooLarge:
    """The round does not fit into a row."""

    error: str


@dataclass(frozen=True)
class HeartbeatRead:
    """The heartbeat's row was read.

    Args:
        version: its version, ``None`` when there is none or the table is unavailable.
        round: number of the round that has written it last, 0 if there is none.
    """

    version: str | None
    round: int


@dataclass(frozen=True)
class KeyRead:
    """The run's key was read again; ``changed`` where it is another one."""

    changed: bool


@dataclass(frozen=True)
class Entered:
    """Rank 0's hub is reached; ``refused`` where it holds another key of the run."""

    refused: bool = False


@dataclass(frozen=True)
class EntryFailed:
    """Rank 0's hub is not reached.

    Args:
        reason: description with the address and the error.
        unreachable: whether its machine did not answer, so that this node may be the one that is cut off.
        me: row of this node, with the nodes that it cannot reach.
    """

    reason: str
    unreachable: bool
    me: Member


@dataclass(frozen=True)
class MembersAnswered:
    """Whether other members have reached rank 0's node, ``None`` for each that did not answer."""

    answers: Sequence[bool | None]


@dataclass(frozen=True)
class Reopened:
    """The round has ended, by this node or another one."""


@dataclass(frozen=True)
class GotReady:
    """The node could train; ``took_time`` where it had to wait for that."""

    took_time: bool


Event = (
    Started | TimerFired | NewerRound | Woken | MarksChanged | Connected | ConnectFailed | HubSent | LinkEnded
    | RoundRead | RowsRead | RowsUnavailable | CandidatesTaken | Prepared | RowWritten | RoundWritten | RoundTooLarge
    | HeartbeatRead | KeyRead | Entered | EntryFailed | MembersAnswered | Reopened | GotReady
)  # fmt: skip


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRound:
    """Read the round's row: :class:`RoundRead`."""


@dataclass(frozen=True)
class ReadRows:
    """Read all rows: :class:`RowsRead` or :class:`RowsUnavailable`."""


@dataclass(frozen=True)
class Restore:
    """Write the round's row again if it is older than a known version: :class:`RoundRead`."""

    row: Round
    known: Round


@dataclass(frozen=True)
class Prepare:
    """Count the strikes against this machine, and listen for the store of an open round: :class:`Prepared`."""

    round: Round


@dataclass(frozen=True)
class WriteRow:
    """Write this node's row, until then or until a newer version of the round is known: :class:`RowWritten`."""

    me: Member
    round: Round


@dataclass(frozen=True)
class WriteRound:
    """Replace the round's row if it is as it was read last: :class:`RoundWritten` or :class:`RoundTooLarge`."""

    to: Round


@dataclass(frozen=True)
class EndRound:
    """Replace the round's row if it still holds this sealed round: :class:`RoundWritten`."""

    round: Round
    to: Round


@dataclass(frozen=True)
class ReadHeartbeat:
    """Read the heartbeat's row: :class:`HeartbeatRead`."""


@dataclass(frozen=True)
class NudgeHeartbeat:
    """Change the heartbeat's row, so that the node that writes it looks at the round's row."""


@dataclass(frozen=True)
class ReadKey:
    """Read the run's key again: :class:`KeyRead`."""


@dataclass(frozen=True)
class Connect:
    """Connect to the hub of a node, instead of the one before: :class:`Connected` or :class:`ConnectFailed`.

    Args:
        greeting: first message.
    """

    to: Member
    greeting: Watch
    purpose: str


@dataclass(frozen=True)
class Greet:
    """Send the hub to which this node is connected what it waits for now."""

    greeting: Watch


@dataclass(frozen=True)
class Disconnect:
    """End the connection to another node's hub."""


@dataclass(frozen=True)
class Forward:
    """Send a version of the round to the nodes at this node's hub and, if it is not from there, to the other one."""

    round: Round
    to_hub: bool


@dataclass(frozen=True)
class Offer:
    """Add this node to the candidates at its own hub."""

    round: Round
    me: Member


@dataclass(frozen=True)
class TakeCandidates:
    """Take what the other candidates have sent to this node's hub: :class:`CandidatesTaken`."""


@dataclass(frozen=True)
class Enter:
    """Enter a sealed round at rank 0's hub: :class:`Entered` or :class:`EntryFailed`.

    Args:
        again: whether it is a further attempt, for which less time is enough.
    """

    round: Round
    rank: int
    again: bool = False


@dataclass(frozen=True)
class QueryMembers:
    """Ask other members whether they have reached rank 0's node: :class:`MembersAnswered`."""

    round: Round


@dataclass(frozen=True)
class Reopen:
    """End the round in which this node has a place: :class:`Reopened`."""

    reason: str
    lost: frozenset[str] = frozenset()
    round_failed: bool = False


@dataclass(frozen=True)
class GetReady:
    """Wait until the node could train, before it is a spare: :class:`GotReady`."""


@dataclass(frozen=True)
class NoRoom:
    """Log that a round makes no room for this node, because these members cannot reach it."""

    round: Round
    unreachable_from: tuple[str, ...]


@dataclass(frozen=True)
class Warn:
    """Log a warning."""

    text: str


@dataclass(frozen=True)
class Take:
    """The node has its place in the round."""


@dataclass(frozen=True)
class Finish:
    """The run has ended, as this round says."""

    round: Round


TableCall = ReadRound | ReadRows | Restore | WriteRow | WriteRound | EndRound | ReadKey
NetworkCall = Connect | TakeCandidates | QueryMembers
NodeCall = Prepare | Enter | Reopen | GetReady | ReadHeartbeat
Call = TableCall | NetworkCall | NodeCall

Action = Call | NudgeHeartbeat | Greet | Disconnect | Forward | Offer | NoRoom | Warn | Take | Finish
