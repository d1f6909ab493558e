"""Records of the runs of a local workspace: one per job and per step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from azureml_elastic.testing.jobs.verdicts import TERMINAL, Status, pipeline_status

__all__ = ["Run", "Runs"]


@dataclass
class Run:
    """Record of one run, which its thread writes and the servers read."""

    name: str
    kind: Literal["Command", "Pipeline"]
    display_name: str
    experiment: str
    body: dict[str, Any]
    """Properties of the job document."""
    parent: str | None = None
    """Name of the pipeline, for a step."""
    number: int = 0
    """Number of the step within the pipeline."""
    status: Status = "NotStarted"
    created: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    started: datetime | None = None
    ended: datetime | None = None
    error: tuple[str, str] | None = None
    """Code and message."""
    exit_code: int | None = None
    """Exit code of the command on the node by which the run has failed."""
    attempts: int = 0
    outputs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Type and URI by name."""
    logs: dict[str, list[Path]] = field(default_factory=dict)
    """Files by log name, in the order of their creation."""
    cancel: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def root(self) -> str:
        """Name of the outermost run, possibly its own."""
        return self.parent or self.name

    @property
    def continues_on_failure(self) -> bool:
        """Whether the steps of a pipeline continue after the failure of one."""
        return bool((self.body.get("settings") or {}).get("continue_on_step_failure"))

    def log(self, name: str) -> bytes:
        """Return the content of a log so far."""
        return b"".join(path.read_bytes() for path in self.logs.get(name, ()) if path.exists())


class Runs:
    """All runs in the order of submission; thread-safe.

    Args:
        lenient: whether a pipeline with ``continue_on_step_failure`` completes if at least one step did.
    """

    def __init__(self, *, lenient: bool) -> None:
        self._lenient = lenient
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()

    def add(self, *runs: Run) -> None:
        """Add runs atomically."""
        with self._lock:
            self._runs.update({run.name: run for run in runs})

    def get(self, name: str) -> Run | None:
        """Return the run of this name."""
        with self._lock:
            return self._runs.get(name)

    def all(self) -> list[Run]:
        """Return the submitted runs, without the steps of pipelines."""
        with self._lock:
            return [run for run in self._runs.values() if run.parent is None]

    def children(self, name: str) -> list[Run]:
        """Return the steps of a pipeline in order."""
        with self._lock:
            return [run for run in self._runs.values() if run.parent == name]

    def status(self, run: Run) -> Status:
        """Return the state of a run; that of a pipeline follows from its steps."""
        if run.kind == "Command":
            return "CancelRequested" if run.cancel.is_set() and run.status not in TERMINAL else run.status
        return pipeline_status(
            [self.status(child) for child in self.children(run.name)],
            cancelled=run.cancel.is_set(),
            lenient=self._lenient and run.continues_on_failure,
        )

    def cancel(self, run: Run) -> None:
        """Request the cancellation of a run and its steps, unless it has ended."""
        if self.status(run) not in TERMINAL:
            run.cancel.set()
            self.cancel_children(run)

    def cancel_children(self, run: Run) -> None:
        """Request the cancellation of a pipeline's steps that have not ended."""
        for child in self.children(run.name):
            if child.status not in TERMINAL:
                child.cancel.set()
