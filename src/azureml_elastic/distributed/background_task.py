"""Work beside training, on a thread of its own that agrees with those of the other ranks.

The ranks agree on a process group of their own, so that training's collectives never meet these. A round may end in the
middle of it: then :meth:`BackgroundTask.abandon` keeps this thread off the group before it is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from azureml_elastic.errors import RoundBroken

__all__ = ["BackgroundTask", "Kind", "TaskOutcome"]

T = TypeVar("T")

Kind = Literal["committed", "kept", "unavailable", "fenced", "failed", "broken"]

_NICE = 5


@dataclass(frozen=True)
class TaskOutcome:
    """What came of it: the same on every rank, unless the round broke.

    Args:
        kind: committed to storage; kept in memory; not committed because the table is away, a newer round has taken
            over, or a rank could not do its part; or unknown, because the round ended meanwhile.
        text: why.
    """

    kind: Kind
    text: str = ""


class BackgroundTask(ABC):
    """Some work under way. Made and waited for by the training thread; :meth:`start` begins it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._talking = self._abandoned = False
        self._outcome: TaskOutcome | None = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__.lower(), daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> TaskOutcome | None:
        """Wait until it is over and return what came of it, ``None`` when it takes longer."""
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._outcome

    def abandon(self) -> None:
        """Keep the thread off the process group, which has been aborted and is about to be closed."""
        with self._changed:
            self._abandoned = True
            self._changed.wait_for(lambda: not self._talking)

    @property
    def abandoned(self) -> bool:
        """Whether the round is over."""
        return self._abandoned

    @abstractmethod
    def work(self) -> TaskOutcome:
        """Do it. What this raises means that the round has broken."""

    def together(self, action: Callable[[], T]) -> T:
        """Do something with the other ranks.

        Raises:
            RoundBroken: the round is over.
        """
        with self._changed:
            if self._abandoned:
                raise RoundBroken("the round has ended")
            self._talking = True
        try:
            return action()
        finally:
            with self._changed:
                self._talking = False
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):  # training goes before
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._outcome = self.work()
        except RoundBroken as error:
            self._outcome = TaskOutcome("broken", str(error))
        except Exception as error:  # noqa: BLE001 - collectives fail in many ways when their round is over
            self._outcome = TaskOutcome("broken", f"{type(error).__name__}: {error}")
