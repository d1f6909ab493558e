"""A small set of articles and summaries, written for this sample: weather, sport and traffic in a few towns."""

from __future__ import annotations

import itertools

__all__ = ["articles"]

_TOWNS = ("Arlen", "Borgh", "Castel", "Dunmore", "Elster", "Faro", "Gryning", "Hollow")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_EVENTS = (
    (
        (
            "Rain fell over {town} on {day} from the early morning. The river rose by two feet, and the lower "
            "bridge was closed until the evening. Nobody was hurt."
        ),
        "Rain closes a bridge in {town} on {day}.",
    ),
    (
        (
            "The team of {town} met its neighbours on {day} before a full stand. After a quiet first half it "
            "scored three times within ten minutes. The coach praised the young players."
        ),
        "{town} wins its match on {day}.",
    ),
    (
        (
            "A tree fell on the line to {town} on {day}, and all trains stopped for four hours. Buses took the "
            "passengers home. The company expects no further delays."
        ),
        "Trains to {town} stop on {day} after a tree falls.",
    ),
    (
        (
            "The market of {town} opened its new hall on {day}. Forty farmers sold bread, cheese and fruit, and "
            "the queue reached the church. The mayor cut the ribbon."
        ),
        "{town} opens a market hall on {day}.",
    ),
    (
        (
            "Visitors of the museum in {town} found a new room on {day}. It shows maps and tools of the first "
            "settlers, which a family had kept in its attic. Entry is free this week."
        ),
        "A museum room opens in {town} on {day}.",
    ),
    (
        (
            "Snow surprised {town} on {day}. Schools stayed closed, and neighbours cleared the road to the "
            "hospital together. The sun is expected to return soon."
        ),
        "Snow closes the schools of {town} on {day}.",
    ),
)


def articles() -> list[dict[str, str]]:
    """Return 240 articles with their summaries, in the fields of ``cnn_dailymail``."""
    return [
        {"article": article.format(town=town, day=day), "highlights": summary.format(town=town, day=day)}
        for (article, summary), town, day in itertools.product(_EVENTS, _TOWNS, _DAYS)
    ]
