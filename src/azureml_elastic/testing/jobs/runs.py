"""Records of the runs of a local workspace: one per job and per step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from azureml_elastic.testing.messages import NotFound

Status = Literal[
    "NotStarted", "Queued", "Preparing", "Running", "Finalizing", "CancelRequested", "Completed", "Failed", "Canceled"
]

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
"""Final states of a run."""

_BEFORE_THE_START = frozenset({"NotStarted", "Queued"})

Verdict = Literal["running", "completed", "failed", "preempted"]


@dataclass(frozen=True)
class NodeState:
    """State of a node that a verdict depends on: its exit code, and whether its machine's eviction was announced."""

    exit_code: int | None
    evicted: bool


def verdict(nodes: Sequence[NodeState], *, replaces: bool) -> Verdict:
    """Return the state of a command job by its nodes; ``replaces`` if the service itself replaces lost nodes."""
    if any(node.exit_code and not node.evicted for node in nodes):
        return "failed"
    if any(node.exit_code and node.evicted for node in nodes) and not replaces:
        return "preempted"
    if any(node.exit_code is None for node in nodes):
        return "running"
    return "completed" if any(node.exit_code == 0 for node in nodes) else "running" if replaces else "preempted"


def pipeline_status(steps: Sequence[Status], *, cancelled: bool, sufficient: Sequence[Status]) -> Status:
    """Return the state of a pipeline.

    Args:
        sufficient: states of the steps of which one completed one is enough; empty where all must complete.
    """
    # A failed step does not end a pipeline: the others are cancelled, or go on, first.
    if not all(step in TERMINAL for step in steps):
        if cancelled:
            return "CancelRequested"
        return "Queued" if all(step in _BEFORE_THE_START for step in steps) else "Running"
    if all(step == "Completed" for step in steps) or "Completed" in sufficient:
        return "Completed"
    return "Canceled" if cancelled else "Failed"


def unlike_the_run(commands: Sequence[Status], *, succeeded: bool) -> Status | None:
    """Return the state of the commands of an elastic run if it is not that of the run, ``None`` if it is.

    What follows the program in a command may fail, or hide that the program has. A command that failed does not count
    where another node's completed, as in a pipeline that continues on failures.

    Args:
        commands: final states of the jobs of all nodes.
    """
    if succeeded and "Failed" in commands and "Completed" not in commands:
        return "Failed"
    return "Completed" if not succeeded and set(commands) == {"Completed"} else None


_TEXTS = ("description", "displayName")


@dataclass
class Run:
    """Record of one run, which its thread writes and the servers read."""

    name: str
    kind: Literal["Command", "Pipeline", "Sweep"]
    display_name: str
    experiment: str
    body: dict[str, Any]
    """Properties of the job document."""
    parent: str | None = None
    """Name of the pipeline or sweep, for a step or trial."""
    number: int = 0
    """Number within the pipeline or sweep."""
    root: str = ""
    """Name of the outermost run, possibly its own."""
    path: tuple[str, ...] = ()
    """Names of the steps that lead from the outermost run to this one."""
    reads: frozenset[str] = frozenset()
    """Names of the runs that must complete before this one."""
    trial: Mapping[str, str] = field(default_factory=dict)
    """Values of the search space, for a trial."""
    best: tuple[str, float] | None = None
    """Name of the best trial of a sweep, and its value of the primary metric."""
    schedule: str | None = None
    """Name of the schedule that has submitted the run."""
    begun: bool = False
    """Whether the service has started the command job or the sweep."""
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

    def __post_init__(self) -> None:
        self.root = self.root or self.name

    @property
    def continues_on_failure(self) -> bool:
        """Whether the steps of a pipeline continue after the failure of one."""
        return bool((self.body.get("settings") or {}).get("continue_on_step_failure"))

    def end(self, status: Status, error: tuple[str, str] | None = None) -> None:
        """Make a final state known."""
        self.error = error or self.error
        self.ended = datetime.now(timezone.utc)
        # After the time of the end: clients read the record as soon as the state is final.
        self.status = status
        # Last: who waits for it reads the state, the error and the outputs.
        self.over.set()

    def relabel(self, changes: Mapping[str, Any]) -> None:
        """Change what a submitted job is called, and whether it is archived (``hidden``); tags are added."""
        self.body.update({name: changes[name] for name in _TEXTS if changes.get(name) is not None})
        self.body["tags"] = {**(self.body.get("tags") or {}), **(changes.get("tags") or {})}
        if changes.get("hidden") is not None:
            self.body["isArchived"] = bool(changes["hidden"])
        self.display_name = str(self.body.get("displayName") or self.display_name)

    def log(self, name: str) -> bytes:
        """Return the content of a log so far."""
        return b"".join(path.read_bytes() for path in self.logs.get(name, ()) if path.exists())


class Runs:
    """All runs in the order of submission; thread-safe."""

    def __init__(self) -> None:
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

    def find(self, name: str) -> Run:
        """Return the run of this name; raises ``NotFound`` if there is none."""
        run = self.get(name)
        if run is None:
            raise NotFound(f"The local workspace has no job {name!r}.")
        return run

    def all(self) -> list[Run]:
        """Return the submitted runs, without the steps of pipelines and the trials of sweeps."""
        return self.children(None)

    def children(self, name: str | None) -> list[Run]:
        """Return the steps of a pipeline, or the trials of a sweep, in order."""
        with self._lock:
            return [run for run in self._runs.values() if run.parent == name]

    def below(self, run: Run) -> list[Run]:
        """Return a run and all that it consists of, the outer ones first."""
        return [run, *(inner for child in self.children(run.name) for inner in self.below(child))]

    def commands(self, run: Run) -> list[Run]:
        """Return the command jobs of which a run consists, possibly itself, in order."""
        return [inner for inner in self.below(run) if inner.kind == "Command"]

    def status(self, run: Run) -> Status:
        """Return the state of a run; that of a pipeline follows from its steps."""
        if run.kind != "Pipeline":
            return "CancelRequested" if run.cancel.is_set() and run.status not in TERMINAL else run.status
        children = self.children(run.name)
        sufficient = []
        if run.continues_on_failure:
            # One completed step is enough, unless others read from it: the pipeline was not submitted for those.
            read = {name for child in children for inner in self.below(child) for name in inner.reads}
            sufficient = [self.status(child) for child in children if child.name not in read]
        statuses = [self.status(child) for child in children]
        return pipeline_status(statuses, cancelled=run.cancel.is_set(), sufficient=sufficient)

    def cancel(self, run: Run) -> None:
        """Request the cancellation of a run and all that it consists of, unless it has ended."""
        for each in self.below(run):
            if self.status(each) not in TERMINAL:
                each.cancel.set()
