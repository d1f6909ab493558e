"""The choice of the state that a run continues from, among the copies that its ranks can read.

A copy of a state, or of a part of it, is in a process that goes on, in the memory of a node's agent, to which a worker
handed it over, or in a shard of a snapshot, in an agent's memory or on the node's disk. Each rank describes those that
it can read; all gather the descriptions, and choose the same state:

1. the furthest whole state in memory: a rank that completed a step has reduced the gradients of *all* ranks, also of
   one that died before it could report so;
2. the furthest step of which all parts of a sharded state, or all shards of a snapshot, are there. A snapshot counts
   if it is beyond the committed checkpoint, and is committed before it is restored;
3. on storage what agents that have ended have left beyond the committed checkpoint, or that one; see
   :mod:`~azureml_elastic.checkpoint.load.selection`.

A state in memory counts unless the committed checkpoint is of a later step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from azureml_elastic.checkpoint.format.manifest import FolderName
from azureml_elastic.ipc.message import ShardDescription


class Kind(IntEnum):
    """What a copy is of; of states of the same step a higher kind is chosen."""

    SHARD = 0
    """One rank's shard of a snapshot."""
    PART = 1
    """One process's part of a sharded state."""
    WHOLE = 2


@dataclass(frozen=True)
class Offer:
    """Description of a copy that a rank can read.

    Args:
        version: number of a round, which tells states of the same step apart: the one that completed a sharded state,
            as parts that two rounds have trained do not go together; the one that took a snapshot; of a whole state
            that of its process.
        position: position in the data as text, or the folder of a snapshot.
        round: number of the round of the process that has or had it.
        rank: rank in that round of that process.
        holder: rank that can read it.
        part: text that is equal for copies of the same part.
        parts: number of parts that make up the state, 0 where their chunks have to be looked at.
        save_pending: whether a checkpoint of that state was begun and not committed.
        shard: the shard of a snapshot.
    """

    kind: Kind
    step: int
    version: int
    position: str
    round: int
    rank: int
    holder: int
    part: str = ""
    parts: int = 1
    save_pending: bool = field(default=False, kw_only=True)
    shard: ShardDescription | None = field(default=None, kw_only=True)

    @classmethod
    def of_shard(cls, shard: ShardDescription, holder: int) -> Offer:
        """Return the description of a shard that a rank can read."""
        name = FolderName.parse(shard.folder)
        number = 0 if name is None else name.round
        part, parts = str(shard.rank), shard.world_size
        return cls(Kind.SHARD, shard.step, number, shard.folder, number, shard.rank, holder, part, parts, shard=shard)

    @property
    def state(self) -> tuple[Kind, int, int, str]:
        """What is equal for copies of the same state."""
        return self.kind, self.step, self.version, self.position

    def is_of_process(self, other: Offer) -> bool:
        """Return whether both copies are of the same process."""
        return (self.round, self.rank) == (other.round, other.rank)


def choose(offers: Iterable[Offer], committed: int | None) -> list[Offer]:
    """Return all copies of the state that all ranks continue from, the main one first; none where that is on storage.

    What may differ between ranks is taken from the main copy: that of the newest round's lowest rank.

    Args:
        committed: step of the committed checkpoint, ``None`` without one.
    """
    states: defaultdict[tuple[Kind, int, int, str], list[Offer]] = defaultdict(list)
    for each in offers:
        if committed is None or each.step > committed or (each.step == committed and each.kind != Kind.SHARD):
            states[each.state].append(each)
    complete = [copies for copies in states.values() if len({each.part for each in copies}) >= copies[0].parts]
    best = max(complete, key=lambda copies: max(map(_precedence, copies)), default=[])
    return sorted(best, key=_precedence, reverse=True)


def _precedence(offer: Offer) -> tuple[object, ...]:
    # A whole state before any other, the furthest of each. From the round on nothing makes one copy better: the order
    # has to be total, as ranks that chose differently would wait for each other.
    whole, place = offer.kind == Kind.WHOLE, (-offer.rank, -offer.holder)
    return whole, offer.step, offer.kind, offer.version, offer.round, *place, offer.position


def deal_out(shards: Sequence[Offer]) -> list[Offer]:
    """Return one copy of each shard of a snapshot, by rank, from the holders with the least to write."""
    by_rank: defaultdict[int, list[Offer]] = defaultdict(list)
    for each in shards:
        by_rank[each.rank].append(each)
    load: Counter[int] = Counter()
    chosen = []
    for rank in sorted(by_rank):
        offer = min(by_rank[rank], key=lambda each: (load[each.holder], each.holder))
        assert offer.shard is not None
        load[offer.holder] += offer.shard.size
        chosen.append(offer)
    return chosen
