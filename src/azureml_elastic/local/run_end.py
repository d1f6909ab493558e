"""Decides when a local run is over and how it ended. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from azureml_elastic.ledger.events import RunEnded, WorkerFailed
from azureml_elastic.ledger.summary import NodeEnding

__all__ = ["NO_NODES_LEFT", "PREEMPTED", "TIMED_OUT", "Ending", "NodeStatus", "how_it_ended", "phase"]

PREEMPTED = 143
"""Exit code of a node that saved and left on SIGTERM."""

TIMED_OUT = 124
"""Exit code of a run that took too long."""

NO_NODES_LEFT = 1
"""Exit code of a run that lost all its nodes."""

Phase = Literal["going", "ending", "over"]


@dataclass(frozen=True)
class NodeStatus:
    """How a node is.

    Args:
        name: of the node.
        ending: ``running``, or why it is not; a node that is frozen for good is ``frozen``.
        exit_code: of its agent, once it has one.
        log: file with its output.
        last_line: of that output.
    """

    name: str
    ending: NodeEnding = "running"
    exit_code: int | None = None
    log: Path | None = None
    last_line: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the node says that the run ended well."""
        return self.exit_code == 0

    @property
    def failed(self) -> bool:
        """Whether the node ended by itself and not well."""
        return self.ending == "exited" and self.exit_code not in (0, PREEMPTED, None)


@dataclass(frozen=True)
class Ending:
    """The run's end as the launcher sees it."""

    outcome: Literal["succeeded", "failed"]
    exit_code: int
    message: str = ""


def phase(nodes: Collection[NodeStatus], ended: RunEnded | None, *, more_to_come: bool) -> Phase:
    """Return whether the run goes on, is ending (some nodes are still to exit) or is over.

    Args:
        nodes: all that were started.
        ended: what a node said about the end of the run.
        more_to_come: whether nodes will be added even if none is left.
    """
    running = any(node.ending == "running" for node in nodes)
    closed = ended is not None or any(node.succeeded for node in nodes)
    if running:
        return "ending" if closed else "going"
    if closed or not more_to_come or any(node.failed for node in nodes):
        return "over"
    return "going"


def how_it_ended(nodes: Collection[NodeStatus], ended: RunEnded | None, failure: WorkerFailed | None) -> Ending:
    """Return the end of a run that is over.

    Args:
        nodes: all that were started.
        ended: what a node said about the end of the run.
        failure: the last worker that failed.
    """
    if any(node.succeeded for node in nodes) or (ended is not None and ended.succeeded):
        return Ending("succeeded", 0)
    failed = [node for node in nodes if node.failed]
    code = next((_as_shell(node.exit_code) for node in failed if node.exit_code), NO_NODES_LEFT)
    if ended is not None and ended.message:
        return Ending("failed", code, ended.message)
    if failure is not None and (ended is not None or failed):
        text = f"Worker {failure.rank} on {failure.node} exited with {failure.exit_code}: {failure.message}"
        return Ending("failed", code, text)
    if failed:
        first = failed[0]
        words = f" after {first.last_line!r}" if first.last_line else ""
        text = f"{first.name} exited with {first.exit_code}{words}; its output is in {first.log}"
        return Ending("failed", code, text)
    ends = ", ".join(f"{node.name} {node.ending}" for node in nodes)
    return Ending(
        "failed",
        NO_NODES_LEFT,
        f"All nodes are gone ({ends}) and none is to be added, so the run cannot go on. "
        "Let the fault schedule add a node before the last one goes, for example with add@20s.",
    )


def _as_shell(code: int | None) -> int:
    """Return the exit code that a shell would show: 128 plus the signal."""
    if code is None:
        return 1
    return 128 + signal.Signals(-code).value if code < 0 else code
