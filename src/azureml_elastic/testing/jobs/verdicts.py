"""State of a job: of a command job from its nodes, of a pipeline from its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TERMINAL", "NodeState", "Status", "Verdict", "pipeline_status", "unlike_the_run", "verdict"]

Status = Literal[
    "NotStarted", "Queued", "Preparing", "Running", "Finalizing", "CancelRequested", "Completed", "Failed", "Canceled"
]

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""Final states of a run."""

_BEFORE_THE_START = frozenset({"NotStarted", "Queued"})

Verdict = Literal["running", "completed", "failed", "preempted"]


@dataclass(frozen=True)
class NodeState:
    """State of a node that a verdict depends on: its exit code, and whether its machine's eviction was announced."""

    exit_code: int | None
    evicted: bool


def verdict(nodes: Sequence[NodeState], *, replaces: bool) -> Verdict:
    """Return the state of a command job by its nodes; ``replaces`` if the service itself replaces lost nodes."""
    if any(node.exit_code and not node.evicted for node in nodes):
        return "failed"
    if any(node.exit_code and node.evicted for node in nodes) and not replaces:
        return "preempted"
    if any(node.exit_code is None for node in nodes):
        return "running"
    return "completed" if any(node.exit_code == 0 for node in nodes) else "running" if replaces else "preempted"


def pipeline_status(steps: Sequence[Status], *, cancelled: bool, sufficient: Sequence[Status]) -> Status:
    """Return the state of a pipeline.

    Args:
        steps: states of its steps.
        cancelled: whether its cancellation was requested.
        sufficient: states of the steps of which one completed one is enough; empty where all must complete.
    """
    if not all(step in TERMINAL for step in steps):
        if cancelled:
            return "CancelRequested"
        return "Queued" if all(step in _BEFORE_THE_START for step in steps) else "Running"
    if all(step == "Completed" for step in steps) or "Completed" in sufficient:
        return "Completed"
    return "Canceled" if cancelled else "Failed"


def unlike_the_run(commands: Sequence[Status], *, succeeded: bool) -> Status | None:
    """Return the state of the commands of an elastic run if it is not that of the run, ``None`` if it is.

    What follows the program in a command may fail, or hide that the program has. A command that failed does not count
    where another node's completed, as in a lenient pipeline.

    Args:
        commands: final states of the jobs of all nodes.
        succeeded: whether the run succeeded.
    """
    if succeeded and "Failed" in commands and "Completed" not in commands:
        return "Failed"
    return "Completed" if not succeeded and set(commands) == {"Completed"} else None
