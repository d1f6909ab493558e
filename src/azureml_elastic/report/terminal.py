"""The summary of a run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from azureml_elastic.ledger.bill import Bill
from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import RoundSpan
from azureml_elastic.report.cells import OUTCOMES, activity_text, duration_text, ending_text, goodput_text
from azureml_elastic.report.tables import (
    DataTable,
    audit_verdict,
    cost_notes,
    cost_table,
    notes,
    recoveries_table,
    rounds_table,
)

KEY = "█ rank 0, ━ another rank, · in no round"
"""Meaning of the characters of a bar."""

_WIDTH = 50
_NAME = 12
_STYLES = {"succeeded": "bold green", "failed": "bold red", "interrupted": "bold yellow", "unfinished": "bold yellow"}
_VERDICTS = {
    "good": ("exactly once", "bold green"),
    "bad": ("NOT exactly once", "bold red"),
    "": ("not proven", "bold yellow"),
}


@dataclass(frozen=True)
class Lifeline:
    """The life of a node as one bar of text.

    Args:
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


def summary(report: Report) -> RenderableType:
    """Return the whole report."""
    parts: list[RenderableType] = []
    if any(round_.ran for round_ in report.rounds):
        parts += [timeline_picture(report), _table("rounds", rounds_table(report, 0.0).without("at", "lasted"))]
    if report.recoveries:
        parts.append(_table("recoveries", recoveries_table(report).without("because")))
    if report.goodput is not None:
        parts.append(_activities_table(report))
    if report.bill is not None:
        parts.append(bill_table(report.bill, samples=report.samples))
    if report.audit is not None:
        parts.append(audit_text(report.audit))
    parts.append(_outcome(report))
    return Group(*parts)


def timeline_picture(report: Report, width: int = _WIDTH) -> RenderableType:
    """Return a chart of the world size and of the nodes over time."""
    rounds = [round_ for round_ in report.rounds if round_.ran]
    columns = TimeColumns.of(report, width)
    line, texts = time_axis(columns)
    # The names of the nodes are on the left, so that each time is in one column of the whole picture.
    lines = [Text("world size", style="bold")]
    lines += [Text(f"{size:>{_NAME}} │{bar}", style="cyan") for size, bar in size_chart(rounds, columns)]
    lines += [Text(f"{'':{_NAME}} └{line}", style="dim"), Text(f"{'':{_NAME}}  {texts}", style="dim")]
    lines.append(Text.assemble(("nodes", "bold"), (f" ({KEY})", "dim")))
    for life in lifelines(report, columns):
        good = life.end in ("finished", "preempted", "running")
        end = Text(f" {life.end}", style="green" if good else "red")
        lines.append(Text.assemble((f"{life.node[-_NAME:]:>{_NAME}}  ", "dim"), (life.bar, "cyan"), end))
    lines.append(Text(f"world sizes: {' → '.join(map(str, report.world_sizes))}", style="bold"))
    return Group(*lines)


def audit_text(audit: SampleAudit) -> Text:
    """Return the result of the audit in one or two sentences."""
    state, text = audit_verdict(audit)
    return Text.assemble(_VERDICTS[state], f": {text}")


def bill_table(bill: Bill, *, samples: int | None = None) -> RenderableType:
    """Return the cost of the nodes, and what was saved; ``samples`` are those that were trained, if they are known."""
    found = cost_table(bill)
    tables = [] if found is None else [_table("cost of the nodes", found)]
    return Group(*tables, *map(Text, cost_notes(bill, samples)))


def _table(title: str, found: DataTable) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading, kind in zip(found.headings, found.kinds, strict=True):
        table.add_column(heading, justify="right" if kind == "number" else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    if found.omitted:
        table.caption = f"{found.omitted:,} rows in the middle are left out"
    return table


def _activities_table(report: Report) -> Table:
    whole = sum(total.seconds for total in report.activities)
    share = goodput_text(report.goodput or 0.0, report.highest_goodput)
    table = Table(title=f"time of the nodes, goodput {share}", title_justify="left", title_style="bold")
    table.add_column("activity")
    table.add_column("node-seconds", justify="right")
    table.add_column("share", justify="right")
    for total in report.activities:
        name = activity_text(total.activity, total.cause)
        table.add_row(name, f"{total.seconds:.1f}", f"{total.seconds / whole:.1%}")
    return table


def _outcome(report: Report) -> Text:
    text = Text.assemble((f"the run {OUTCOMES[report.outcome]}", _STYLES[report.outcome]))
    if report.last_step:  # a script without a session reports no steps
        text.append(f" at step {report.last_step}")
    if report.message:
        text.append(f": {report.message}")
    for missed in report.missed_faults:
        text.append(f"\nthe fault {missed.fault} did not happen: {missed.reason}", style="yellow")
    for note in notes(report):
        text.append(f"\n{note}", style="yellow")
    text.append(f"\nfiles: {report.paths.run_dir}", style="dim")
    return text
