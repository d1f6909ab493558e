"""How a member of a round leaves it after a notice."""

from __future__ import annotations

from azureml_elastic.ipc.agent_messages import Leaving
from azureml_elastic.node.core.training_actions import Log, MoveEngine, ToLeader, TrainingAction
from azureml_elastic.node.core.training_events import Noticed

__all__ = ["Departure"]


class Departure:
    """The departure of one node from one round, perhaps never.

    Args:
        runs_engine: whether the worker is the process of an engine, which stops before it is announced to others.

    Attributes:
        notice: why and until when this node must leave, ``None`` where it need not.
    """

    def __init__(self, *, runs_engine: bool) -> None:
        self._runs_engine = runs_engine
        self._begun = self._announced = False
        self.notice: Noticed | None = None

    def begin(self) -> list[TrainingAction]:
        """Announce, once, that this node must leave."""
        if self.notice is None or self._begun:
            return []
        self._begun = True
        log = Log(f"This node is being preempted ({self.notice.reason}); leaving at the next step.", warning=True)
        return [log, MoveEngine()] if self._runs_engine else [log, *self.announce()]

    def announce(self) -> list[TrainingAction]:
        """Report to rank 0's agent, once, that this node will not be in the next round."""
        if self._announced:
            return []
        self._announced = True
        return [ToLeader(Leaving())]

    def is_overdue(self, now: float) -> bool:
        """Return whether the time of the notice is over."""
        return self.notice is not None and now >= self.notice.until

    def seconds_left(self, now: float) -> float | None:
        """Return how long the workers may still take, ``None`` without a notice."""
        return None if self.notice is None else max(0.0, self.notice.until - now)
