"""The timeline of a run as lines of text: world size and nodes over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import RoundSpan
from azureml_elastic.report.cells import ending_text
from azureml_elastic.report.numbers import duration_text

__all__ = ["KEY", "Lifeline", "TimeColumns", "lifelines", "size_chart", "time_axis"]

KEY = "█ rank 0, ━ another rank, · in no round"
"""Meaning of the characters of a bar."""


@dataclass(frozen=True)
class Lifeline:
    """The life of a node as one bar of text.

    Args:
        node: node name.
        bar: one character per unit of time: ``█`` as rank 0, ``━`` with another rank, ``·`` where the node starts,
            waits or recovers, and a blank while it does not exist.
        end: end of the node, in words.
    """

    node: str
    bar: str
    end: str


@dataclass(frozen=True)
class TimeColumns:
    """The time of a run in equal parts, one column of text for each.

    Args:
        start: begin of the first column.
        end: end of the last one.
        count: number of columns.
    """

    start: float
    end: float
    count: int

    @classmethod
    def of(cls, report: Report, count: int) -> TimeColumns:
        """Return the columns from the start of the first node to the end of the last."""
        times = [(round_.started, round_.ended) for round_ in report.rounds if round_.ran]
        times += [(n.began, n.ended) for n in report.nodes if n.began is not None and n.ended is not None]
        return cls(min(start for start, _ in times), max(end for _, end in times), count)

    def within(self, started: float, ended: float) -> slice:
        """Return the columns of a time span, at least one."""
        length = max(self.end - self.start, 1e-9) / self.count
        first = max(0, min(self.count - 1, int((started - self.start) / length)))
        return slice(first, max(first + 1, min(self.count, round((ended - self.start) / length))))


def size_chart(rounds: Sequence[RoundSpan], columns: TimeColumns) -> list[tuple[int, str]]:
    """Return world sizes and their bars, the largest first; each column is filled up to the size at its time."""
    sizes = [0 if round_ is None else round_.world_size for round_ in _by_column(rounds, columns)]
    # Only sizes that occurred: with 8 workers per node these are 8, 16, 24, ...
    levels = sorted({round_.world_size for round_ in rounds}, reverse=True)
    return [(level, "".join("█" if size >= level else " " for size in sizes)) for level in levels]


def time_axis(columns: TimeColumns) -> tuple[str, str]:
    """Return the axis, and its texts below it."""
    label = duration_text(columns.end - columns.start)
    return "─" * columns.count, "0" + label.rjust(columns.count - 1)


def lifelines(report: Report, columns: TimeColumns) -> list[Lifeline]:
    """Return one line per node in the order of their starts."""
    rounds = [round_ for round_ in report.rounds if round_.ran]
    by_column = _by_column(rounds, columns)
    lives = {node.name: [" "] * columns.count for node in report.nodes}
    for node in report.nodes:
        if node.began is not None and node.ended is not None:
            part = columns.within(node.began, node.ended)
            lives[node.name][part] = "·" * (part.stop - part.start)
    ends = {node.name: ending_text(node.ending, node.exit_code) or "unknown" for node in report.nodes}
    names = list(lives) or list(dict.fromkeys(name for r in rounds for name in r.members))
    return [
        Lifeline(
            name,
            "".join(map(_mark, [name] * columns.count, by_column, lives.get(name, " " * columns.count))),
            ends.get(name, "unknown"),
        )
        for name in names
    ]


def _mark(node: str, round_: RoundSpan | None, alone: str) -> str:
    if round_ is None or node not in round_.members:
        return alone
    return "█" if round_.members[0] == node else "━"


def _by_column(rounds: Sequence[RoundSpan], columns: TimeColumns) -> list[RoundSpan | None]:
    """Return the round in each column, the newer one where two overlap."""
    found: list[RoundSpan | None] = [None] * columns.count
    for round_ in rounds:
        part = columns.within(round_.started, round_.ended)
        found[part] = [round_] * (part.stop - part.start)
    return found
