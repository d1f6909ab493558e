"""Selection of a round's members from its candidates, by strikes and by which nodes reach each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from azureml_elastic.node.rendezvous.state.round import Limits, Member, Round

__all__ = ["candidates", "describe_partitions", "is_quarantined", "partitioned_nodes", "select_members"]


def candidates(round_: Round, members: Iterable[Member]) -> list[Member]:
    """Return the nodes that want to be in the open round, in the order of the ranks that they would get.

    Members of the round before keep their order, so that rank 0 and its memory stay where they are. Others follow by
    name.
    """
    ranks = {node: rank for rank, node in enumerate(round_.previous)}
    waiting = [member for member in members if member.state == "waiting" and member.round == round_.number]
    return sorted(waiting, key=lambda member: (ranks.get(member.node, len(ranks)), member.node))


def is_quarantined(member: Member, limits: Limits) -> bool:
    """Return whether the member's host has so many strikes that it is a member only where the minimum needs it."""
    return limits.quarantine is not None and member.strikes >= limits.quarantine


def partitioned_nodes(ranked: Sequence[Member]) -> dict[str, int]:
    """Return the nodes to leave out so that all others reach each other, each with the number of nodes it cannot reach.

    The node that is cut off from most others is left out first, among equals the one with the last rank. So a node that
    is cut off from all others is left out itself, whichever side noticed it.

    Args:
        ranked: candidates in the order of ranks, each node once.
    """
    if not any(member.unreached for member in ranked):
        return {}
    names = {member.incarnation: member.node for member in ranked}
    unreachable: dict[str, set[str]] = {member.node: set() for member in ranked}
    for member in ranked:
        for incarnation in member.unreached:
            peer = names.get(incarnation, member.node)
            if peer != member.node:
                unreachable[member.node].add(peer)
                unreachable[peer].add(member.node)
    removed: dict[str, int] = {}
    order = [member.node for member in reversed(ranked)]
    while (worst := max(order, key=lambda node: len(unreachable[node]), default=None)) and unreachable[worst]:
        removed[worst] = len(unreachable[worst])
        for peer in unreachable.pop(worst):
            unreachable[peer].discard(worst)
        order.remove(worst)
    return removed


def select_members(ranked: Sequence[Member], survivors: Collection[str], limits: Limits) -> list[Member]:
    """Return the members of the round that is sealed with these candidates, in rank order.

    - Above the maximum, candidates with fewer strikes are preferred, a spare even to a survivor: the workers are
      restarted in any case, and a host that broke one round is likelier to break the next. Among equals the order of
      ranks decides, which prefers survivors.
    - One survivor is kept where there is more than one place, because it holds the newest state in memory.
    - Quarantined and partitioned nodes become members only where the minimum is not reached without them, those that
      are cut off from fewest first, then those with the fewest strikes. They get the last ranks, because the loss of
      rank 0's node costs most.

    Args:
        ranked: candidates in the order of ranks, each node once.
        survivors: nodes of the round before.
        limits: node counts and quarantine threshold.
    """
    accepted = [member for member in ranked if not is_quarantined(member, limits)]
    partitioned = partitioned_nodes(accepted)
    fit = sorted((each for each in accepted if each.node not in partitioned), key=lambda member: member.strikes)
    fit_names = {member.node for member in fit}
    unfit = sorted(
        (member for member in ranked if member.node not in fit_names),
        key=lambda member: (partitioned.get(member.node, 0), member.strikes),
    )
    taken, left = fit[: limits.maximum], fit[limits.maximum :]
    survivor = next((member for member in left if member.node in survivors), None)
    if survivor is not None and limits.maximum > 1 and not any(member.node in survivors for member in taken):
        taken[-1] = survivor
    names = {member.node for member in taken}
    return [member for member in ranked if member.node in names] + unfit[: max(0, limits.minimum - len(taken))]


def describe_partitions(ranked: Sequence[Member], sealed: Collection[str]) -> list[str]:
    """Return a text for each partitioned candidate: whether it is among ``sealed``, and which nodes it cannot reach."""
    texts = []
    for node in partitioned_nodes(ranked):
        own = next(member for member in ranked if member.node == node)
        concerned = [member for member in ranked if member is own or own.incarnation in member.unreached]
        reasons = [member.reason for member in concerned if member.reason]
        more = f" (and {len(reasons) - 1} similar reports)" if len(reasons) > 1 else ""
        texts.append(f"{'with' if node in sealed else 'without'} {node}: {reasons[-1] if reasons else ''}{more}")
    return texts
