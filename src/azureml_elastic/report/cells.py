"""Texts of the tables that the terminal and the page show."""

from __future__ import annotations

from decimal import Decimal

from azureml_elastic.ledger.accounting import Activity, Cause
from azureml_elastic.ledger.bill import Bill
from azureml_elastic.ledger.summary import NodeEnding
from azureml_elastic.ledger.timeline import RoundSpan

__all__ = [
    "MEASURED_FROM",
    "OUTCOMES",
    "activity_text",
    "bill_rows",
    "ending_text",
    "goodput_text",
    "money_text",
    "steps_text",
]

MEASURED_FROM = {"loss": "the loss", "notice": "a survivor's notice", "last step": "the last step"}
"""Starts of the measurement of a recovery."""

OUTCOMES = {
    "succeeded": "succeeded",
    "failed": "failed",
    "interrupted": "was interrupted",
    "unfinished": "has no recorded end",
}
"""Outcomes of a run as the rest of a sentence."""


def activity_text(activity: Activity, cause: Cause | None) -> str:
    """Return an activity with its cause."""
    return activity if cause is None else f"{activity}: {cause}"


def goodput_text(least: float, most: float | None, digits: int = 0) -> str:
    """Return the goodput, with its limits where part of the time is unknown.

    Args:
        least: share of the time that is known to be training which was kept.
        most: that share with all unknown time; ``None`` if it is the same.
        digits: digits after the decimal point.
    """
    low, high = f"{least:.{digits}%}", f"{least if most is None else most:.{digits}%}"
    return low if low == high else f"{low} to {high}"


def ending_text(ending: NodeEnding, exit_code: int | None) -> str:
    """Return the end of a node in a word or two; empty if it is unknown."""
    if ending == "exited":
        return "finished" if exit_code == 0 else f"exited with {exit_code}"
    return "" if ending == "unknown" else ending


def bill_rows(bill: Bill) -> list[dict[str, str]]:
    """Return the lines of a bill by column; a column that no line has is left out."""
    rows = [
        {
            "pool": line.pool,
            "size": line.size or "",
            "tier": (line.tier or "").replace("_", "-"),
            "nodes": str(line.nodes),
            "node-hours": f"{line.hours:.4f}",
            "per hour": money_text(line.price, bill.currency),
            "cost": money_text(line.cost, bill.currency),
            "dedicated": money_text(line.dedicated_cost, bill.currency),
        }
        for line in bill.lines
    ]
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    return [{name: row[name] for name in shown} for row in rows]


def money_text(amount: Decimal | None, currency: str) -> str:
    """Return an amount with two digits, or four if it is small; empty if there is none."""
    if amount is None:
        return ""
    return f"{amount:,.2f} {currency}" if amount >= 1 or not amount else f"{amount:.4f} {currency}"


def steps_text(round_: RoundSpan) -> str:
    """Return the steps of a round."""
    if round_.last_step is None:
        return "none reported" if round_.ran else "did not start"
    first = round_.first_step if round_.restored_step is None else round_.restored_step + 1
    if first is not None and first > round_.last_step:
        return "none"
    return f"{first} to {round_.last_step}"
