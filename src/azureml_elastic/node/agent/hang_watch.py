"""Hangs as the agent sees them: verdicts of the detector, and the stacks that are written then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.ipc.agent_messages import HangLesson
from azureml_elastic.node.core.hangs import Hang
from azureml_elastic.node.core.training_events import Hung, Learned, StacksWritten, TrainingEvent
from azureml_elastic.node.failures.classification import hang_failure
from azureml_elastic.node.hangs.detector import HangDetector
from azureml_elastic.node.hangs.stack_dump import Worker
from azureml_elastic.node.hangs.stack_report import StackReporter

__all__ = ["HangWatch"]


class HangWatch:
    """Reports verdicts as events, and carries out what follows. For the agent's thread.

    Args:
        detector: detector of this node's hanging workers.
        reporter: reporter of their stacks.
    """

    def __init__(self, detector: HangDetector, reporter: StackReporter) -> None:
        self._detector = detector
        self._reporter = reporter
        self._number = 0
        self._rank = 0
        self._writing = False

    def begin(self, number: int, rank: int) -> None:
        """A round begins.

        Args:
            number: its number.
            rank: rank of this node's first worker in it.
        """
        self._number, self._rank, self._writing = number, rank, False
        self._detector.begin()

    def look(self, *, leads: bool) -> Iterator[TrainingEvent]:
        """Yield what has happened; to be called several times a second while workers run.

        Args:
            leads: whether this is rank 0's node.
        """
        if leads and (lesson := self._detector.lesson()) is not None:
            yield Learned(lesson)
        if (hang := self._detector.verdict(leads=leads)) is not None:
            yield Hung(hang, hang_failure(self._rank, FAILED, hang.reason))
        if self._writing and self._reporter.done:
            self._writing = False
            yield StacksWritten()

    def adopt(self, hang: Hang) -> None:
        """Take in the verdict of another agent."""
        self._detector.fired(hang)

    def learn(self, lesson: HangLesson) -> None:
        """Adopt longer durations that another agent has learned."""
        self._detector.learn(lesson)

    def write(self, hang: Hang, workers: Sequence[Worker]) -> None:
        """Begin to collect the stacks of the workers."""
        self._writing = True
        self._reporter.start(hang.reason, self._number, workers, self._detector.steps)
