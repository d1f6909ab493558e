"""The compute pools of a local workspace and their machines."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from azureml_elastic.config.base import ConfigModel, Duration, Span, Takes, default
from azureml_elastic.errors import UsageError

# 127.0.0.1 is that of all servers of this machine.
_FIRST_ADDRESS = 2
_LAST_ADDRESS = 254
_POOL = re.compile(
    r"(?P<name>[\w-]+)=(?P<nodes>\d+)(?::(?P<tier>low_priority|dedicated))?(?::(?P<seconds>\d+(?:\.\d+)?)s)?", re.ASCII
)


class Pool(ConfigModel):
    """A compute of the workspace.

    Args:
        nodes: maximum number of machines at once.
        tier: tier of the machines; only ``low_priority`` ones are evicted.
        provisioning: time from a request for a machine until it is available.
        refill: time after an eviction until another machine is available; ``None`` for never.
        size: VM size that the compute states, for prices.
    """

    nodes: int = Field(default=8, ge=1)
    tier: Literal["low_priority", "dedicated"] = "low_priority"
    provisioning: Takes[Duration, Span] = default(timedelta(0))
    refill: Takes[Duration | None, Span | None] = default(timedelta(0))
    size: str = "STANDARD_DS3_V2"


def parse_pool(text: str) -> tuple[str, Pool]:
    """Parse a pool of the command line, such as ``spot=6``, ``sure=2:dedicated`` or ``sure=2:dedicated:5s``."""
    match = _POOL.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a pool. Write its name and number of nodes, as in spot=6, optionally followed by the "
            "tier (low_priority or dedicated) and the seconds to provision a machine, as in sure=2:dedicated:5s."
        )
    tier: Literal["low_priority", "dedicated"] = "dedicated" if match["tier"] == "dedicated" else "low_priority"
    return match["name"], Pool(nodes=int(match["nodes"]), tier=tier, provisioning=float(match["seconds"] or 0))


@dataclass(frozen=True)
class Machine:
    """A machine of a pool.

    The name is unique within the workspace and never reused; the address is a loopback address.
    """

    name: str
    address: str
    pool: str
    tier: str


class Machines:
    """All machines of a workspace; thread-safe."""

    def __init__(self, pools: dict[str, Pool]) -> None:
        self.pools = pools
        self._used = dict.fromkeys(pools, 0)
        self._away: dict[str, list[float]] = {name: [] for name in pools}
        self._numbers = itertools.count()
        self._addresses = [f"127.0.0.{number}" for number in range(_FIRST_ADDRESS, _LAST_ADDRESS + 1)]
        self._lock = threading.Lock()

    def take(self, pool: str, count: int) -> tuple[Machine, ...]:
        """Return ``count`` machines, none unless so many are free at once."""
        with self._lock:
            now = time.monotonic()
            self._away[pool] = [until for until in self._away[pool] if until > now]
            available = self.pools[pool].nodes - len(self._away[pool])
            if available - self._used[pool] < count or len(self._addresses) < count:
                return ()
            self._used[pool] += count
            return tuple(
                Machine(f"{pool}-{next(self._numbers)}", self._addresses.pop(0), pool, self.pools[pool].tier)
                for _ in range(count)
            )

    def give_back(self, machine: Machine, *, evicted: bool = False) -> None:
        """Return a machine; an evicted one is missing from its pool until it is refilled."""
        with self._lock:
            self._used[machine.pool] -= 1
            if evicted:
                refill = self.pools[machine.pool].refill
                back = math.inf if refill is None else time.monotonic() + refill.total_seconds()
                self._away[machine.pool].append(back)
            self._addresses.append(machine.address)

    def refill(self, pool: str) -> None:
        """Replace all evicted machines of a pool, whatever its ``refill``."""
        with self._lock:
            self._away[pool].clear()


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
    after: Takes[Duration | None, Span | None] = default(None)
    at_step: int | None = Field(default=None, ge=0)
    notice: Takes[Duration, Span] = default(_NOTICE)

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.after is None) == (self.at_step is None):
            raise ValueError(f"an eviction of the node {self.node} needs a time: give one of after and at_step")
        return self


@dataclass(frozen=True)
class Evicted:
    """An eviction that has happened.

    Args:
        job: name of the node's job, in a pipeline that of the step.
        step: number of training steps that the run had completed.
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
        words = text.split(",")
        try:
            if len(words) not in (2, 3):
                raise ValueError(f"{len(words)} columns")  # noqa: TRY301 - with the line, as other errors of it
            notice = float(words[2]) if words[2:] else _NOTICE
            evictions.append(Eviction(node=int(words[1]), after=float(words[0]), notice=notice))
        except ValueError as error:
            raise UsageError(
                f"Line {number} of {path} is not an eviction ({error}): {line!r}. Write seconds,node or "
                "seconds,node,notice, such as 12.5,1,30."
            ) from error
    return tuple(evictions)
