"""What a node does: the actions of :mod:`~azureml_elastic.node.core.node`, of :mod:`.joiner` and of :mod:`.training`.

Outside of a round an action whose docstring ends with the name of an event is a *call*: that event is brought before
any other, or :class:`~.events.Abandoned` where a newer version of the round is known by then. At most one call is
returned at a time, as the last action.
"""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.ipc.agent_messages import BroadcastBody, HangLesson, Prepare, ReportBody
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core.events import Hang
from azureml_elastic.node.core.failures import Failure, FailureRecord
from azureml_elastic.node.core.messages import Watch
from azureml_elastic.node.core.round import Member, Round

# --- between two rounds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordReady:
    """Record in the ledger that the node could train."""


@dataclass(frozen=True)
class ReplaceWorkers:
    """End the workers, which hand their state over, and start new ones that run up to their session."""


@dataclass(frozen=True)
class FailEarly:
    """End the run, as a worker has ended before it could take part."""


@dataclass(frozen=True)
class LeaveRound:
    """End the connection to rank 0's hub, and what belongs to the round."""


@dataclass(frozen=True)
class FindRound:
    """Find out at which version the round is, and who takes part: :class:`Started`.

    Args:
        before: the round in which this node was, ``None`` for none.
    """

    before: Round | None


@dataclass(frozen=True)
class StartWorkers:
    """Give the workers their places: :class:`WorkersStarted`."""

    round: Round
    rank: int


@dataclass(frozen=True)
class LeaveRun:
    """Leave before the node has a place in a round."""


@dataclass(frozen=True)
class LookAtRow:
    """Read the round's row beside all else; :class:`~.events.RowSeen` tells what it holds."""

    round: Round


# --- on the way into a round -----------------------------------------------------------------------------------------


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
class PrepareRow:
    """Count the strikes against this machine, and listen for the store of an open round: :class:`RowPrepared`.

    Args:
        was_lost: whether the others have lost this node, and may have written strikes against its machine since.
        reaches_again: whether members that it has connected to are connected to again.
    """

    round: Round
    was_lost: bool = False
    reaches_again: bool = False


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
class EndWatch:
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
class ReachMembers:
    """Connect to what workers will connect to: ``MembersReached`` or ``MemberUnreachable``."""

    round: Round


@dataclass(frozen=True)
class QueryMembers:
    """Ask other members whether they have reached rank 0's node: :class:`MembersAnswered`."""

    round: Round


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


# --- in a round ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToLeader:
    """Send to rank 0's agent."""

    body: ReportBody


@dataclass(frozen=True)
class ToMembers:
    """Send to the agents of all members, this one included."""

    body: BroadcastBody


@dataclass(frozen=True)
class ReportDone:
    """Send to rank 0's hub that this node's workers have succeeded."""


@dataclass(frozen=True)
class AskWorkers:
    """Send the workers a proposal, which each answers."""

    proposal: Prepare


@dataclass(frozen=True)
class TellWorkers:
    """Send the workers a decision."""

    decision: Decide


@dataclass(frozen=True)
class MoveEngine:
    """Have the engine move what it holds to other nodes."""


@dataclass(frozen=True)
class InterruptWorkers:
    """Send the workers that the round is over: they hand their state over, and end or park."""


@dataclass(frozen=True)
class StopWorkers:
    """Have the workers, parked ones too, hand their state over, and end them.

    Args:
        seconds: seconds between SIGTERM and SIGKILL of workers without a session, ``None`` for the usual ones.
    """

    seconds: float | None = None


@dataclass(frozen=True)
class ReadFailures:
    """Find out how the workers that did not end well have failed; ``Failures`` answers.

    Args:
        gave_way: local ranks that do not count.
    """

    gave_way: frozenset[int] = frozenset()


@dataclass(frozen=True)
class FlushProgress:
    """Record the last step of the round, of which no more messages count."""


@dataclass(frozen=True)
class Disconnect:
    """End the connection to rank 0's hub, which notices before the table is updated."""


@dataclass(frozen=True)
class AwaitEnd:
    """Connect to the hub of the survivor that is to end the round, which sends the next one to those at its own hub.

    Args:
        timeout: seconds to connect in.
    """

    by: Member
    timeout: float


@dataclass(frozen=True)
class Reopen:
    """End the round so that another can form, unless another node has; ``EndWritten`` answers.

    Args:
        lost: members that will not be back.
        finishing: those of them whose workers may still save.
        finishing_seconds: seconds for which the next round waits for these.
        failures: the run's failures with the one that ends the round; none where no worker has failed.
        round_failed: whether nobody is to blame but the network.
        at_once: whether no other member knows why the round ends, so that this one leaves it to none.
    """

    reason: str
    lost: frozenset[str] = frozenset()
    finishing: frozenset[str] = frozenset()
    finishing_seconds: float = 0.0
    failures: tuple[FailureRecord, ...] = ()
    round_failed: bool = False
    at_once: bool = False


@dataclass(frozen=True)
class Close:
    """End the run for all nodes, unless another node has; ``EndWritten`` answers.

    Args:
        failures: its failures, with the one that ends it.
    """

    succeeded: bool
    message: str = ""
    exit_code: int = 0
    failures: tuple[FailureRecord, ...] = ()


@dataclass(frozen=True)
class Strike:
    """Hold something against a host."""

    host: str
    reason: str


@dataclass(frozen=True)
class RecordFailure:
    """Record a worker's failure in the ledger; ``step`` is the last one that the node's workers have completed."""

    failure: Failure
    step: int | None


@dataclass(frozen=True)
class RecordHang:
    """Record a hang in the ledger."""

    hang: Hang


@dataclass(frozen=True)
class AdoptVerdict:
    """Have the detector take in another agent's verdict: no second one in this round, longer limits in the next."""

    hang: Hang


@dataclass(frozen=True)
class LearnLesson:
    """Have the detector adopt longer durations that another agent has learned."""

    lesson: HangLesson


@dataclass(frozen=True)
class WriteStacks:
    """Collect and write the stacks of the workers; ``StacksWritten`` answers."""

    hang: Hang


@dataclass(frozen=True)
class NoteConnecting:
    """Note that workers have begun to connect to each other."""


@dataclass(frozen=True)
class AwaitSave:
    """Look for saves of the program, for which these nodes wait; ``ProgramSaved`` answers, perhaps several times."""

    waiting: frozenset[str]


@dataclass(frozen=True)
class ForgetSaves:
    """Stop looking for saves."""


@dataclass(frozen=True)
class HoldWorkers:
    """Keep the worker that waits in the step after a save there until it is ended."""


@dataclass(frozen=True)
class Log:
    """Write a line to the log."""

    text: str
    warning: bool = False


Sending = ToLeader | ToMembers | ReportDone | Disconnect | AwaitEnd
WorkersAction = AskWorkers | TellWorkers | MoveEngine | InterruptWorkers | StopWorkers | FlushProgress
Entry = Strike | RecordFailure | RecordHang | NoteConnecting | Log
HangAction = AdoptVerdict | LearnLesson | WriteStacks
SaveAction = AwaitSave | ForgetSaves | HoldWorkers
RowAction = Reopen | Close
TrainingAction = Sending | WorkersAction | Entry | HangAction | SaveAction | RowAction | ReadFailures

TableCall = ReadRound | ReadRows | Restore | WriteRow | WriteRound | EndRound | ReadKey
NetworkCall = Connect | TakeCandidates | QueryMembers | ReachMembers
NodeCall = PrepareRow | Enter | ReadHeartbeat
RendezvousCall = TableCall | NetworkCall | NodeCall
Call = RendezvousCall | Reopen | GetReady

JoinStep = NudgeHeartbeat | Greet | EndWatch | Forward | Offer | NoRoom | Warn | Take | Finish
JoinAction = Call | JoinStep

Preparing = RecordReady | ReplaceWorkers | FailEarly
BetweenRounds = Preparing | LeaveRound | FindRound | StartWorkers | LeaveRun | LookAtRow
Action = BetweenRounds | JoinAction | TrainingAction
