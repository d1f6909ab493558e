"""What a member of a round does: the actions of :mod:`~azureml_elastic.node.core.training`."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.ipc.agent_messages import BroadcastBody, HangLesson, Prepare, ReportBody
from azureml_elastic.ipc.worker_messages import Decide
from azureml_elastic.node.core.failures import Failure, FailureRecord
from azureml_elastic.node.core.training_events import Hang

__all__ = [
    "AdoptVerdict",
    "AskWorkers",
    "AwaitSave",
    "Close",
    "Disconnect",
    "Entry",
    "FindPair",
    "FlushProgress",
    "ForgetSaves",
    "HangAction",
    "HoldWorkers",
    "InterruptWorkers",
    "LearnLesson",
    "Log",
    "Message",
    "MoveEngine",
    "NoteConnecting",
    "ReadFailures",
    "RecordFailure",
    "RecordHang",
    "Reopen",
    "ReportDone",
    "RowAction",
    "SaveAction",
    "StopWorkers",
    "Strike",
    "TellWorkers",
    "ToLeader",
    "ToMembers",
    "TrainingAction",
    "WorkersAction",
    "WriteStacks",
]


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
class Reopen:
    """End the round so that another can form, unless another node has; ``RowWritten`` answers.

    Args:
        lost: members that will not be back.
        finishing: those of them whose workers may still save.
        finishing_seconds: seconds for which the next round waits for these.
        failures: the run's failures with the one that ends the round; none where no worker has failed.
        round_failed: whether nobody is to blame but the network.
    """

    reason: str
    lost: frozenset[str] = frozenset()
    finishing: frozenset[str] = frozenset()
    finishing_seconds: float = 0.0
    failures: tuple[FailureRecord, ...] = ()
    round_failed: bool = False


@dataclass(frozen=True)
class Close:
    """End the run for all nodes, unless another node has; ``RowWritten`` answers.

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
class FindPair:
    """Look for an unreachable pair of nodes that keeps the workers from connecting; ``PairFound`` answers if so."""


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
    """Stop the workers unless they save at this moment; ``WorkersHeld`` answers if they are stopped."""


@dataclass(frozen=True)
class Log:
    """Write a line to the log."""

    text: str
    warning: bool = False


Message = ToLeader | ToMembers | ReportDone | Disconnect
WorkersAction = AskWorkers | TellWorkers | MoveEngine | InterruptWorkers | StopWorkers | FlushProgress
Entry = Strike | RecordFailure | RecordHang | NoteConnecting | Log
HangAction = AdoptVerdict | LearnLesson | WriteStacks
SaveAction = AwaitSave | ForgetSaves | HoldWorkers
RowAction = Reopen | Close
TrainingAction = Message | WorkersAction | Entry | HangAction | SaveAction | RowAction | ReadFailures | FindPair
