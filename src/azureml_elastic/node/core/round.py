"""Rounds and members as data.

A *round* is one agreed set of nodes in rank order. The row ``round`` of the table holds the newest one and changes only
by compare-and-swap::

    (no row) = open 1 ──seal──> sealed 1 ──reopen──> open 2 ──seal──> sealed 2 ── ... ──close──> succeeded | failed

The node that will be rank 0 seals an open round with one write, which carries all members and the address of rank 0's
store; if it does not, the next candidate does. Clocks of different machines are never compared: each duration is
measured on one node's monotonic clock.

The row may also go back in time, or be gone. A failover of the storage may lose the last writes, and a table may be
cleaned or made again while nodes are in a round. A node that has read, written or received a version of the row, and
then reads an older one, writes the row again with a higher number than any that it knows, by the same compare-and-swap
as any other change. All nodes join that round. A node of a later round that finds this one does the same, so the
highest number of all living nodes remains.

**The newest version of the round that a node knows, so that a node which receives one need not read the table.** A node
acts at once on a received round that follows the one that it knows: the seal of an open round, or the next open round.
Every node may write either of them, and repeating a round costs one restart. Any other received round, one that is
closed or leaves out a round, is only the reason to read the row.

**Whole replicas.** A *replica* is ``nodes_per_replica`` nodes with consecutive ranks. A node's *place* is its position
in its replica. It decides which shards its workers have: nodes of the same place in two replicas hold the same ones.
Where a replica loses a node, the others of it are put together with nodes of other broken replicas, or with new ones,
and keep their places, so that they have the shards of the next round already. With one node per replica all of this
comes to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, asdict, dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, Literal

from azureml_elastic.node.core.failures import FailureRecord, aged, read_records


def whole_replicas(nodes: int, nodes_per_replica: int) -> int:
    """Return how many of so many nodes are in whole replicas."""
    return nodes - nodes % nodes_per_replica


def room_for(spares: Collection[str], members: int, maximum: int, nodes_per_replica: int) -> bool:
    """Return whether a round of so many members should make room for waiting nodes.

    Fewer than a replica of them would wait again, after an interruption for nothing.
    """
    return bool(spares) and len(spares) >= nodes_per_replica <= maximum - members


def kept_order(
    ranked: Sequence[str], gone: AbstractSet[str], nodes_per_replica: int
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
    kept: list[str] = []
    rest: list[tuple[int, int, str]] = []
    for number, each in enumerate(replicas):
        if len(each) == nodes_per_replica and gone.isdisjoint(each):
            kept += each
        else:
            rest += [(place, number, node) for place, node in enumerate(each) if node not in gone]
    rest.sort()
    return (*kept, *(node for _, _, node in rest)), tuple(place for place, _, _ in rest)


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
    chosen = {*taken}.intersection(fit)
    place_of = {node: place for node, place in _places(previous, places, nodes_per_replica).items() if node in chosen}
    replicas = (
        previous[begin : begin + nodes_per_replica]
        for begin in range(0, len(previous) - len(places), nodes_per_replica)
    )
    rows = [replica for replica in replicas if all(map(place_of.__contains__, replica))]
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


RoundState = Literal["open", "sealed", "succeeded", "failed"]
MemberState = Literal["starting", "waiting", "left"]

_ORDER: tuple[RoundState, ...] = ("open", "sealed", "succeeded", "failed")


@dataclass(frozen=True)
class Limits:
    """Limits of the members of a round.

    Args:
        quarantine: number of strikes from which a node becomes a member only if the minimum is not reached without it;
            ``None`` for never.
        nodes_per_replica: number of nodes that together hold one copy of a sharded model, of which all numbers are
            multiples: a round has whole replicas, and what is left over waits.
    """

    minimum: int
    maximum: int
    quarantine: int | None = None
    nodes_per_replica: int = 1


@dataclass(frozen=True)
class Member:
    """One node's row.

    Args:
        node: name of the node, unique in the run.
        incarnation: random identifier of the agent process; a restarted node has another one.
        state: ``starting`` while the node imports, ``waiting`` when it wants to be in ``round``, ``left`` for good.
        round: number of the round that the node wants to be in.
        host: address under which other nodes reach the node.
        store_port: port on which it would serve the round's store.
        reason: why it left, or which nodes it cannot reach.
        host_id: identifier of the machine, against which strikes are counted.
        strikes: number of live strikes when the row was written.
        unreached: incarnations of the nodes that it cannot reach.
        data_port: port for probes of the ports that workers use; 0 where probing the hub's port suffices.
    """

    node: str
    incarnation: str
    state: MemberState = "waiting"
    round: int = 0
    host: str = ""
    store_port: int = 0
    hub_port: int = 0
    slots: int = 1
    reason: str = ""
    host_id: str = ""
    strikes: int = 0
    unreached: tuple[str, ...] = ()
    data_port: int = 0

    def to_value(self) -> dict[str, Any]:
        """Return the row's value."""
        value = dict(vars(self))  # all fields are plain; ``asdict`` would take 80 ms for a thousand members
        for name in ("unreached", "data_port"):
            if not value[name]:
                del value[name]  # almost always empty, and a round of very many members must fit into one row
        return value

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Member:
        """Read a row's value; fields of later releases are ignored.

        Raises:
            ValueError: it is not the value of such a row.
        """
        require_member(value)
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        if "unreached" in fields:
            fields["unreached"] = tuple(fields["unreached"])
        return cls(**fields)


@dataclass(frozen=True)
class Round:
    """The row ``round``.

    Args:
        number: number of the round, from 1.
        members: members in rank order, once sealed.
        previous: names of the survivors of the round before in rank order, which they keep; those of whole replicas
            come first.
        places: places within their replicas of those survivors that are in no whole one, the last of ``previous``.
        nodes_per_replica: number of nodes of a replica, once sealed.
        expected: names of the nodes that the open round waits for.
        finishing: names of preempted nodes whose workers may still save, for which the open round waits until they have
            left.
        finishing_seconds: seconds for which it waits for them.
        failures: worker failures of the whole run that still count, oldest first.
        losses: number of rounds that ended because a node or a worker was lost.
        seconds: total duration of the rounds before this one.
        failed_rounds: number of consecutive rounds that ended because their nodes could not connect to each other.
        message: failure that ended the run.
        exit_code: exit code of every node of a failed run.
    """

    number: int = 1
    state: RoundState = "open"
    members: tuple[Member, ...] = ()
    previous: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    nodes_per_replica: int = 1
    expected: tuple[str, ...] = ()
    finishing: tuple[str, ...] = ()
    finishing_seconds: float = 0.0
    failures: tuple[FailureRecord, ...] = ()
    losses: int = 0
    seconds: float = 0.0
    failed_rounds: int = 0
    reason: str = ""
    message: str = ""
    exit_code: int = 0

    def to_value(self) -> dict[str, Any]:
        """Return the row's value."""
        members = [member.to_value() for member in self.members]
        return {"version": 1, **vars(self), "members": members, "failures": [asdict(each) for each in self.failures]}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Round:
        """Read the row's value; fields of later releases are ignored.

        Raises:
            ValueError: it is not the value of such a row.
        """
        _require(value, _ROUND_FIELDS, ("number", "state"))
        if value["state"] not in _ORDER:
            raise ValueError(f"the round's state is {value['state']!r}")
        if value.get("nodes_per_replica", 1) < 1 or not all(isinstance(each, int) for each in value.get("places", ())):
            raise ValueError(f"its replicas are {value.get('nodes_per_replica')!r}, {str(value.get('places'))[:40]}")
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        fields["members"] = tuple(Member.from_value(member) for member in value.get("members", ()))
        for name in ("previous", "places", "expected", "finishing"):
            fields[name] = tuple(value.get(name, ()))
        fields["failures"] = read_records(value.get("failures"))
        return cls(**fields)

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("succeeded", "failed")

    @property
    def world_size(self) -> int:
        """Number of workers of all members."""
        return sum(member.slots for member in self.members)

    def rank_of(self, node: str, incarnation: str) -> int | None:
        """Return the rank of this incarnation of the node, ``None`` if it is not a member."""
        for rank, member in enumerate(self.members):
            if (member.node, member.incarnation) == (node, incarnation):
                return rank
        return None

    def is_newer_than(self, other: Round | None) -> bool:
        """Return whether this is a later version of the row than ``other``; every version is later than ``None``."""
        if other is None:
            return True
        return (self.number, _ORDER.index(self.state)) > (other.number, _ORDER.index(other.state))


def reopened(
    round_: Round,
    reason: str,
    lost: Iterable[str] = (),
    waiting: Iterable[str] = (),
    *,
    finishing: Iterable[str] = (),
    finishing_seconds: float = 0.0,
    failures: tuple[FailureRecord, ...] = (),
    seconds: float = 0.0,
    round_failed: bool = False,
) -> Round:
    """Return the open round after a sealed one.

    Args:
        round_: sealed round that ends.
        lost: members that will not go on.
        waiting: spares, which the next round waits for; one may have the name of a lost member.
        finishing: those of the lost nodes whose workers may still save.
        finishing_seconds: seconds for which the next round waits until these have left.
        failures: failures of the run with the one that ends the round; by default those of the round, aged by its
            duration.
        seconds: duration of the round on the clock of the node that ends it; 0 for a node that was not a member.
        round_failed: whether the round ends because its nodes could not connect to each other.
    """
    gone = set(lost)
    survivors, places = kept_order([member.node for member in round_.members], gone, round_.nodes_per_replica)
    return Round(
        number=round_.number + 1,
        previous=survivors,
        places=places,
        expected=survivors + tuple(node for node in waiting if node not in survivors),
        finishing=tuple(sorted(finishing)),
        finishing_seconds=finishing_seconds,
        failures=failures or aged(round_.failures, seconds),
        losses=round_.losses + bool(gone or failures),
        seconds=round_.seconds + seconds,
        failed_rounds=round_.failed_rounds + 1 if round_failed else 0,
        reason=reason,
    )


_TURN_SECONDS = 0.05
"""Time that each survivor leaves the one before it to end a broken round."""

_MAX_TURN_SECONDS = 1.0
"""Longest time that a survivor waits for all those before it."""


_CALL_SECONDS = 10.0
"""The same for a rank 0 that is connected and knows of the loss: a call of a table that throttles takes as long."""


def turn_of(round_: Round, lost: Collection[str], node: str, *, informed: Collection[str] = ()) -> tuple[float, Member]:
    """Return for how long a member leaves it to others to end a broken round, and the one whose turn is first.

    Rank 0, or the first survivor after it, ends the round. The others make sure that it is ended. While rank 0 is about
    to, a call of the table by another one would only keep that one from the next round.

    Args:
        round_: sealed round, in which at least this node survives.
        lost: members that will not go on.
        informed: those of them that rank 0's hub has reported, and this node is still connected to it.
    """
    alive = [member for member in round_.members if member.node not in lost]
    turn = next((turn for turn, member in enumerate(alive) if member.node == node), 0)
    if turn and lost and {*lost} <= {*informed} and alive[0] == round_.members[0]:
        return _CALL_SECONDS, alive[0]
    return min(_MAX_TURN_SECONDS, _TURN_SECONDS * turn), alive[0]


def has_gone_back(row: Round, known: Round | None) -> bool:
    """Return whether the row holds an older version than one that was known before it was read."""
    return known is not None and known.is_newer_than(row)


def describe_loss(row: Round, known: Round) -> str:
    """Return the reason of the round that replaces the lost one."""
    is_gone = row == Round()
    found = "is gone" if is_gone else f"went back to round {row.number} ({row.state})"
    return f"the table's row of round {known.number} ({known.state}) {found}"


def restored(row: Round, known: Round) -> Round:
    """Return the version to write in place of an older one: the next open round, or the end of the run once more.

    Args:
        row: version that the table holds.
        known: newest version that this node knows.
    """
    if known.closed:
        return known
    reason = describe_loss(row, known)
    if known.state == "sealed":
        return reopened(known, reason)
    # Another node may have sealed it, and that version may be lost, too.
    return replace(known, number=known.number + 1, reason=reason)


def is_same_round(row: Round, mine: Round) -> bool:
    """Return whether the row still holds this sealed round, and not another one of the same number."""
    if (row.number, row.state) != (mine.number, mine.state):
        return False
    return [member.incarnation for member in row.members] == [member.incarnation for member in mine.members]


def require_member(value: Mapping[str, Any]) -> None:
    """Check the value of a node's row.

    Raises:
        ValueError: it is not the value of such a row.
    """
    _require(value, _MEMBER_FIELDS, ("node", "incarnation"))


def _require(value: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], required: tuple[str, ...]) -> None:
    for name, kind in kinds.items():
        if name in value:
            if not isinstance(value[name], kind):
                raise ValueError(f"its field {name!r} is {str(value[name])[:40]!r}")
        elif name in required:
            raise ValueError(f"it has no field {name!r}")


def _kinds(kind: type[Member | Round]) -> dict[str, tuple[type, ...]]:
    """Return the JSON types of a row's fields, which follow from the defaults; those without one are texts."""
    as_json: dict[type, tuple[type, ...]] = {tuple: (list, tuple), float: (float, int)}
    of_default = {each.name: str if each.default is MISSING else type(each.default) for each in fields_of(kind)}
    return {name: as_json.get(each, (each,)) for name, each in of_default.items()}


_MEMBER_FIELDS = _kinds(Member)
_ROUND_FIELDS = _kinds(Round)


class NewestRound:
    """Newest version of the round's row that this node has read or written, or whose seal it has received."""

    newest: Round | None = None

    def observe(self, round_: Round) -> None:
        """Keep this version if it is newer."""
        if round_.is_newer_than(self.newest):
            self.newest = round_

    def accept(self, round_: Round) -> bool:
        """Keep a received version if it directly follows the one that this node knows, and is not closed.

        Returns:
            Whether it was kept, or nothing newer than what this node knows; otherwise the row must be read.
        """
        latest = self.newest
        if latest is not None and not round_.is_newer_than(latest):
            return True
        # Both are harmless if they are not in the table: what follows from them is a compare-and-swap, or a restart.
        following = [(latest.number, "sealed"), (latest.number + 1, "open")] if latest is not None else []
        if (round_.number, round_.state) not in following:
            return False
        self.newest = round_
        return True

    def after(self, round_: Round) -> Round | None:
        """Return the newest version if it is newer than this one."""
        latest = self.newest
        return latest if latest is not None and latest.is_newer_than(round_) else None
