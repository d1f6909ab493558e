"""Who of those that wait gets a place, given what is held against hosts, and who reaches whom. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from azureml_elastic.node.rendezvous.state.round import Limits, Member

__all__ = ["apart", "chosen", "in_the_way", "quarantined"]


def quarantined(member: Member, limits: Limits) -> bool:
    """Return whether so much is held against the member's host that it trains only where it must."""
    return limits.quarantine is not None and member.strikes >= limits.quarantine


def apart(ranked: Sequence[Member]) -> dict[str, int]:
    """Return the nodes without which all others reach each other, each with how many of them it cannot reach.

    Whoever is cut off from most goes first; of several the last in the order of the ranks. So a node that is cut off
    from all others goes, and not the others, whoever noticed it.

    Args:
        ranked: all that wait, in the order of ranks; each node once.
    """
    if not any(member.unreached for member in ranked):
        return {}
    names = {member.incarnation: member.node for member in ranked}
    gaps: dict[str, set[str]] = {member.node: set() for member in ranked}
    for member in ranked:
        for incarnation in member.unreached:
            peer = names.get(incarnation, member.node)
            if peer != member.node:
                gaps[member.node].add(peer)
                gaps[peer].add(member.node)
    out: dict[str, int] = {}
    order = [member.node for member in reversed(ranked)]
    while (worst := max(order, key=lambda node: len(gaps[node]), default=None)) is not None and gaps[worst]:
        out[worst] = len(gaps[worst])
        for peer in gaps.pop(worst):
            gaps[peer].discard(worst)
        order.remove(worst)
    return out


def chosen(ranked: Sequence[Member], survivors: Collection[str], limits: Limits) -> list[Member]:
    """Return the members that get a place, in the order of the ranks that they get.

    - Where there are more members than places, those with fewer strikes are preferred, also a spare to a survivor: the
      workers of a round that re-forms are stopped in any case, and a host that broke one is likelier to break the
      next. Among equals the order of the ranks decides, so that survivors are preferred.
    - One survivor is kept all the same where there is more than one place: it holds the newest state in memory.
    - Quarantined members, and those that are cut off from others, get a place only where the minimum cannot be reached
      without them: first those that are cut off from fewest, of these those with the fewest strikes. They get the last
      ranks, because rank 0's node is the one whose loss costs most.

    Args:
        ranked: all that wait, in the order of ranks; each node once.
        survivors: nodes of the round before.
        limits: node counts and the number of strikes from which on a host is quarantined.
    """
    sound = [member for member in ranked if not quarantined(member, limits)]
    cut_off = apart(sound)
    fit = sorted((member for member in sound if member.node not in cut_off), key=lambda member: member.strikes)
    outside = {member.node for member in ranked}.difference(member.node for member in fit)
    barred = sorted(
        (member for member in ranked if member.node in outside),
        key=lambda member: (cut_off.get(member.node, 0), member.strikes),
    )
    taken, left = fit[: limits.maximum], fit[limits.maximum :]
    keeper = next((member for member in left if member.node in survivors), None)
    if keeper is not None and limits.maximum > 1 and not any(member.node in survivors for member in taken):
        taken[-1] = keeper
    names = {member.node for member in taken}
    return [member for member in ranked if member.node in names] + barred[: max(0, limits.minimum - len(taken))]


def in_the_way(ranked: Sequence[Member], sealed: Collection[str]) -> list[str]:
    """Return, in words, which candidates were in the way of the others, and why.

    Args:
        ranked: all that waited.
        sealed: the nodes that got a place.
    """
    told = []
    for node in apart(ranked):
        own = next(member for member in ranked if member.node == node)
        concerned = [member for member in ranked if member is own or own.incarnation in member.unreached]
        reasons = [member.reason for member in concerned if member.reason]
        more = f" (and {len(reasons) - 1} others say the like)" if len(reasons) > 1 else ""
        told.append(f"{'with' if node in sealed else 'without'} {node}: {reasons[-1] if reasons else ''}{more}")
    return told
