"""Who of those that wait gets a place, given what is held against their hosts. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from azureml_elastic.node.rendezvous.round import Limits, Member

__all__ = ["chosen", "quarantined"]


def quarantined(member: Member, limits: Limits) -> bool:
    """Return whether so much is held against the member's host that it trains only where it must."""
    return limits.quarantine is not None and member.strikes >= limits.quarantine


def chosen(ranked: Sequence[Member], survivors: Collection[str], limits: Limits) -> list[Member]:
    """Return the members that get a place, in the order of the ranks that they get.

    - Where there are more members than places, those with fewer strikes are preferred, also a spare to a survivor: the
      workers of a round that re-forms are stopped in any case, and a host that broke one is likelier to break the
      next. Among equals the order of the ranks decides, so that survivors are preferred.
    - One survivor is kept all the same where there is more than one place: it holds the newest state in memory.
    - Quarantined members get a place only where the minimum cannot be reached without them, those with the fewest
      strikes first. They get the last ranks, because rank 0's node is the one whose loss costs most.

    Args:
        ranked: all that wait, in the order of ranks; each node once.
        survivors: nodes of the round before.
        limits: node counts and the number of strikes from which on a host is quarantined.
    """
    fit = sorted((member for member in ranked if not quarantined(member, limits)), key=lambda member: member.strikes)
    barred = sorted((member for member in ranked if quarantined(member, limits)), key=lambda member: member.strikes)
    taken, left = fit[: limits.maximum], fit[limits.maximum :]
    keeper = next((member for member in left if member.node in survivors), None)
    if keeper is not None and limits.maximum > 1 and not any(member.node in survivors for member in taken):
        taken[-1] = keeper
    names = {member.node for member in taken}
    return [member for member in ranked if member.node in names] + barred[: max(0, limits.minimum - len(taken))]
