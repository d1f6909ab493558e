"""Tables of the page of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from azureml_elastic.ledger.events import CheckpointCommitted, Event
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import reason_and_losses
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import MEASURED_FROM, bill_rows, money_text, steps_text
from azureml_elastic.report.numbers import duration_text

__all__ = ["DataTable", "checkpoints_table", "cost_notes", "cost_table", "recoveries_table", "rounds_table"]

_MOST_ROWS = 200
_MOST_NAMES = 12
_NUMBERS = frozenset(
    {"round", "workers", "steps", "step", "at", "lasted", "back at step", "recovered in", "nodes", "node-hours"}
    | {"trained again", "per hour", "cost", "dedicated", "paused"}
)

_TEXTS = frozenset({"because", "ended because", "nodes by rank"})


@dataclass(frozen=True)
class DataTable:
    """A table of texts.

    Args:
        headings: headings of the columns.
        rows: cells by row.
        omitted: number of rows in the middle that are left out.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    omitted: int = 0

    @classmethod
    def of(cls, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> DataTable:
        """Return a table of all rows, or of the first and last ones of too many."""
        found = [tuple(row) for row in rows]
        omitted = max(0, len(found) - _MOST_ROWS)
        if omitted:
            found = [*found[: _MOST_ROWS // 2], *found[-_MOST_ROWS // 2 :]]
        return cls(tuple(headings), tuple(found), omitted)

    def kind(self, column: int) -> str | None:
        """Return ``number`` or ``text`` for a column of numbers or of long texts, otherwise ``None``."""
        heading = self.headings[column]
        return "number" if heading in _NUMBERS else "text" if heading in _TEXTS else None


def cost_table(report: Report) -> DataTable | None:
    """Return the nodes by pool, size and tier, with a line of sums; ``None`` without a bill."""
    if report.bill is None or not report.bill.lines:
        return None
    rows = bill_rows(report.bill)
    found = [tuple(row.values()) for row in rows]
    if len(rows) > 1:
        bill = report.bill
        sums = {
            "nodes": str(sum(line.nodes for line in bill.lines)),
            "node-hours": f"{bill.hours:.4f}",
            "cost": money_text(bill.cost, bill.currency),
            "dedicated": money_text(bill.dedicated_cost, bill.currency),
        }
        found.append(tuple(sums.get(name, "") for name in rows[0]))
    return DataTable.of(tuple(rows[0]), found)


def cost_notes(report: Report) -> Iterable[str]:
    """Return the sentences below the table of costs."""
    bill = report.bill
    if bill is None:
        return
    if bill.saving is not None:
        yield f"Saved against dedicated nodes: {bill.saving:.1%}."
    if bill.cost and report.samples:
        yield f"Samples for 1 {bill.currency}: {report.samples / bill.cost:,.0f}."
    if bill.cost is None:
        yield "No price was given: there are node-hours alone. Give prices with --prices."


def checkpoints_table(events: Iterable[Event], start: float) -> DataTable:
    """Return the committed checkpoints."""
    commits = sorted((each for each in events if isinstance(each, CheckpointCommitted)), key=lambda each: each.time)
    return DataTable.of(
        ("step", "at", "paused", "round", "node", "folder"),
        (
            (
                "" if each.step is None else f"{each.step:,}",
                duration_text(max(0.0, each.time - start)),
                duration_text(each.seconds),
                str(each.round),
                each.node,
                each.directory.rstrip("/").rpartition("/")[2],
            )
            for each in commits
        ),
    )


def rounds_table(report: Report, start: float) -> DataTable:
    """Return the rounds."""
    return DataTable.of(
        ("round", "workers", "steps", "at", "lasted", "nodes by rank", "ended because"),
        (
            (
                str(each.number),
                f"{each.world_size:,}",
                steps_text(each),
                duration_text(max(0.0, each.started - start)),
                duration_text(max(0.0, each.ended - each.started)),
                _names(each.members),
                reason_and_losses(each.reason, each.lost[:_MOST_NAMES]),
            )
            for each in report.rounds
        ),
    )


def recoveries_table(report: Report) -> DataTable:
    """Return the recoveries."""
    return DataTable.of(
        ("round", "lost", "back at step", "trained again", "recovered in", "measured from", "because"),
        (
            (
                str(each.round),
                _names(each.lost) or "a worker",
                "" if each.step is None else f"{each.step:,}",
                "" if each.lost_steps is None else counted(each.lost_steps, "step"),
                duration_text(each.seconds),
                MEASURED_FROM[each.since],
                each.reason,
            )
            for each in report.recoveries
        ),
    )


def _names(nodes: Sequence[str]) -> str:
    text = ", ".join(nodes[:_MOST_NAMES])
    return f"{text} and {len(nodes) - _MOST_NAMES} more" if len(nodes) > _MOST_NAMES else text
