"""Traces of availability: when the machines of a pool can be had, read from the two shapes of public spot traces.

The times of a trace start at 0. A machine that a trace does not have up at first is down. After the end of a trace its
last state continues; :meth:`Trace.repeated` makes one that is longer.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.errors import UsageError

__all__ = ["Change", "Trace", "from_counts", "read_trace", "write_trace"]

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
        machine: index of the machine.
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
        machines: number of machines.
        seconds: length of the trace.
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
