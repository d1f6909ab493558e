"""Texts of the tables that the terminal and the page show, of numbers and durations, and ticks of an axis."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from decimal import Decimal

from azureml_elastic.ledger.accounting import Activity, Cause
from azureml_elastic.ledger.bill import Bill
from azureml_elastic.ledger.summary import NodeEnding
from azureml_elastic.ledger.timeline import RoundSpan

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MOST_INTERVALS = 6
_LARGE, _SMALL = 1e6, 1e-3
_HUGE = 1e300

MEASURED_FROM = {"loss": "the loss", "notice": "a survivor's notice", "last step": "the last step"}
"""Starts of the measurement of a recovery."""

OUTCOMES = {
    "succeeded": "succeeded",
    "failed": "failed",
    "interrupted": "was interrupted",
    "unfinished": "has no recorded end",
}
"""Outcomes of a run as the rest of a sentence."""


def number_text(value: float) -> str:
    """Return a number with four significant digits."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if value == int(value) and size < _LARGE:
        text = f"{int(value):,}"
    elif size >= _LARGE or size < _SMALL:
        text = _scientific(value)
    else:
        text = f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return text


def tick_text(value: float) -> str:
    """Return a round number without trailing zeros."""
    if value and not _SMALL <= abs(value) < _LARGE:
        return _scientific(value)
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration_text(seconds: float) -> str:
    """Return a duration in the two largest units that it has."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, part, part_name in _UNITS:
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit:,} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{whole} s"


def utc_text(time: float) -> str:
    """Return a time in seconds since the epoch as UTC; empty if there is no such time."""
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers from one at or below ``low`` to one at or above ``high``.

    Args:
        count: number of intervals, about which there are.
    """
    size = max(abs(low), abs(high))
    if size > _HUGE:  # further numbers would be too large for a float
        return [low, high] if low < high else [-size, size]
    if high - low <= max(size * 1e-9, 1 / _HUGE):
        margin = size / 2 if size > 1 / _HUGE else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    # Quotients are rounded: 0.3 / 0.1 is a little less than 3. A step may be five times as large as the largest value.
    first, last = math.floor(low / step + 1e-10), math.ceil(high / step - 1e-10)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def time_ticks(duration: float) -> list[tuple[float, str]]:
    """Return round times from 0 up to a duration in seconds, with their texts."""
    if duration <= 1:
        ticks = [tick for tick in nice_ticks(0, duration, _MOST_INTERVALS) if 0 <= tick <= duration]
        return [(tick, f"{tick * 1000:g} ms" if tick else "0") for tick in ticks]
    step = next((each for each in _TIMES if duration / each <= _MOST_INTERVALS), None)
    if step is None:
        step = _DAY * math.ceil(duration / _DAY / _MOST_INTERVALS)
    return [(index * step, _tick_text(index * step, step)) for index in range(int(duration // step) + 1)]


def _tick_text(time: int, step: int) -> str:
    if not time:
        return "0"
    if step % _DAY == 0:
        return f"{time // _DAY} d"
    if step % _HOUR == 0:
        return f"{time // _HOUR} h"
    if step % _MINUTE == 0 or time >= _HOUR:
        hours, minutes = divmod(time // _MINUTE, 60)
        return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
    minutes, seconds = divmod(time, _MINUTE)
    return f"{minutes}:{seconds:02d}" if minutes else f"{seconds} s"


def activity_text(activity: Activity, cause: Cause | None) -> str:
    """Return an activity with its cause."""
    return activity if cause is None else f"{activity}: {cause}"


def goodput_text(least: float, most: float | None, digits: int = 0) -> str:
    """Return the goodput, with its limits where part of the time is unknown.

    Args:
        least: share of the time that is known to be training which was kept.
        most: that share with all unknown time; ``None`` if it is the same.
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
