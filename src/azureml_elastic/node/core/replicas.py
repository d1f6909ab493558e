"""Rounds of whole replicas: which nodes together hold one copy of a sharded model, and in which order.

A *replica* is ``nodes_per_replica`` nodes with consecutive ranks. A node's *place* is its position in its replica. It
decides which shards its workers have: nodes of the same place in two replicas hold the same ones. Where a replica loses
a node, the others of it are put together with nodes of other broken replicas, or with new ones, and keep their places,
so that they have the shards of the next round already. With one node per replica all of this comes to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def whole_replicas(nodes: int, nodes_per_replica: int) -> int:
    """Return how many of so many nodes are in whole replicas."""
    return nodes - nodes % nodes_per_replica


def room_for(spares: Collection[str], members: int, maximum: int, nodes_per_replica: int) -> bool:
    """Return whether a round of so many members should make room for waiting nodes.

    Fewer than a replica of them would wait again, after an interruption for nothing.
    """
    return bool(spares) and len(spares) >= nodes_per_replica <= maximum - members


def kept_order(
    ranked: Sequence[str], gone: Collection[str], nodes_per_replica: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the survivors of a round in the order in which the next one takes them, and the places of the last ones.

    Whole replicas come first, in the order of ranks. The rest of broken ones follows by place, so that the first of all
    survivors stays the first of its replica wherever that is possible: it will be rank 0.

    Args:
        ranked: members of the round in the order of ranks.
        gone: members that do not go on.

    Returns:
        The survivors, and the places of those that are in no whole replica.
    """
    replicas = [ranked[begin : begin + nodes_per_replica] for begin in range(0, len(ranked), nodes_per_replica)]
    whole = [each for each in replicas if len(each) == nodes_per_replica and not any(node in gone for node in each)]
    rest = [
        (place, number, node)
        for number, each in enumerate(replicas)
        if each not in whole
        for place, node in enumerate(each)
        if node not in gone
    ]
    rest.sort()
    return (*(node for each in whole for node in each), *(node for _, _, node in rest)), tuple(
        place for place, _, _ in rest
    )


def _places(previous: Sequence[str], places: Sequence[int], nodes_per_replica: int) -> dict[str, int]:
    """Return the places of the survivors, by what :func:`kept_order` has returned."""
    whole = len(previous) - len(places)
    return {
        node: (number if number < whole else places[number - whole]) % nodes_per_replica
        for number, node in enumerate(previous)
    }


def preferred(
    fit: Sequence[str], previous: Sequence[str], places: Sequence[int], count: int, nodes_per_replica: int
) -> set[str]:
    """Return the nodes that are taken where only some can be: one survivor of each place, then the first ones.

    The survivors hold the newest state in memory, each the shards of its place: without one of them a place's part
    of it would be lost. A single node is taken for itself alone.

    Args:
        fit: candidates in the order of preference.
        previous: survivors of the round before.
        places: places of those that are in no whole replica.
        count: number of nodes to take.
    """
    place_of = _places(previous, places, nodes_per_replica)
    holders: dict[int, str] = {}
    for node in fit:
        if node in place_of:
            holders.setdefault(place_of[node], node)
    first = [holders[place] for place in sorted(holders)] if count > 1 else []
    return set([*first, *(node for node in fit if node not in first)][:count])


def arranged(
    taken: Sequence[str], fit: Collection[str], previous: Sequence[str], places: Sequence[int], nodes_per_replica: int
) -> tuple[str, ...]:
    """Return the members of a round in the order of ranks: replica after replica.

    Args:
        taken: members in the order of preference; their number is that of whole replicas.
        fit: nodes that keep the ranks they had, as far as they had some.
        previous: survivors of the round before; replicas of which all are taken stay as they are.
        places: places of those survivors that are in no whole replica.
    """
    place_of = {
        node: place for node, place in _places(previous, places, nodes_per_replica).items()
        if node in fit and node in taken
    }  # fmt: skip
    replicas = (
        previous[begin : begin + nodes_per_replica]
        for begin in range(0, len(previous) - len(places), nodes_per_replica)
    )
    rows = [replica for replica in replicas if all(node in place_of for node in replica)]
    kept = {node for row in rows for node in row}
    left = [node for node in taken if node not in kept]
    new: list[list[str | None]] = [[None] * nodes_per_replica for _ in range(len(left) // nodes_per_replica)]
    others: list[str] = []
    for node in left:
        place = place_of.get(node)
        row = None if place is None else next((row for row in new if row[place] is None), None)
        if row is None or place is None:
            others.append(node)
        else:
            row[place] = node
    fill = iter(others)
    # There are as many as empty places, since the taken nodes are whole replicas.
    made = [[next(fill) if node is None else node for node in row] for row in new]
    if not rows and (first := next((node for node in made[0] if node in place_of), None) if made else None):
        # Rank 0 is one that the others know and can connect to at once, even if its workers then need other shards.
        made[0].remove(first)
        made[0].insert(0, first)
    return tuple(node for row in (*rows, *made) for node in row)
