"""What happens to a node: the events of :mod:`~azureml_elastic.node.core.node`, :mod:`.joiner` and :mod:`.training`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from azureml_elastic.ipc.agent_messages import BroadcastBody, Decision, HangLesson, ReportBody, Vote
from azureml_elastic.node.core.failures import Failure
from azureml_elastic.node.core.messages import Message
from azureml_elastic.node.core.round import Member, Round

Roster = Mapping[str, Mapping[str, Any]]
"""Values of the members' rows by node. They are not parsed, since most nodes need one or two of a thousand."""


# --- between two rounds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlaceWanted:
    """The node asks for a place in a round."""


@dataclass(frozen=True)
class MustLeave:
    """The node must leave before it has a place in a round."""


@dataclass(frozen=True)
class ReadinessSeen:
    """How far the node's workers are before it asks for a place.

    Args:
        preloaded: whether a preload server makes the script's imports.
        ready: whether new workers would start with these.
        settled: whether they would start as fast as they ever will.
        importing: whether they would wait for the preload server, which has been started again.
        alive: whether there are workers and all of them run.
        parked: whether all of them wait for a place.
        ended: whether one has ended.
    """

    preloaded: bool = False
    ready: bool = True
    settled: bool = True
    importing: bool = False
    alive: bool = False
    parked: bool = False
    ended: bool = False


@dataclass(frozen=True)
class WorkersStarted:
    """The node's workers have been started, or have received their assignments."""


@dataclass(frozen=True)
class Abandoned:
    """A call was given up for a newer version of the round."""


@dataclass(frozen=True)
class RowSeen:
    """The round's row was looked at while the round runs.

    Args:
        round: the round for which it was.
        changed: whether the row holds another version; ``None`` where the table was unavailable.
    """

    round: Round
    changed: bool | None


# --- on the way into a round -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The round is known for which the node wants a place.

    Args:
        round: newest version of the round that is known.
        known: other nodes by name: the members of the round before, or the rows as they were read.
        has_left: whether this node's row says that it has left.
    """

    round: Round
    known: Mapping[str, Member | Mapping[str, Any]]
    has_left: bool = False


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
class RowPrepared:
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
class MembersReached:
    """The round's store and the other members can be reached."""


@dataclass(frozen=True)
class MemberUnreachable:
    """The round's store or another member cannot be reached, or the round has broken before it was known.

    Args:
        seen: what is known of the round.
    """

    reason: str
    seen: RoundSeen


@dataclass(frozen=True)
class MembersAnswered:
    """Whether other members have reached rank 0's node, ``None`` for each that did not answer."""

    answers: Sequence[bool | None]


@dataclass(frozen=True)
class GotReady:
    """The node could train; ``took_time`` where it had to wait for that."""

    took_time: bool


@dataclass(frozen=True)
class EndWritten:
    """``Reopen`` or ``Close`` was carried out.

    Args:
        mine: whether this node has changed the row; otherwise another one was first.
        left_in_order: lost members that had left before they could enter the round.
    """

    mine: bool
    left_in_order: frozenset[str] = frozenset()


JoinEvent = (
    Started | TimerFired | NewerRound | Woken | MarksChanged | Connected | ConnectFailed | HubSent | LinkEnded
    | RoundRead | RowsRead | RowsUnavailable | CandidatesTaken | RowPrepared | RowWritten | RoundWritten | RoundTooLarge
    | HeartbeatRead | KeyRead | Entered | EntryFailed | MembersReached | MemberUnreachable | MembersAnswered
    | EndWritten | GotReady | MustLeave | Abandoned
)  # fmt: skip


# --- in a round ------------------------------------------------------------------------------------------------------


Phase = Literal["start", "step", "pause", "free"]
"""What workers do, as far as their sessions have announced it."""


@dataclass(frozen=True)
class Hang:
    """A verdict.

    Args:
        step: the last step that a local worker has completed, 0 before the first.
        waited: seconds since then.
        limit: seconds that were allowed.
        phase: what the workers were doing, as far as is known.
    """

    step: int
    waited: float
    limit: float
    phase: Phase

    @property
    def reason(self) -> str:
        """Why the round ends."""
        what = f"no step after step {self.step}" if self.phase != "start" else "no first step of the round"
        pause = ", which a worker had announced to be busy," if self.phase == "pause" else ""
        return f"hang: {what}{pause} for {self.waited:.1f} s (limit {self.limit:.1f} s)"


@dataclass(frozen=True)
class Pace:
    """Monotonic seconds and step at which training began."""

    moment: float
    step: int


@dataclass(frozen=True)
class RoundSeen:
    """What is known of the round has changed.

    Args:
        over: whether the round has ended in the table or its hub is gone.
        waiting: spares to make room for; only on rank 0's node.
        all_done: whether the workers of all members have succeeded.
        was_given_up: whether the others have gone on without this node, because its process did not run for some time.
    """

    lost: frozenset[str] = frozenset()
    over: bool = False
    waiting: frozenset[str] = frozenset()
    all_done: bool = False
    was_given_up: bool = False

    @property
    def broken(self) -> bool:
        """Whether the workers of the round cannot go on."""
        return self.over or bool(self.lost)


@dataclass(frozen=True)
class WorkersSeen:
    """What the node's workers have reported in the round, or how they have ended, has changed.

    The exit codes are those of a moment before the reports, so that a worker that has ended and is not ``leaving`` has
    no message under way.

    Args:
        present: local ranks that are connected.
        in_session: whether every local worker has, or has had, a session.
        trained: whether a local worker has completed a step.
        leaving: whether one is connected that ends, or parks, once it is interrupted.
        step: furthest step that one has completed.
        pace: when and where training began.
        expected: number of steps of the whole run, ``None`` while it is unknown.
        finished: local ranks whose training loop has ended.
        stopped: local ranks that have left at a step boundary.
        gave_way: local ranks that exit because the round is over or cannot go on.
        exit_codes: exit codes of those that have ended, by local rank; negative: the signal.
        importing: whether new ones would wait for imports, as the preload server has ended with these.
    """

    present: frozenset[int] = frozenset()
    in_session: bool = False
    trained: bool = False
    leaving: bool = False
    step: int = 0
    pace: Pace | None = None
    expected: int | None = None
    finished: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    gave_way: frozenset[int] = frozenset()
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    importing: bool = False


@dataclass(frozen=True)
class ProgramEnded:
    """The program of an engine has ended well on this node."""


@dataclass(frozen=True)
class WorkerVoted:
    """A worker has answered a proposal."""

    local_rank: int
    vote: Vote


@dataclass(frozen=True)
class FromLeader:
    """Rank 0's agent has broadcast this."""

    body: BroadcastBody


@dataclass(frozen=True)
class FromMember:
    """A node's agent has reported this to this one, which is rank 0's."""

    node: str
    body: ReportBody


def in_order(messages: Sequence[FromMember | FromLeader]) -> tuple[list[FromMember | FromLeader], list[FromLeader]]:
    """Return the messages that a member takes before what is known of the round and of its workers, and those after.

    Who has stopped, or leaves at a step that is decided, may be gone already. A proposal comes after the report of the
    workers, who are asked.
    """
    early: list[FromMember | FromLeader] = []
    others: list[FromLeader] = []
    for message in messages:
        if isinstance(message, FromLeader) and not isinstance(message.body, Decision):
            others.append(message)
        else:
            early.append(message)
    return early, others


@dataclass(frozen=True)
class Noticed:
    """This node must leave, which is final.

    Args:
        until: monotonic seconds at which its workers must have ended.
    """

    until: float
    reason: str = ""


@dataclass(frozen=True)
class StoreUsed:
    """Workers have set keys in the round's store, which this node serves: they begin to connect to each other."""


@dataclass(frozen=True)
class StoreEnded:
    """The process of the round's store, which this node serves, has ended.

    Args:
        failure: the failure that it counts as.
    """

    failure: Failure


@dataclass(frozen=True)
class Hung:
    """This node's own verdict: the round hangs.

    Args:
        failure: the failure that it counts as.
    """

    hang: Hang
    failure: Failure


@dataclass(frozen=True)
class Learned:
    """Rank 0's node has learned durations that the others may not have seen."""

    lesson: HangLesson


@dataclass(frozen=True)
class StacksWritten:
    """The stacks of this node's workers are written, as far as they could be had."""


@dataclass(frozen=True)
class ProgramSaved:
    """A program without a session has saved while nodes wait, and waits in the next step of its training."""


@dataclass(frozen=True)
class Failures:
    """How workers have failed, as ``ReadFailures`` has asked.

    Args:
        codes: their exit codes by local rank, without those that gave way.
        failure: the root cause; ``None`` where all gave way.
        ending: how the worker of the root cause has ended, in words.
        fault: why the host is at fault, ``None`` where it is not.
    """

    codes: Mapping[int, int] = field(default_factory=dict)
    failure: Failure | None = None
    ending: str = ""
    fault: str | None = None


@dataclass(frozen=True)
class TimePassed:
    """Nothing else has happened in this turn of the agent's loop, or a deadline has come."""


TrainingEvent = (
    RoundSeen
    | WorkersSeen
    | ProgramEnded
    | WorkerVoted
    | FromLeader
    | FromMember
    | Noticed
    | StoreUsed
    | StoreEnded
    | Hung
    | Learned
    | StacksWritten
    | ProgramSaved
    | Failures
    | EndWritten
    | TimePassed
)

NodeEvent = PlaceWanted | MustLeave | ReadinessSeen | WorkersStarted | Abandoned | JoinEvent | TrainingEvent
