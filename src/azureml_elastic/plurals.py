"""Counts in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, as in ``1 node`` and ``1,024 nodes``.

    Args:
        number: number of things.
        noun: the noun for one of them.
        plural: the noun for others; by default with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
