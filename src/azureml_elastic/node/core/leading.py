"""What the agent of rank 0 does besides: it makes room for newcomers and lets the preempted go."""

from __future__ import annotations

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ipc.agent_interface import Action
from azureml_elastic.node.core.boundary import BoundaryCoordinator
from azureml_elastic.node.core.newcomers import Newcomers, ends_soon, seconds_left
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.core.training_actions import ToMembers, TrainingAction
from azureml_elastic.node.core.training_events import WorkersSeen

__all__ = ["Leader"]

_IMPORT_SECONDS = 30.0
"""How long newcomers wait at least for the session that the program speaks of. The same rules as for a program without
a session apply then."""


class Leader:
    """Rank 0's part in one round.

    Args:
        distribution: what the plan says.
        opens_session: whether the program uses this library, so that newcomers wait for its session.
        now: monotonic seconds at which the workers were started, or received their assignments.

    Attributes:
        coordinator: the agreement on a step boundary.
        newcomers: when waiting nodes may end a round without a session.
    """

    def __init__(self, round_: Round, distribution: ElasticDistribution, *, opens_session: bool, now: float) -> None:
        timeout = distribution.newcomer_timeout
        self._opens_session = opens_session
        self._runs_engine = distribution.runs_engine
        self._imported = now + _IMPORT_SECONDS
        self.coordinator = BoundaryCoordinator(member.node for member in round_.members)
        self.newcomers = Newcomers(None if timeout is None else timeout.total_seconds(), round_.world_size)

    @property
    def moments(self) -> list[float | None]:
        """Monotonic seconds at which :meth:`lead` may decide otherwise, though nothing happens."""
        return [self._imported, self.coordinator.not_before, self.newcomers.until]

    def lead(
        self,
        waiting: frozenset[str],
        leavers: frozenset[str],
        workers: WorkersSeen,
        now: float,
        *,
        connected: bool,
        done: bool,
    ) -> tuple[list[TrainingAction], str | None]:
        """Return what to do; and why the round must end at once, because some workers have no session.

        Args:
            waiting: spares to make room for.
            leavers: members that are being preempted.
            workers: what this node's workers have reported.
            now: monotonic seconds.
            connected: whether workers of the round have begun to connect to each other.
            done: whether this node's workers have ended well.
        """
        coordinator, actions = self.coordinator, list[TrainingAction]()
        if workers.in_session:
            actions += self.newcomers.rest()
        elif not waiting:
            actions += self.newcomers.nobody_waits(now)
        ending = coordinator.finished or workers.finished or done
        if coordinator.is_busy(now) or coordinator.leaving or ending or not (leavers or waiting):
            return actions, None
        if not leavers and ends_soon(seconds_left(workers.pace, workers.expected, workers.step, now)):
            return actions, None
        why = f"preempted: {', '.join(sorted(leavers))}" if leavers else f"joining: {', '.join(sorted(waiting))}"
        if self._runs_engine:  # the processes stay and go on working, so that the end of the round costs nothing
            return actions, why
        if not coordinator.incapable and workers.in_session:
            action: Action = "leave" if leavers else "rejoin"
            return [*actions, ToMembers(coordinator.propose(workers.step, action))], None
        if leavers:
            return actions, why
        if not (self._opens_session and now < self._imported):
            ends, more = self.newcomers.wait(waiting, now, connected=connected)
            actions += more
            if ends:
                return actions, why
        if self._opens_session:
            coordinator.incapable = False  # workers may only be importing still: ask again
        return actions, None
