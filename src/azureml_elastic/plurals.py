"""Counts in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, as in ``1 node`` and ``1,024 nodes``; the plural has an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
