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
from azureml_elastic.ledger.timeline import RoundSpan, reason_and_losses
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import (
    MEASURED_FROM,
    OUTCOMES,
    activity_text,
    bill_rows,
    duration_text,
    ending_text,
    goodput_text,
    steps_text,
)

__all__ = [
    "KEY",
    "TimeColumns",
    "audit_text",
    "bill_table",
    "lifelines",
    "size_chart",
    "summary",
    "time_axis",
    "timeline_picture",
]

KEY = "█ rank 0, ━ another rank, · in no round"
"""Meaning of the characters of a bar."""

_WIDTH = 50
_NAME = 12
_STYLES = {
    "succeeded": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
    "unfinished": "bold yellow",
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
        parts += [timeline_picture(report), _rounds_table(report)]
    if report.recoveries:
        parts.append(_recoveries_table(report))
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
    text = Text()
    if audit.exactly_once:
        text.append("exactly once: ", style="bold green")
        text.append(f"{counted(audit.seen, 'sample')} of {counted(audit.epochs, 'epoch')}, none missed, none repeated")
    else:
        text.append(*(("NOT exactly once: ", "bold red") if audit.refuted else ("not proven: ", "bold yellow")))
        text.append(f"{audit.missing:,} missed and {audit.repeated:,} repeated of {counted(audit.seen, 'sample')}")
    if audit.dropped_lines:
        text.append(f"; {counted(audit.dropped_lines, 'line')} of the record could not be written")
    if audit.unfinished:
        text.append(
            f"; the last epoch ended after {audit.dataset_size - audit.unfinished:,} of {audit.dataset_size:,} samples"
        )
    if audit.rolled_back_steps:
        samples, steps = counted(audit.rolled_back_samples, "sample"), counted(audit.rolled_back_steps, "step")
        text.append(f"; {samples} of {steps} rolled back by losses and trained again")
    return text


def _rounds_table(report: Report) -> Table:
    table = _table("rounds", "round", "workers", "nodes", "steps", "ended because")
    for round_ in report.rounds:
        reason = Text(reason_and_losses(round_.reason, round_.lost))
        table.add_row(str(round_.number), str(round_.world_size), ", ".join(round_.members), steps_text(round_), reason)
    return table


def _recoveries_table(report: Report) -> Table:
    table = _table("recoveries", "round", "lost", "back at step", "trained again", "seconds", "measured from")
    for recovery in report.recoveries:
        table.add_row(
            str(recovery.round),
            ", ".join(recovery.lost) or "a worker",
            "" if recovery.step is None else str(recovery.step),
            "" if recovery.lost_steps is None else counted(recovery.lost_steps, "step"),
            f"{recovery.seconds:.2f}",
            MEASURED_FROM[recovery.since],
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
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


def bill_table(bill: Bill, *, samples: int | None = None) -> RenderableType:
    """Return the cost of the nodes by pool, and what was saved; node-hours alone where there is no price.

    Args:
        samples: number of samples that were trained, if it is known.
    """
    rows = bill_rows(bill)
    table = Table(title="cost of the nodes", title_justify="left", title_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in ("pool", "size", "tier") else "right")
    for row in rows:
        table.add_row(*row.values())
    parts: list[RenderableType] = [table]
    if bill.saving is not None:
        parts.append(Text(f"saved against dedicated nodes: {bill.saving:.1%}"))
    if bill.cost and samples:
        parts.append(Text(f"samples for 1 {bill.currency}: {samples / bill.cost:,.0f}"))
    return Group(*parts)


def _outcome(report: Report) -> Text:
    text = Text.assemble((f"the run {OUTCOMES[report.outcome]}", _STYLES[report.outcome]))
    if report.last_step:  # a script without a session reports no steps
        text.append(f" at step {report.last_step}")
    if report.message:
        text.append(f": {report.message}")
    for missed in report.missed_faults:
        text.append(f"\nthe fault {missed.fault} did not happen: {missed.reason}", style="yellow")
    left = sum(node.leftovers for node in report.nodes)
    if left:
        text.append(
            f"\n{counted(left, 'process', 'processes')} outlived their agent and had to be killed", style="yellow"
        )
    if report.skipped_events:
        text.append(f"\n{counted(report.skipped_events, 'line')} of the event files could not be read", style="yellow")
    text.append(f"\nfiles: {report.paths.run_dir}", style="dim")
    return text
