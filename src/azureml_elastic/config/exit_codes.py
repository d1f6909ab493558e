"""The exit codes that mean something to the other side; ``docs/failures.md`` lists them all."""

from __future__ import annotations

__all__ = ["AGENT_LOST", "FAILED", "PREEMPTED", "UNHEALTHY", "USAGE", "of_failed_run"]

FAILED = 1
"""The run has failed, and no worker's exit code says how."""

USAGE = 2
"""The input is wrong; nothing was started."""

UNHEALTHY = 69
"""A node has failed its health check and did not recover in time; the run goes on without it."""

AGENT_LOST = 75
"""A worker whose agent is gone, or whose round is over, has ended itself."""

PREEMPTED = 143
"""A node or process was told to leave by SIGTERM, and has; the run goes on."""


def of_failed_run(worker: int) -> int:
    """Return with which code the nodes of a failed run exit.

    Args:
        worker: the failing worker's exit code, 128 + n for signal n. It is the run's too, unless it would tell whoever
            started the node that the run has ended well or goes on.
    """
    return FAILED if worker in (0, UNHEALTHY, AGENT_LOST, PREEMPTED) else worker
