"""What a training process needs of the agent that started it.

Two implementations: :class:`~azureml_elastic.train.channel.ChannelAgent` speaks to the node's agent, and
:class:`~azureml_elastic.train.standalone.StandaloneAgent` stands in for it where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from azureml_elastic.spec.exit_codes import AGENT_LOST, PREEMPTED
from azureml_elastic.train.manifest import Reference

__all__ = ["EXIT_AGENT_LOST", "EXIT_TERMINATED", "Action", "Agent", "Identity"]

EXIT_AGENT_LOST = AGENT_LOST
"""Exit code of a worker whose agent is gone: it must not go on, and may be started again (``EX_TEMPFAIL``)."""

EXIT_TERMINATED = PREEMPTED
"""Exit code of a process without an agent that has saved and left after SIGTERM."""

Action = Literal["save", "leave"]
"""What is to be done at a step boundary: take a checkpoint, or take one and exit."""


@dataclass(frozen=True)
class Identity:
    """Who a training process is.

    Args:
        rank: among all processes of the round.
        local_rank: among those of the node.
        world_size: processes of the round.
        round: its number, 0 without an agent.
    """

    rank: int
    local_rank: int
    world_size: int
    round: int


class Agent(Protocol):
    """The agent as the session sees it. ``pointer`` and ``commit`` are for rank 0 alone."""

    leave_code: int
    """With which the process exits after the action ``leave``."""

    def pointer(self) -> Reference | None:
        """Return the committed checkpoint to start from.

        Raises:
            Fenced: a newer round has taken over.
            TableUnavailable: not to be learnt now; may be repeated.
        """

    def commit(self, reference: Reference, stall_seconds: float) -> None:
        """Make this the checkpoint that the next round starts from.

        Args:
            reference: of a complete checkpoint.
            stall_seconds: for which the training loop was held up.

        Raises:
            Fenced: a newer round has taken over; nothing was committed.
            TableUnavailable: unknown whether it was committed; a later commit settles it.
        """

    def restored(self, step: int, directory: str | None) -> None:
        """Report, on every rank, where training starts."""

    def completed(self, step: int) -> Action | None:
        """Report a completed step and return what is to be done now.

        Every rank is told the same at the same step. Returns at once, unless the agent has announced a decision for
        this very step.

        Raises:
            ElasticError: the announced decision did not come.
        """

    def stopped(self, step: int) -> None:
        """Report that the process saved and is about to exit; returns when the report is out."""

    def finished(self, step: int) -> None:
        """Report that training has ended normally."""

    def close(self) -> None:
        """Release sockets and signal handlers."""
