"""Exit codes of nodes and workers with a fixed meaning; ``docs/reference/errors.md`` lists all of them."""

from __future__ import annotations

FAILED = 1
"""The run has failed, and no worker's exit code explains why."""

USAGE = 2
"""The input is invalid; nothing was started."""

UNHEALTHY = 69
"""The node failed its health check and did not recover in time; the run continues without it."""

AGENT_LOST = 75
"""A worker with a session exits with it when its agent is gone or its round has ended. It is no sign to the agent, to
which the worker says so: a script may end with any code."""

PREEMPTED = 143
"""The node or process left after SIGTERM; the run continues."""


def of_failed_run(worker: int) -> int:
    """Return the exit code of the nodes of a failed run.

    Args:
        worker: exit code of the failing worker, 128 + n for signal n. It becomes the run's exit code unless it would
            indicate success or a run that continues; then the result is :data:`FAILED`.
    """
    return FAILED if worker in (0, UNHEALTHY, PREEMPTED) else worker
