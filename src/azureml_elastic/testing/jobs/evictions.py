"""Planned evictions as data, and the pure decision which of them are due."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration
from azureml_elastic.errors import UsageError

__all__ = ["Evicted", "Eviction", "Target", "due", "parse_eviction", "read_trace"]

_FEWEST_COLUMNS = 2
_MOST_COLUMNS = 3
_NOTICE = timedelta(seconds=30)
_NUMBER = r"\d+(?:\.\d+)?"
_EVICTION = re.compile(
    rf"(?P<node>\d+)@(?:step:(?P<step>\d+)|(?P<seconds>{_NUMBER})s)(?:/(?P<notice>{_NUMBER})s)?", re.ASCII
)


class Eviction(ConfigModel):
    """Eviction of a low-priority node's machine.

    It applies to the first job of the workspace that has such a node running, and happens once. Give either
    ``after`` or ``at_step``.

    Args:
        node: number of the node within the job, from 0; in a pipeline the nodes are numbered one after the other over
            the steps, in a sweep over the trials.
        after: time after the start of the job's first node.
        at_step: number of training steps that the job has completed, according to its nodes' events.
        notice: time between the scheduled event and the machine's end; 0 for no announcement.
    """

    node: int = Field(ge=0)
    after: Duration | None = None
    at_step: int | None = Field(default=None, ge=0)
    notice: Duration = _NOTICE

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.after is None) == (self.at_step is None):
            raise ValueError(f"an eviction of the node {self.node} needs a time: give one of after and at_step")
        return self


@dataclass(frozen=True)
class Evicted:
    """An eviction that has happened.

    Args:
        eviction: planned eviction.
        job: name of the node's job, in a pipeline that of the step.
        machine: name of the evicted machine.
        step: number of training steps that the run had completed.
        time: seconds since the epoch.
    """

    eviction: Eviction
    job: str
    machine: str
    step: int
    time: float = 0.0


@dataclass(frozen=True)
class Target:
    """State of a submitted job that evictions depend on."""

    seconds: float
    """Seconds since the start of its first node."""
    step: int
    nodes: frozenset[int]
    """Numbers of the nodes that can be evicted now."""


def due(evictions: Sequence[Eviction], targets: Mapping[str, Target]) -> list[tuple[Eviction, str]]:
    """Return the evictions that are due, each with the name of the job that it applies to.

    An eviction whose node does not run yet waits for it. Two evictions never apply to the same node.
    """
    found: list[tuple[Eviction, str]] = []
    taken: set[tuple[str, int]] = set()
    for eviction in evictions:
        for name, target in targets.items():
            if eviction.node not in target.nodes or (name, eviction.node) in taken:
                continue
            late = eviction.after is not None and target.seconds >= eviction.after.total_seconds()
            far = eviction.at_step is not None and target.step >= eviction.at_step
            if late or far:
                found.append((eviction, name))
                taken.add((name, eviction.node))
                break
    return found


def parse_eviction(text: str) -> Eviction:
    """Parse an eviction of the command line: ``1@20s`` or ``1@step:30``, optionally with the notice as ``/5s``."""
    match = _EVICTION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not an eviction. Write the node and the time, as in 1@20s or 1@step:30, optionally followed "
            "by the notice, as in 1@20s/0s."
        )
    notice = _NOTICE if match["notice"] is None else float(match["notice"])
    time = {"after": float(match["seconds"])} if match["step"] is None else {"at_step": int(match["step"])}
    return Eviction(node=int(match["node"]), notice=notice, **time)


def read_trace(path: Path) -> tuple[Eviction, ...]:
    """Read a trace of evictions: lines of ``seconds,node`` or ``seconds,node,notice``; ``#`` starts a comment.

    Raises:
        UsageError: a line has another form.
    """
    evictions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            evictions.append(_read(text))
        except ValueError as error:
            raise UsageError(
                f"Line {number} of {path} is not an eviction ({error}): {line!r}. Write seconds,node or "
                "seconds,node,notice, such as 12.5,1,30."
            ) from error
    return tuple(evictions)


def _read(text: str) -> Eviction:
    """Parse one line."""
    words = text.split(",")
    if not _FEWEST_COLUMNS <= len(words) <= _MOST_COLUMNS:
        raise ValueError(f"{len(words)} columns")
    notice = float(words[2]) if len(words) == _MOST_COLUMNS else _NOTICE
    return Eviction(node=int(words[1]), after=float(words[0]), notice=notice)
