"""Work beside training, on a thread that agrees with the same thread of other ranks.

The threads use a control group of their own, so that their collectives never mix with those of training. When the round
ends in the middle of a task, :meth:`BackgroundTask.abandon` keeps the thread off the group before it is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.save.local_shard import ShardCopy
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import RoundBroken
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["BackgroundTask", "TaskOutcome"]

T = TypeVar("T")

_NICE = 5


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of a task: the same on every rank, unless the round ended meanwhile.

    Args:
        kind: ``committed`` to storage; ``kept`` in memory; not committed because the table is ``unavailable``, a newer
            round has ``fenced`` this one off or a rank ``failed``; or unknown, as the round has ``broken`` up.
        text: reason of a failure.
    """

    kind: Literal["committed", "kept", "unavailable", "fenced", "failed", "broken"]
    text: str = ""


@dataclass(eq=False)
class BackgroundTask(ABC):
    """A task with a copy of this rank's shard, which the training thread starts and waits for.

    Args:
        manifest: manifest without the files.
        copy: copy of this rank's shard, ``None`` where it could not be made.
        error: reason for a missing copy.
        control: control group of this thread.
        agent: agent of the node.

    Attributes:
        file: name of this rank's file in a checkpoint.
        abandoned: whether the round has ended.
    """

    manifest: Manifest
    copy: ShardCopy | None
    error: str | None
    control: ControlGroup
    agent: Agent
    abandoned: bool = field(default=False, init=False)
    _in_collective: bool = field(default=False, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _known: threading.Event = field(default_factory=threading.Event, init=False)
    _outcome: TaskOutcome | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.file = f"rank-{self.control.rank:05}.safetensors"
        self._thread = threading.Thread(target=self._run, name=type(self).__name__.lower(), daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, timeout: float | None = None) -> TaskOutcome | None:
        """Wait for the outcome of the task and return it, ``None`` after a timeout in seconds."""
        self._known.wait(timeout)
        return self._outcome if self._known.is_set() else None

    def join(self) -> None:
        """Wait for the end of the task, which may tidy up after its outcome."""
        self._thread.join()

    def abandon(self) -> None:
        """Keep the thread off the control group, which was aborted and is about to be closed."""
        with self._changed:
            self.abandoned = True
            self._changed.wait_for(lambda: not self._in_collective)

    @abstractmethod
    def work(self) -> TaskOutcome:
        """Run the task on its thread. An exception means that the round has broken up."""

    def tidy_up(self, outcome: TaskOutcome) -> None:  # noqa: B027 - most tasks leave nothing behind
        """Do what nobody waits for, after the outcome; without collectives."""

    def collective(self, action: Callable[[], T]) -> T:
        """Run a collective, unless the task was abandoned.

        Raises:
            RoundBroken: the round has ended.
        """
        with self._changed:
            if self.abandoned:
                raise RoundBroken("the round has ended")
            self._in_collective = True
        try:
            return action()
        finally:
            with self._changed:
                self._in_collective = False
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):  # training has priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._outcome = self.work()
        except RoundBroken as error:
            self._outcome = TaskOutcome("broken", str(error))
        except Exception as error:  # noqa: BLE001 - collectives fail in many ways when their round ends
            self._outcome = TaskOutcome("broken", f"{type(error).__name__}: {error}")
        finally:
            self._known.set()
        self.tidy_up(self._outcome)
