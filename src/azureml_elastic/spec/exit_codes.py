"""The exit codes that mean something to the other side; ``docs/errors.md`` lists them all."""

from __future__ import annotations

__all__ = ["AGENT_LOST", "PREEMPTED", "USAGE"]

USAGE = 2
"""The input is wrong; nothing was started."""

AGENT_LOST = 75
"""A worker whose agent is gone, or whose round is over, has ended itself."""

PREEMPTED = 143
"""A node or process was told to leave by SIGTERM, and has; the run goes on."""
