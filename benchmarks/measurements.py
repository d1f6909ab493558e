"""Measurements as data: kept as JSON lines, summed up as medians, shown as tables."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from azureml_elastic.local.azurite import AZURITE_PACKAGE

__all__ = [
    "Measurement",
    "Summary",
    "behind",
    "machine",
    "markdown_table",
    "summarise",
    "terminal_table",
    "write_lines",
]

_MILLISECONDS_BELOW = 0.05


@dataclass(frozen=True)
class Measurement:
    """One measured duration.

    Args:
        benchmark: what was measured.
        system: measured system.
        run: its number, from 1.
        seconds: how long it took, ``None`` when it exceeded the limit.
        limit_s: the limit.
        load: the machine's load average over one minute when it ended.
        writes: number of attempted writes of a join storm.
        conflicts: number of writes that failed.
        lost_steps: completed ones that were taken again.
    """

    benchmark: str
    system: str
    run: int
    seconds: float | None
    limit_s: float
    load: float
    writes: int | None = None
    conflicts: int | None = None
    lost_steps: int | None = None


@dataclass(frozen=True)
class Summary:
    """All runs of one benchmark on one system.

    Args:
        median: seconds; infinite when half of the runs exceeded the limit.
        low: the shortest.
        high: the longest.
        count: runs.
        limit_s: the limit of each.
        writes: median, ``None`` where they were not counted.
        conflicts: median, ``None`` where they were not counted.
        lost_steps: the most, ``None`` where they were not counted.
    """

    median: float
    low: float
    high: float
    count: int
    limit_s: float
    writes: int | None
    conflicts: int | None
    lost_steps: int | None

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Summary:
        """Sum up at least one measurement."""
        # median_high: of an even number of runs of which half failed, the answer is a failure
        seconds = [math.inf if each.seconds is None else each.seconds for each in measurements]
        middle = statistics.median_high(seconds)
        counted = [each for each in measurements if each.writes is not None and each.conflicts is not None]
        return cls(
            median=statistics.median(seconds) if math.isfinite(middle) else middle,
            low=min(seconds),
            high=max(seconds),
            count=len(seconds),
            limit_s=measurements[0].limit_s,
            writes=round(statistics.median(each.writes or 0 for each in counted)) if counted else None,
            conflicts=round(statistics.median(each.conflicts or 0 for each in counted)) if counted else None,
            lost_steps=max((each.lost_steps for each in measurements if each.lost_steps is not None), default=None),
        )

    def text(self) -> str:
        """Return the median with the range, and what was written for it."""
        text = f"**{_seconds(self.median, self.limit_s)}**"
        if self.count > 1 and math.isfinite(self.low):
            text += f" ({_seconds(self.low, self.limit_s)} to {_seconds(self.high, self.limit_s)})"
        if self.writes is not None:
            text += f"; {self.writes:,} writes, {self.conflicts:,} in vain"
        if self.lost_steps is not None:
            # A worker that leaves within a step has not noted it: one less than none.
            text += f"; {max(0, self.lost_steps)} steps lost"
        return text

    def times(self, other: Summary) -> str:
        """Return how many times as long as the other this took."""
        if not math.isfinite(other.median):
            return "?"
        at_least, median = ("", self.median) if math.isfinite(self.median) else ("> ", self.limit_s)
        return f"{at_least}{median / other.median:.1f} times"


def summarise(measurements: Iterable[Measurement]) -> dict[tuple[str, str], Summary]:
    """Return the summary of each benchmark on each system."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.benchmark, each.system), []).append(each)
    return {key: Summary.of(group) for key, group in groups.items()}


def behind(summaries: dict[tuple[str, str], Summary], systems: Sequence[str]) -> list[str]:
    """Return, in words, the benchmarks in which the first system is not ahead of every other one."""
    return [
        f"{benchmark}: {systems[0]} takes {ours.median:.2f} s, {system} {theirs.median:.2f} s"
        for (benchmark, system), theirs in summaries.items()
        if system != systems[0] and (ours := summaries[benchmark, systems[0]]).median >= theirs.median
    ]


def write_lines(measurements: Iterable[Any], path: Path) -> None:
    """Write the measurements, of any data classes, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in measurements), "utf-8")


def markdown_table(summaries: dict[tuple[str, str], Summary], benchmarks: Sequence[str], systems: Sequence[str]) -> str:
    """Return the summaries side by side."""
    rows = [_cells(summaries, benchmark, systems, Summary.text) for benchmark in benchmarks]
    head = ["", *systems]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def terminal_table(summaries: dict[tuple[str, str], Summary], systems: Sequence[str]) -> Table:
    """Return the summaries side by side, for rich to print."""
    table = Table("", *systems, show_lines=True)
    for benchmark in dict.fromkeys(name for name, _ in summaries):
        cells = _cells(summaries, benchmark, systems, lambda summary: summary.text().replace("**", ""))
        table.add_row(*(cell.replace("<br>", "\n") for cell in cells))
    return table


def machine() -> str:
    """Return what this machine is, without its name."""
    packages = {"torch": version("torch"), "azure-data-tables": version("azure-data-tables")}
    packages["Azurite"] = AZURITE_PACKAGE.rpartition("@")[2]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, {platform.system()} on {platform.machine()}, "
        f"Python {platform.python_version()}, {', '.join(f'{name} {number}' for name, number in packages.items())}"
    )


def _cells(
    summaries: dict[tuple[str, str], Summary],
    benchmark: str,
    systems: Sequence[str],
    text: Callable[[Summary], str],
) -> list[str]:
    ours = summaries.get((benchmark, systems[0]))
    cells = [benchmark]
    for system in systems:
        summary = summaries.get((benchmark, system))
        if summary is None:
            cells.append("not measured")
        elif summary is ours or ours is None:
            cells.append(text(summary))
        else:
            cells.append(f"{text(summary)}<br>{summary.times(ours)} as long")
    return cells


def _seconds(value: float, limit_s: float) -> str:
    if not math.isfinite(value):
        return f"> {limit_s:g} s"
    return f"{value:.2f} s" if value >= _MILLISECONDS_BELOW else f"{1000 * value:.2f} ms"
