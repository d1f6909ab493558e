"""What the agents of a round report to rank 0's agent, and what that agent broadcasts to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from azureml_elastic.ipc.message import Count, MessageCodec, Name, Seconds
from azureml_elastic.ipc.worker_messages import Prepare, Vote

__all__ = [
    "BROADCASTS",
    "REPORTS",
    "BroadcastBody",
    "Decision",
    "DumpStacks",
    "Dumped",
    "HangLesson",
    "Leaving",
    "NodeStopped",
    "NodesWait",
    "Prepare",
    "RanksConnecting",
    "ReportBody",
    "Vote",
]


@dataclass(frozen=True)
class Leaving:
    """The node is being preempted and will not be in the next round."""


@dataclass(frozen=True)
class Dumped:
    """The node has written the stacks of its workers."""


@dataclass(frozen=True)
class NodeStopped:
    """All workers of the node have stopped at the agreed step, and saved; ``finished``: or their training has ended."""

    finished: bool = False


@dataclass(frozen=True)
class Decision:
    """Decision on a proposed step boundary; ``leavers`` are the nodes that will not be in the next round."""

    boundary: Count
    go: bool
    leavers: tuple[Name, ...] = ()


@dataclass(frozen=True)
class RanksConnecting:
    """Workers of the round have used its store to connect to each other."""


@dataclass(frozen=True)
class NodesWait:
    """These nodes are connected to rank 0's node, and will be in the next round."""

    nodes: tuple[Name, ...]


@dataclass(frozen=True)
class DumpStacks:
    """The round hangs: every agent writes the stacks of its workers. The fields are those of a ``Hang``."""

    round: Count
    step: Count
    waited: Seconds
    limit: Seconds
    phase: Literal["start", "step", "pause", "free"]


@dataclass(frozen=True)
class HangLesson:
    """Longest step and longest pause so far in seconds, for nodes that have not seen them."""

    longest: Seconds
    longest_pause: Seconds


ReportBody = Vote | NodeStopped | Leaving | Dumped
BroadcastBody = Prepare | Decision | RanksConnecting | NodesWait | DumpStacks | HangLesson

REPORTS: MessageCodec[ReportBody] = MessageCodec(*get_args(ReportBody))
BROADCASTS: MessageCodec[BroadcastBody] = MessageCodec(*get_args(BroadcastBody))
