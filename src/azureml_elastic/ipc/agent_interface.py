"""What a training process needs of the agent that started it.

Two implementations: :class:`~azureml_elastic.train.agent_client.channel.ChannelAgent` speaks to the node's agent, and
:class:`~azureml_elastic.train.agent_client.standalone.StandaloneAgent` replaces it where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config.exit_codes import AGENT_LOST, PREEMPTED
from azureml_elastic.ipc.message import ShardDescription

if TYPE_CHECKING:
    from azureml_elastic.ipc.worker_messages import Report  # which has the types below in its fields

EXIT_AGENT_LOST = AGENT_LOST
"""Exit code of a worker whose agent is gone: it must not go on, and may be started again (``EX_TEMPFAIL``)."""

EXIT_TERMINATED = PREEMPTED
"""Exit code of a process without an agent that has saved and left after SIGTERM."""

Action = Literal["save", "leave", "rejoin"]
"""What is to be done at a step boundary: take a checkpoint; take one and give up this place in the round; or give up
this place, while the state stays in memory. Who has given up its place exits, or waits for another one where it may."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Position of a training process in a round.

    Args:
        round: number of the round, 0 without an agent.
    """

    rank: int
    local_rank: int
    world_size: int
    round: int


@dataclass(frozen=True)
class HandedOverState:
    """A state that the agent holds for the workers of the next round.

    Args:
        step: optimizer steps completed.
        round: number of the round that completed them.
        rank: rank of the worker that handed it over.
        part: local rank of that worker, if it is its part of a sharded state.
    """

    path: str
    step: int
    round: int
    rank: int
    part: int | None = None


@dataclass(frozen=True)
class HeldCopies:
    """What an agent holds for the workers of its node.

    Args:
        states: whole states, and parts of others, that workers of earlier rounds have handed over.
        shards: shards of snapshots.
    """

    states: list[HandedOverState] = field(default_factory=list)
    shards: list[ShardDescription] = field(default_factory=list)


class Agent(Protocol):
    """The agent as the session sees it. ``pointer`` and ``commit`` are for rank 0 alone."""

    leave_code: int
    """With which the process exits after the action ``leave``."""

    stays: bool
    """Whether this process may outlive its round and take a place in the next one."""

    def report(self, report: Report) -> None:
        """Report something of the training; returns at once, of the last report when it is out."""

    def pointer(self) -> Reference | None:
        """Return the committed checkpoint to start from.

        Raises:
            Fenced: a newer round has taken over.
            TableUnavailable: not to be learnt now; may be repeated.
        """

    def commit(self, reference: Reference, stall_seconds: float) -> None:
        """Make this the checkpoint that the next round starts from.

        Args:
            reference: reference to a complete checkpoint.
            stall_seconds: seconds during which the training loop was blocked.

        Raises:
            Fenced: a newer round has taken over; nothing was committed.
            TableUnavailable: unknown whether it was committed; a later commit settles it.
        """

    def restored(self, step: int, directory: str | None) -> None:
        """Report, on every rank, where training starts."""

    def completed(self, step: int, samples: int = 0) -> Action | None:
        """Report a completed step and return what is to be done now.

        Every rank gets the same result at the same step. Returns at once, unless the agent has announced a decision for
        this very step.

        Args:
            step: number of completed steps of the run.
            samples: number of samples over all ranks since the last report, 0 if they are not counted.

        Raises:
            ElasticError: the announced decision did not come.
        """

    def when_interrupted(self, callback: Callable[[], None]) -> None:
        """Have this called, from a thread, when the round is over and its collectives will never complete."""

    def wait_interrupted(self, timeout: float) -> bool:
        """Wait until the round is over, at most for these seconds, and return whether it is."""

    def hand_over(self, step: int, descriptor: int, *, part: bool = False) -> None:
        """Have the agent hold on to the memory behind a descriptor.

        Args:
            step: optimizer steps completed.
            part: whether it is this process's part of a sharded state.

        Raises:
            ElasticError: it does not.
        """

    holds_snapshots: bool
    """Whether the agent holds on to copies of the state; ``hand_over`` and the calls below are made only then."""

    @property
    def hands_whole_over(self) -> bool:
        """Whether this worker hands over what all workers of the node have: the first of those that are left."""

    def hold_shard(self, descriptor: int, shard: ShardDescription) -> None:
        """Have the agent hold a shard of a snapshot until it is discarded.

        Raises:
            ElasticError: it does not.
        """

    def replicate_shard(self, shard: ShardDescription, rank: int) -> None:
        """Have the agent send a shard that it holds to the agent of another rank, which holds it, too.

        Raises:
            ElasticError: it could not.
        """

    def held(self) -> HeldCopies:
        """Return what this node's agent holds."""

    def park(self) -> None:
        """Ask for a place in the next round. Returns at once: what the old round leaves can be released meanwhile."""

    def wait_for_place(self) -> WorkerIdentity:
        """Wait for the place that :meth:`park` has asked for, and return it.

        Raises:
            RoundBroken: there will be none; the process hands its state over and ends.
        """

    def close(self) -> None:
        """Release sockets and signal handlers."""
