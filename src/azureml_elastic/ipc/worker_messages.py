"""The messages between an agent and its workers, and the codec of each direction.

A worker opens its connection with :class:`Hello`. A message of :data:`Request` has an ``"id"``, and the agent answers
it with one of :data:`Reply`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, get_args

from pydantic import Field, PlainSerializer

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.ipc.agent_interface import Action, HeldCopies
from azureml_elastic.ipc.message import Count, FileName, MessageCodec, Seconds, ShardDescription, Text
from azureml_elastic.ledger.metric_names import ALLOWED_NAME, LONGEST_NAME, MOST_VALUES

MetricName = Annotated[str, Field(max_length=LONGEST_NAME, pattern=f"^{ALLOWED_NAME}$")]
"""The name of a logged value, as a field of a message."""

MetricValue = Annotated[float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value))]
"""A logged value, as a field of a message; NaN and infinity, which JSON lacks, are texts."""


@dataclass(frozen=True)
class Hello:
    """First message of a worker; ``round`` is 0 where the worker waits for an assignment."""

    local_rank: Count
    rank: Count
    round: Count


@dataclass(frozen=True)
class Step:
    """The worker has completed a step; ``samples`` over all ranks were trained since its last message of this kind."""

    step: Count
    samples: Count = 0


@dataclass(frozen=True)
class Logged:
    """Values that the script has logged for a step, by name; sent by rank 0."""

    step: Count
    values: Annotated[dict[MetricName, MetricValue], Field(max_length=MOST_VALUES)]


@dataclass(frozen=True)
class Busy:
    """The next step takes longer than usual; unless ``bounded``, for an unlimited time."""

    bounded: bool = True


@dataclass(frozen=True)
class Free:
    """What :class:`Busy` announced is over."""


@dataclass(frozen=True)
class Expects:
    """Number of steps of the whole run."""

    steps: Count


@dataclass(frozen=True)
class Vote:
    """Answer to :class:`Prepare`: of a worker to its agent, and of all workers of a node to rank 0's agent.

    Args:
        boundary: number of the proposal.
        ok: whether the step is still ahead.
        step: last completed step; of several workers the furthest.
        capable: whether every worker has a session; a worker that answers has one.
        finished: whether the training loop of a worker has ended.
    """

    boundary: Count
    ok: bool
    step: Count
    capable: bool = True
    finished: bool = False


@dataclass(frozen=True)
class Parked:
    """The worker waits for its assignment in the next round."""


@dataclass(frozen=True)
class Restored:
    """Rank 0 starts training after this step, from this checkpoint directory."""

    step: Count
    directory: Text | None = None


@dataclass(frozen=True)
class Damaged:
    """A checkpoint cannot be restored."""

    directory: Text
    problems: Text


@dataclass(frozen=True)
class Stopped:
    """The worker has saved or handed over its state at a step boundary, and ends or parks."""

    step: Count


@dataclass(frozen=True)
class Finished:
    """The worker's training loop has ended."""

    step: Count


@dataclass(frozen=True)
class GaveWay:
    """The worker exits because its round is over or cannot go on, whatever its exit code is: it has not failed."""


@dataclass(frozen=True)
class Pointer:
    """Request for the committed checkpoint."""


@dataclass(frozen=True)
class Commit:
    """Request to commit a checkpoint; ``seconds`` is the time for which it blocked the training loop."""

    directory: Text
    step: Count
    digest: Text
    seconds: Seconds


@dataclass(frozen=True)
class HandOver:
    """Request to hold the memory behind a file descriptor of the process, which contains the state after a step.

    Of a sharded state each process hands its part over: ``part`` is then its local rank.
    """

    pid: Count
    fd: Count
    step: Count
    part: Count | None = None


@dataclass(frozen=True)
class Memory:
    """Request for all that the agent holds."""


@dataclass(frozen=True)
class HoldShard:
    """Request to hold a snapshot shard, the memory behind a file descriptor of the process."""

    pid: Count
    fd: Count
    shard: ShardDescription


@dataclass(frozen=True)
class ReplicateShard:
    """Request to send a shard that the agent holds to the agent of another rank, which holds it, too."""

    folder: FileName
    file: FileName
    rank: Count


@dataclass(frozen=True)
class RetainSnapshot:
    """The snapshot is complete; all others can be released."""

    folder: FileName


@dataclass(frozen=True)
class DiscardSnapshot:
    """The snapshot is incomplete and can be released."""

    folder: FileName


@dataclass(frozen=True)
class Prepare:
    """Proposal of a step boundary: all workers take the action after the step."""

    boundary: Count
    step: Count
    action: Action


@dataclass(frozen=True)
class Decide:
    """Decision on a proposal; ``stay`` is false where this node is not in the next round."""

    boundary: Count
    go: bool
    stay: bool = True


@dataclass(frozen=True)
class Interrupt:
    """The round is over: the worker hands its state over, and ends or parks.

    Args:
        whole: local rank of the worker that hands over the state which all workers of the node have.
    """

    whole: Count


@dataclass(frozen=True)
class Leave:
    """The node ends: an engine moves what it holds to other nodes and stops; a parked worker hands its state over."""


@dataclass(frozen=True)
class Assign:
    """A parked worker's assignment in a round."""

    round: Count
    rank: Count
    world_size: Count
    environment: dict[str, str]


@dataclass(frozen=True)
class Accepted:
    """Reply: the request was carried out."""


@dataclass(frozen=True)
class Refused:
    """Reply: the request failed; ``error`` is ``fenced`` or ``unavailable``."""

    error: str
    message: str


@dataclass(frozen=True)
class PointerReply:
    """Reply to :class:`Pointer`."""

    pointer: Reference | None = None


@dataclass(frozen=True)
class MemoryReply(HeldCopies):
    """Reply to :class:`Memory`."""


MemoryMessage = HandOver | Memory | HoldShard | RetainSnapshot | DiscardSnapshot
Request = Pointer | Commit | HandOver | Memory | HoldShard | ReplicateShard
LastReport = Stopped | Finished | GaveWay
"""Reports of a process that ends, or takes part in no further step of the round."""
Report = Step | Logged | Busy | Free | Expects | Restored | Damaged | RetainSnapshot | DiscardSnapshot | LastReport
"""What a process reports of its training, without an answer."""
WorkerMessage = Hello | Vote | Parked | Report | Request
Reply = Accepted | Refused | PointerReply | MemoryReply
AgentMessage = Prepare | Decide | Interrupt | Leave | Assign | Reply

FROM_WORKER: MessageCodec[WorkerMessage] = MessageCodec(*get_args(WorkerMessage))
FROM_AGENT: MessageCodec[AgentMessage] = MessageCodec(*get_args(AgentMessage))
