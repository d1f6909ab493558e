"""The timeline of a run as lines of text: world size and nodes over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import RoundSpan

__all__ = ["Lifeline", "lifelines", "size_chart", "time_axis"]


@dataclass(frozen=True)
class Lifeline:
    """The rounds of a node as one bar of text.

    Args:
        node: node name.
        bar: one character per unit of time: ``█`` as rank 0, ``━`` with another rank, otherwise a blank.
        end: end of the node, in words.
    """

    node: str
    bar: str
    end: str


def _time_span(rounds: Sequence[RoundSpan]) -> tuple[float, float]:
    return min(round_.started for round_ in rounds), max(round_.ended for round_ in rounds)


def size_chart(rounds: Sequence[RoundSpan], width: int) -> list[str]:
    """Return one line per world size, the largest first; each column is filled up to the size at its time."""
    sizes = [0 if round_ is None else round_.world_size for round_ in _columns(rounds, width)]
    # Only sizes that occurred: with 8 workers per node these are 8, 16, 24, ...
    levels = sorted({round_.world_size for round_ in rounds}, reverse=True)
    return [f"{level:4d} │" + "".join("█" if size >= level else " " for size in sizes) for level in levels]


def time_axis(rounds: Sequence[RoundSpan], width: int) -> list[str]:
    """Return the axis below the chart."""
    start, end = _time_span(rounds)
    label = f"{end - start:.1f} s"
    return ["     └" + "─" * width, "      0 s" + label.rjust(width - 3)]


def lifelines(report: Report, width: int) -> list[Lifeline]:
    """Return one line per node in the order of their starts."""
    rounds = [round_ for round_ in report.rounds if round_.ran]
    columns = _columns(rounds, width) if rounds else []
    names = [node.name for node in report.nodes] or list(dict.fromkeys(name for r in rounds for name in r.members))
    ends = {node.name: _end(node.ending, node.exit_code) for node in report.nodes}
    return [
        Lifeline(name, "".join(_mark(name, round_) for round_ in columns), ends.get(name, "unknown")) for name in names
    ]


def _mark(node: str, round_: RoundSpan | None) -> str:
    if round_ is None or node not in round_.members:
        return " "
    return "█" if round_.members[0] == node else "━"


def _end(ending: str, exit_code: int | None) -> str:
    if ending == "exited":
        return "finished" if exit_code == 0 else f"exited with {exit_code}"
    return ending


def _columns(rounds: Sequence[RoundSpan], width: int) -> list[RoundSpan | None]:
    """Return the round in each of ``width`` units of time, the newer one where two overlap."""
    start, end = _time_span(rounds)
    length = max(end - start, 1e-9) / width
    columns: list[RoundSpan | None] = [None] * width
    for round_ in rounds:
        first = min(width - 1, int((round_.started - start) / length))
        last = max(first + 1, min(width, round((round_.ended - start) / length)))
        columns[first:last] = [round_] * (last - first)
    return columns
