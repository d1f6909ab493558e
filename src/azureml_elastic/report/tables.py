"""Tables and sentences that the terminal and the page have in common. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.ledger.bill import Bill
from azureml_elastic.ledger.events import CheckpointCommitted
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.samples import SampleAudit
from azureml_elastic.ledger.sentences import reason_and_losses
from azureml_elastic.ledger.summary import Report
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import MEASURED_FROM, bill_rows, duration_text, money_text, steps_text

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
            # The first rows show how the run began, the last ones how it ended.
            found = [*found[: _MOST_ROWS // 2], *found[-_MOST_ROWS // 2 :]]
        return cls(tuple(headings), tuple(found), omitted)

    def without(self, *headings: str) -> DataTable:
        """Return the table without some of its columns."""
        kept = [index for index, name in enumerate(self.headings) if name not in headings]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return DataTable(tuple(self.headings[index] for index in kept), rows, self.omitted)

    @property
    def kinds(self) -> list[str | None]:
        """``number`` or ``text`` for each column of numbers or of long texts, otherwise ``None``."""
        return ["number" if each in _NUMBERS else "text" if each in _TEXTS else None for each in self.headings]


def cost_table(bill: Bill | None) -> DataTable | None:
    """Return the nodes by pool, size and tier, with a line of sums; ``None`` without a bill."""
    if bill is None or not bill.lines:
        return None
    rows = bill_rows(bill)
    found = [tuple(row.values()) for row in rows]
    if len(rows) > 1:
        sums = {
            "nodes": str(sum(line.nodes for line in bill.lines)),
            "node-hours": f"{bill.hours:.4f}",
            "cost": money_text(bill.cost, bill.currency),
            "dedicated": money_text(bill.dedicated_cost, bill.currency),
        }
        found.append(tuple(sums.get(name, "") for name in rows[0]))
    return DataTable.of(tuple(rows[0]), found)


def cost_notes(bill: Bill | None, samples: int | None = None) -> Iterable[str]:
    """Return the sentences below the table of costs; ``samples`` are those that were trained, if they are known."""
    if bill is None:
        return
    if bill.saving is not None:
        yield f"Saved against dedicated nodes: {bill.saving:.1%}."
    if bill.cost and samples:
        yield f"Samples for 1 {bill.currency}: {samples / bill.cost:,.0f}."
    if bill.cost is None:
        yield "No price was given: there are node-hours alone. Give prices with --prices."


def checkpoints_table(picture: Picture, start: float) -> DataTable:
    """Return the committed checkpoints."""
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
            for each in picture.all(CheckpointCommitted)
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


def audit_verdict(audit: SampleAudit) -> tuple[Literal["good", "bad", ""], str]:
    """Return whether each sample was trained once, empty if that is not proven, and what was found."""
    text = f"{counted(audit.seen, 'sample')} of {counted(audit.epochs, 'epoch')}, none missed, none repeated"
    if not audit.exactly_once:
        text = f"{audit.missing:,} missed and {audit.repeated:,} repeated of {counted(audit.seen, 'sample')}"
    if audit.dropped_lines:
        text += f"; {counted(audit.dropped_lines, 'line')} of the record could not be written"
    if audit.unfinished:
        trained = audit.dataset_size - audit.unfinished
        text += f"; the last epoch ended after {trained:,} of {audit.dataset_size:,} samples"
    if audit.rolled_back_steps:
        samples, steps = counted(audit.rolled_back_samples, "sample"), counted(audit.rolled_back_steps, "step")
        text += f"; {samples} of {steps} rolled back by losses and trained again"
    return "good" if audit.exactly_once else "bad" if audit.refuted else "", text


def notes(report: Report) -> Iterable[str]:
    """Return what else is to be known of the run, as sentences."""
    left = sum(node.leftovers for node in report.nodes)
    if left:
        yield f"{counted(left, 'process', 'processes')} outlived their agent and had to be killed."
    if report.skipped_events:
        yield f"{counted(report.skipped_events, 'line')} of the event files could not be read."
    if report.resumed_from is not None:
        yield f"The run has continued that of {report.resumed_from}."
