"""Which steps of a pipeline are due: the pure decision from their states and from what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.verdicts import TERMINAL, Status

__all__ = ["Due", "Step", "check_order", "due_steps"]


@dataclass(frozen=True)
class Step:
    """A step that decisions depend on.

    Args:
        status: its state.
        started: whether it was started.
        cancelled: whether its cancellation was requested.
        reads: states of the steps whose outputs it reads.
    """

    status: Status
    started: bool
    cancelled: bool
    reads: tuple[Status, ...]


@dataclass(frozen=True)
class Due:
    """What is to be done with the steps of a pipeline: those to start, those that never will, and those to cancel."""

    start: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()


def due_steps(steps: Mapping[str, Step], *, cancelled: bool, continues: bool) -> Due:
    """Return what is due in a pipeline.

    Args:
        steps: all commands of the pipeline and of the pipelines in it, by run.
        cancelled: whether the cancellation of the pipeline was requested.
        continues: whether the others go on after the failure of one step.
    """
    stops = cancelled or (not continues and any(step.status == "Failed" for step in steps.values()))
    waiting = {name: step for name, step in steps.items() if not step.started and step.status not in TERMINAL}
    skip = {
        name
        for name, step in waiting.items()
        if stops or step.cancelled or any(status in TERMINAL and status != "Completed" for status in step.reads)
    }
    ready = {name for name, step in waiting.items() if all(status == "Completed" for status in step.reads)}
    return Due(
        start=tuple(name for name in waiting if name in ready - skip),
        skip=tuple(name for name in waiting if name in skip),
        cancel=tuple(
            name
            for name, step in steps.items()
            if stops and step.started and not step.cancelled and step.status not in TERMINAL
        ),
    )


def check_order(reads: Mapping[str, frozenset[str]]) -> None:
    """Check that steps can be brought into an order.

    Args:
        reads: names of the runs that must complete before it, by run.

    Raises:
        UsageError: steps wait for each other.
    """
    try:
        TopologicalSorter(reads).prepare()
    except CycleError as error:
        raise UsageError(
            f"Steps of the pipeline wait for each other: {' reads '.join(reversed(error.args[1]))}. Remove one of "
            "these bindings."
        ) from error
