"""How a job stands: a command job by its nodes, a pipeline by its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["TERMINAL", "NodeState", "Status", "Verdict", "pipeline_status", "verdict"]

Status = Literal[
    "NotStarted", "Queued", "Preparing", "Running", "Finalizing", "CancelRequested", "Completed", "Failed", "Canceled"
]

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""The states that a run never leaves."""

_BEFORE_THE_START = frozenset({"NotStarted", "Queued"})

Verdict = Literal["running", "completed", "failed", "preempted"]


@dataclass(frozen=True)
class NodeState:
    """What a verdict depends on.

    Args:
        exit_code: ``None`` while the node runs.
        taken: whether its machine was taken away, or announced to be.
    """

    exit_code: int | None
    taken: bool


def verdict(nodes: Sequence[NodeState], *, replaces: bool) -> Verdict:
    """Return how a job stands.

    Args:
        nodes: all that are not replaced.
        replaces: whether the service replaces a node that is lost, so that its loss ends nothing.
    """
    if any(node.exit_code and not node.taken for node in nodes):
        return "failed"
    if any(node.exit_code and node.taken for node in nodes) and not replaces:
        return "preempted"
    if any(node.exit_code is None for node in nodes):
        return "running"
    return "completed" if any(node.exit_code == 0 for node in nodes) else "running" if replaces else "preempted"


def pipeline_status(steps: Sequence[Status], *, cancelled: bool, lenient: bool) -> Status:
    """Return the state of a pipeline.

    Args:
        steps: the states of its steps.
        cancelled: whether its end was asked for.
        lenient: whether it completes if at least one step did.
    """
    if not all(step in TERMINAL for step in steps):
        if cancelled:
            return "CancelRequested"
        return "Queued" if all(step in _BEFORE_THE_START for step in steps) else "Running"
    if all(step == "Completed" for step in steps) or (lenient and "Completed" in steps):
        return "Completed"
    return "Canceled" if cancelled else "Failed"
