"""Logged metrics and throughput over the steps of a run, reduced to a number of buckets. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from azureml_elastic.ledger.events import Metrics, Progress
from azureml_elastic.ledger.picture import Picture

BUCKETS = 300
"""Most buckets of a series, one for two or three pixels."""


@dataclass(frozen=True)
class Bucket:
    """Values of successive steps.

    Args:
        mean: mean of the finite values; ``None`` if there is none.
        low: least finite value.
        not_finite: number of values that are NaN or infinite.
    """

    first: int
    last: int
    mean: float | None
    low: float | None
    high: float | None
    not_finite: int = 0

    @property
    def middle(self) -> float:
        """Middle of the steps."""
        return (self.first + self.last) / 2

    @property
    def steps(self) -> str:
        """The steps as text."""
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


@dataclass(frozen=True)
class Series:
    """A quantity over the steps."""

    name: str
    buckets: tuple[Bucket, ...]


def metric_series(picture: Picture, most: int = BUCKETS) -> list[Series]:
    """Return the logged metrics, losses and learning rates first, the others by name.

    A step that was trained again has the values of its highest round.
    """
    found: dict[str, dict[int, float]] = {}
    for event in sorted(picture.all(Metrics), key=lambda event: event.round):
        for name, value in event.values.items():
            found.setdefault(name, {})[event.step] = value
    return [_reduced(name, found[name], most) for name in _order(found)]


def throughput(picture: Picture, reporters: Mapping[int, str]) -> list[Series]:
    """Return the steps per second and, if samples were counted, the samples per second.

    The times of a round are those of one node. A step that was trained again counts in its highest round.

    Args:
        reporters: node whose times count, by round, among those that have reported the most steps.
    """
    intervals: list[_Interval] = []
    oldest = math.inf
    for number, round_ in sorted(picture.rounds.items(), reverse=True):
        if not round_.has(Progress):
            continue
        parts = round_.parts.items()
        by_node = {node: {each.step: each for each in own.all(Progress)} for node, own in parts if own.has(Progress)}
        most_steps = max(map(len, by_node.values()))
        nodes = sorted(node for node, own in by_node.items() if len(own) == most_steps)
        # One node's, as clocks of two machines cannot be compared.
        own = by_node[reporters[number] if reporters.get(number) in nodes else nodes[0]]
        points = [own[step] for step in sorted(own)]
        intervals += [
            _Interval.between(before, after)
            for before, after in pairwise(points)
            if after.step < oldest and after.time > before.time
        ]
        oldest = min(oldest, points[0].step)
    intervals.sort(key=lambda interval: interval.before)
    counted = [interval for interval in intervals if interval.samples is not None]
    found = []
    if intervals:
        found.append(_rates("steps/s", intervals, [each.last - each.before for each in intervals]))
    if counted:
        found.append(_rates("samples/s", counted, [each.samples or 0 for each in counted]))
    return found


@dataclass(frozen=True)
class _Interval:
    """Time between two reported steps.

    Args:
        seconds: time between them.
        samples: samples of the steps after the first one; ``None`` if they were not counted.
    """

    before: int
    last: int
    seconds: float
    samples: int | None

    @classmethod
    def between(cls, before: Progress, after: Progress) -> _Interval:
        known = before.samples is not None and after.samples is not None
        samples = (after.samples or 0) - (before.samples or 0) if known else None
        return cls(before.step, after.step, after.time - before.time, samples)


def _rates(name: str, intervals: Sequence[_Interval], amounts: Sequence[int]) -> Series:
    """Return the amounts per second of intervals in order."""
    first = intervals[0].before
    width = _width(first, intervals[-1].last, BUCKETS)
    buckets = []
    for _, grouped in groupby(zip(intervals, amounts, strict=True), lambda pair: (pair[0].last - first) // width):
        group = list(grouped)
        rates = [amount / interval.seconds for interval, amount in group]
        mean = sum(amount for _, amount in group) / math.fsum(interval.seconds for interval, _ in group)
        buckets.append(Bucket(group[0][0].before + 1, group[-1][0].last, mean, min(rates), max(rates)))
    return Series(name, tuple(buckets))


def _order(names: Iterable[str]) -> list[str]:
    def key(name: str) -> tuple[int, str]:
        lower = name.lower()
        first = ("loss" in lower, "learning_rate" in lower or lower in ("lr", "learning rate"))
        return (0 if first[0] else 1 if first[1] else 2, lower)

    return sorted(names, key=key)


def _reduced(name: str, values: Mapping[int, float], most: int) -> Series:
    steps = sorted(values)
    width = _width(steps[0], steps[-1], most)
    groups = (list(group) for _, group in groupby(steps, lambda step: (step - steps[0]) // width))
    return Series(name, tuple(_bucket(group, [values[step] for step in group]) for group in groups))


def _width(first: int, last: int, most: int) -> int:
    """Return the number of steps of each bucket."""
    return max(1, -(-(last - first + 1) // most))


def _bucket(steps: Sequence[int], values: Sequence[float]) -> Bucket:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Bucket(steps[0], steps[-1], None, None, None, len(values))
    mean = math.fsum(value / len(finite) for value in finite)
    return Bucket(steps[0], steps[-1], mean, min(finite), max(finite), len(values) - len(finite))
