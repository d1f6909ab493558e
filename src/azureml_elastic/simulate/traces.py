"""When the machines of a pool can be had: traces of availability, recorded or synthetic, and the notation of durations.

The times of a trace start at 0. A machine that a trace does not have up at first is down. After the end of a trace its
last state continues; :meth:`Trace.repeated` makes one that is longer.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.config.base import parse_duration
from azureml_elastic.errors import UsageError

_HEADER = ("time", "node", "event")
_EVENTS = {"up": True, "down": False}
_SHAPES = (
    'A CSV file has lines of time in seconds, node and "up" or "down", as in "0,node-0,up"; a JSON file has the '
    'seconds between two counts and the counts, as in {"gap_seconds": 600, "counts": [4, 4, 3]}.'
)


@dataclass(frozen=True, order=True)
class Change:
    """A machine that becomes available or is lost.

    Args:
        time: seconds since the start of the trace.
        up: whether it becomes available.
    """

    time: float
    machine: int
    up: bool


@dataclass(frozen=True)
class Trace:
    """Availability of the machines of one pool.

    Args:
        changes: changes in the order of time; each one changes the state of its machine.
    """

    changes: tuple[Change, ...]
    machines: int
    seconds: float

    def up_seconds(self) -> float:
        """Return the sum of the seconds for which the machines are available within the trace."""
        since: dict[int, float] = {}
        total = 0.0
        for change in self.changes:
            if change.up:
                since[change.machine] = change.time
            else:
                total += change.time - since.pop(change.machine)
        return total + sum(self.seconds - start for start in since.values())

    def repeated(self, seconds: float) -> Trace:
        """Return the trace repeated from its beginning until it has at least this length."""
        if not 0 < self.seconds < seconds:
            return self
        changes: list[Change] = []
        up: set[int] = set()
        for number in range(math.ceil(seconds / self.seconds)):
            start = number * self.seconds
            # At the seam a machine stays up if it is up at the beginning, too; the others that were up go down.
            at_start = {change.machine for change in self.changes if change.time == 0 and change.up}
            changes += [Change(start, machine, False) for machine in sorted(up - at_start)]
            up &= at_start
            for change in self.changes:
                if change.up != (change.machine in up):
                    changes.append(Change(start + change.time, change.machine, change.up))
                    (up.add if change.up else up.discard)(change.machine)
        return Trace(tuple(changes), self.machines, math.ceil(seconds / self.seconds) * self.seconds)


def from_counts(gap: float, counts: Sequence[int]) -> Trace:
    """Return the trace of a number of available machines over time; the machines of the highest index are lost first.

    Args:
        gap: seconds between two counts.
        counts: number of available machines at 0, ``gap``, 2 ``gap``, ... seconds.
    """
    changes: list[Change] = []
    last = 0
    for number, count in enumerate(counts):
        changes += [Change(number * gap, machine, True) for machine in range(last, count)]
        changes += [Change(number * gap, machine, False) for machine in reversed(range(count, last))]
        last = count
    return Trace(tuple(changes), max(counts, default=0), gap * len(counts))


def read_trace(path: Path) -> Trace:
    """Read a trace from a CSV or a JSON file.

    Raises:
        UsageError: the file cannot be read, or is no trace; the message names the line and the value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"The trace {path} cannot be read ({reason}).") from error
    try:
        trace = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_csv(text.splitlines())
    except ValueError as error:
        raise UsageError(f"The trace {path} is invalid: {error}. {_SHAPES}") from error
    if trace.machines == 0:
        raise UsageError(f"The trace {path} has no available machine at any time. {_SHAPES}")
    return trace


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as a CSV file. Its length is that of its last change when it is read again."""
    lines = [",".join(_HEADER)]
    lines += [f"{each.time:.3f},node-{each.machine},{'up' if each.up else 'down'}" for each in trace.changes]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The trace {path} cannot be written ({error.strerror}).") from error


def _from_csv(lines: Iterable[str]) -> Trace:
    machines: dict[str, int] = {}
    changes: list[Change] = []
    up: set[int] = set()
    last = 0.0
    for number, row in enumerate(csv.reader(lines), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#") or (not machines and cells[0].lower() == _HEADER[0]):
            continue
        if len(cells) != len(_HEADER):
            raise ValueError(f"line {number} has {len(cells)} values instead of 3")
        time = _seconds(cells[0], f"the time of line {number}")
        if time < last:
            raise ValueError(f"the time of line {number}, {time:g}, is before that of the line above, {last:g}")
        if cells[2].lower() not in _EVENTS:
            raise ValueError(f"the event of line {number}, {cells[2]!r}, is neither 'up' nor 'down'")
        if not cells[1]:
            raise ValueError(f"line {number} names no node")
        last = time
        machine = machines.setdefault(cells[1], len(machines))
        event = _EVENTS[cells[2].lower()]
        if event != (machine in up):  # a repeated event changes nothing
            changes.append(Change(time, machine, event))
            (up.add if event else up.discard)(machine)
    return Trace(tuple(changes), len(machines) if changes else 0, last)


def _from_json(text: str) -> Trace:
    value: Any = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is a list without the seconds between two counts")  # noqa: TRY004 - reported as one
    metadata = value.get("metadata")
    gap = value.get("gap_seconds", metadata.get("gap_seconds") if isinstance(metadata, dict) else None)
    counts = value.get("counts", value.get("data"))
    seconds = _seconds(gap, "gap_seconds")
    if seconds == 0:
        raise ValueError("gap_seconds=0 is not above 0")
    if not isinstance(counts, list) or not counts:
        raise ValueError("counts is no list of numbers")
    for number, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"counts[{number}]={count!r} is no number of machines")
    return from_counts(seconds, counts)


def _seconds(value: object, what: str) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{what}, {value!r}, is no number of seconds from 0")
    return seconds


@dataclass(frozen=True)
class Hazard:
    """Rates at which the machines of a pool are lost and come back. All times are exponentially distributed.

    Args:
        loss_every: mean seconds between two losses of one machine, independent of the others; infinite for none.
        back_after: mean seconds until such a machine is available again.
        reclaim_every: mean seconds between two events that reclaim machines of the whole pool; infinite for none.
        reclaim_share: probability with which each machine is reclaimed by such an event.
        reclaim_lasts: mean seconds until the machines of one event are available again, all at the same time.
    """

    loss_every: float = math.inf
    back_after: float = 1200.0
    reclaim_every: float = math.inf
    reclaim_share: float = 0.5
    reclaim_lasts: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("loss_every", "back_after", "reclaim_every", "reclaim_lasts"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise UsageError(f"{name}={value} of the hazard is not above 0; give a number of seconds.")
        if not 0 <= self.reclaim_share <= 1:
            raise UsageError(f"reclaim_share={self.reclaim_share} of the hazard is not within 0 and 1.")


def synthetic_trace(hazard: Hazard, machines: int, seconds: float, seed: int = 0) -> Trace:
    """Return a trace in which all machines are available at first. Equal arguments give equal traces."""
    if machines < 1 or not 0 < seconds < math.inf:
        raise UsageError(f"A trace of {machines} machines and {seconds:g} s is empty; give 1 machine and 1 s or more.")
    # A machine's losses and the pool's events have generators of their own: one more machine changes no other's.
    pool = random.Random(f"{seed} pool")
    draws = [random.Random(f"{seed} {machine}") for machine in range(machines)]
    gaps: list[list[tuple[float, float]]] = [_own_losses(hazard, draw, seconds) for draw in draws]
    choices = [random.Random(f"{seed} {machine} reclaimed") for machine in range(machines)]
    time = _after(pool, hazard.reclaim_every)
    while time < seconds:
        until = time + _after(pool, hazard.reclaim_lasts)
        for machine, choice in enumerate(choices):
            if choice.random() < hazard.reclaim_share:
                gaps[machine].append((time, until))
        time += _after(pool, hazard.reclaim_every)
    changes = [Change(0.0, machine, True) for machine in range(machines)]
    for machine, periods in enumerate(gaps):
        for start, end in _union(periods):
            changes.append(Change(start, machine, False))
            if end < seconds:
                changes.append(Change(end, machine, True))
    return Trace(tuple(sorted(changes)), machines, seconds)


def _after(draw: random.Random, mean: float) -> float:
    return math.inf if math.isinf(mean) else draw.expovariate(1 / mean)


def _own_losses(hazard: Hazard, draw: random.Random, seconds: float) -> list[tuple[float, float]]:
    periods: list[tuple[float, float]] = []
    time = _after(draw, hazard.loss_every)
    while time < seconds:
        back = time + _after(draw, hazard.back_after)
        periods.append((time, back))
        time = back + _after(draw, hazard.loss_every)
    return periods


def _union(periods: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the periods in the order of time, with overlapping ones as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(periods):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def parse_seconds(text: str, what: str) -> float:
    """Return the seconds of a duration such as ``90``, ``90s``, ``1.5m``, ``6h`` or ``7d``.

    Raises:
        UsageError: the text is no duration.
    """
    duration = parse_duration(text)
    if duration is None:
        raise UsageError(f"{what}={text!r} is no duration; give a number with ms, s, m, h or d, as in 90s or 6h.")
    return duration.total_seconds()


def parse_hazard(text: str) -> Hazard:
    """Return the hazard of a text such as ``loss_every=6h,reclaim_every=1d,reclaim_share=0.5``.

    Raises:
        UsageError: a name is unknown, or a value is no duration or share.
    """
    names = [each.name for each in fields(Hazard)]
    values: dict[str, float] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator or name not in names:
            raise UsageError(
                f"The hazard has {entry!r}; give NAME=VALUE with one of {', '.join(names)}, as in "
                "loss_every=6h,reclaim_every=1d,reclaim_share=0.5."
            )
        values[name] = _share(value) if name == "reclaim_share" else parse_seconds(value, name)
    if not values.keys() & {"loss_every", "reclaim_every"}:
        raise UsageError(
            f"The hazard {text!r} has no losses; give loss_every, reclaim_every or both, as in loss_every=6h."
        )
    return Hazard(**values)


def parse_step_seconds(text: str) -> dict[int, float]:
    """Return the seconds of a step by number of nodes of a text such as ``1=2s,4=0.6s``, or ``2s`` for one node.

    Raises:
        UsageError: an entry is not of this form.
    """
    found: dict[int, float] = {}
    for entry in text.split(","):
        nodes, separator, value = entry.rpartition("=")
        if separator and not nodes.strip().isdecimal():
            raise UsageError(f"--step-seconds has {entry!r}; give NODES=SECONDS, as in 1=2s,4=0.6s.")
        found[int(nodes) if separator else 1] = parse_seconds(value, "--step-seconds")
    return found


def parse_work(text: str, seconds_per_step: float) -> int:
    """Return the number of steps of a text such as ``20000``, or ``500nh`` for the steps of 500 hours of one node.

    Args:
        text: number of steps, or of node-hours.
        seconds_per_step: duration of a step on one node.

    Raises:
        UsageError: the text is neither.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*nh", text.strip()):
        return max(1, math.ceil(float(match[1]) * 3600 / seconds_per_step))
    if not re.fullmatch(r"[1-9]\d{0,14}", text.strip()):
        raise UsageError(f"--work={text!r} is no amount of work; give steps, as in 20000, or node-hours, as in 500nh.")
    return int(text)


def parse_checkpoint(text: str) -> CheckpointPolicy:
    """Return the policy of a text such as ``auto``, ``5m`` or ``100steps``.

    Raises:
        UsageError: the text is none of them, or the interval is 0.
    """
    if text == "auto":
        return CheckpointPolicy(every="auto")
    if match := re.fullmatch(r"([1-9]\d{0,14})\s*steps?", text.strip()):
        return CheckpointPolicy(every=None, every_steps=int(match[1]))
    seconds = parse_seconds(text, "--checkpoint-every")
    if seconds == 0:
        raise UsageError("--checkpoint-every=0 is not above 0; give auto, a duration such as 5m, or 100steps.")
    return CheckpointPolicy(every=timedelta(seconds=seconds))


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"reclaim_share={text!r} is no number; give one from 0 to 1.") from error
