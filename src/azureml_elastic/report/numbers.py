"""Texts of numbers and durations, and round positions for the ticks of an axis. Pure functions."""

from __future__ import annotations

import math
from datetime import datetime, timezone

__all__ = ["duration_text", "nice_ticks", "number_text", "tick_text", "time_ticks", "utc_text"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_LARGE, _SMALL = 1e6, 1e-3
_HUGE = 1e300


def number_text(value: float) -> str:
    """Return a number with four significant digits."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if value == int(value) and size < _LARGE:
        text = f"{int(value):,}"
    elif size >= _LARGE or size < _SMALL:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return text


def tick_text(value: float) -> str:
    """Return a round number without trailing zeros."""
    size = abs(value)
    if value and (size >= _LARGE or size < _SMALL):
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    text = f"{value:,.6f}"
    return text.rstrip("0").rstrip(".")


def duration_text(seconds: float) -> str:
    """Return a duration in the two largest units that it has."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, part, part_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
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
        low: least value.
        high: greatest value.
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
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def time_ticks(duration: float, count: int = 6) -> list[tuple[float, str]]:
    """Return round times from 0 up to a duration in seconds, with their texts.

    Args:
        duration: last time.
        count: most intervals.
    """
    if duration <= 1:
        ticks = [tick for tick in nice_ticks(0, duration, count) if 0 <= tick <= duration]
        return [(tick, f"{tick * 1000:g} ms" if tick else "0") for tick in ticks]
    step = next((each for each in _TIMES if duration / each <= count), None)
    if step is None:
        step = _DAY * math.ceil(duration / _DAY / count)
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
