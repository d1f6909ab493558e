"""Copies of a state in the memory of what is left of a run: opened, checked for completeness, and read by all ranks.

Survivors of a sudden loss hand over what each process holds: the whole state, or its part of a sharded one, of which
with replicas several nodes hold each. They may be one step apart: who has completed a step has everybody's gradients,
while another one's last collective has failed. Ranks without a copy of the state that is chosen read it from those
that have one, see :mod:`~azureml_elastic.checkpoint.snapshots.transfer`. Nothing is written to storage.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Chunk
from azureml_elastic.checkpoint.load.offers import Kind, Offer
from azureml_elastic.checkpoint.load.reading import targets_for
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot
from azureml_elastic.checkpoint.snapshots.transfer import HeldChunks
from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.layout import incomplete
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.ipc.agent_interface import HandedOverState

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy that this rank can read: its own state, or what a worker of this node has handed over.

    Args:
        content: function that returns it.
        origin: number of the round that completed the last step, 0 if that is unknown.
        committed: last committed checkpoint that its process knew.
        worker: local rank of the worker that continues its random generators, ``None`` where it is this process's own.
    """

    offer: Offer
    content: Callable[[], Snapshot]
    origin: int
    committed: Reference | None
    worker: int | None = None


def open_copies(handed_over: Iterable[HandedOverState], holder: int) -> list[Copy]:
    """Return what can be read in the memory of this node's agent; all ranks of a node return the same."""
    copies = []
    for each in handed_over:
        try:
            copies.append(_open(each, holder))
        except (OSError, CheckpointDamaged, ValueError) as error:
            what = "The state" if each.part is None else "A part of the state"
            _LOG.warning("%s of step %d that was handed over cannot be read: %s", what, each.step, error)
    return copies


def _open(state: HandedOverState, holder: int) -> Copy:
    content = Snapshot.from_memory(state.path)
    kind, version, form, parts = Kind.WHOLE, state.round, "", 1
    if state.part is not None:
        kind, version, parts = Kind.PART, content.origin, 0
        form = xxhash.xxh3_128_hexdigest(json.dumps([vars(chunk) for chunk in sorted(content.tensors)]).encode())
    where = state.round, state.rank, holder
    pending = content.save_pending
    offer = Offer(kind, state.step, version, content.position, *where, form, parts, save_pending=pending)
    committed = Reference.from_json(content.parent) if content.parent else None
    # A whole state is handed over by one worker alone, with its own random generators.
    return Copy(offer, lambda: content, content.origin, committed, state.part or 0)


@dataclass(frozen=True, eq=False)
class MemorySource:
    """A complete state in the memory of some ranks.

    Args:
        content: the state, on a rank that has all of it; on others everything but tensors.
        own: copies of this rank.
        held: tensors that ranks without the whole state read, ``None`` where each rank has it.
        save_pending: whether a checkpoint of the state was begun and not committed.
    """

    content: Snapshot
    own: Sequence[Copy]
    held: HeldChunks | None
    save_pending: bool

    @property
    def state(self) -> Mapping[str, Any]:
        """The tracked state without tensors."""
        return self.content.state

    def send(self, ranks: ControlGroup) -> None:
        """Send the state to ranks that :meth:`read` it, from one that has all of it. A collective."""
        if self.held is not None:
            self.held.read({}, ranks)

    def read(
        self, present: Mapping[str, torch.Tensor], ranks: ControlGroup, *, views: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the whole tensors by name, those that are present overwritten. A collective.

        Args:
            present: tensors to read into, sharded ones as DTensors; for what is not among them, or has another shape or
                type, there is new CPU memory.
            views: whether a whole state that this rank has may be returned as it is. An optimizer takes over the very
                tensors that it is given: if they were those of mapped memory, its next step would copy each of their
                pages after a fault, which takes longer.

        Raises:
            CheckpointError: this process has no memory for the state.
            CheckpointDamaged: it did not arrive undamaged; raised on all ranks.
        """
        step, mine = self.content.step, {chunk.name: view for chunk, view in self.content.tensors.items()}
        if self.held is not None and not self.content.tensors:
            targets = targets_for(self.held.chunks, present, step)
            self.held.read(targets, ranks)
            return targets
        self.send(ranks)
        if views:
            return mine
        targets = targets_for(self.content.tensors, present, step)
        with torch.no_grad():
            for name, view in mine.items():
                targets[name].copy_(view)
        return targets

    def random(self, local_rank: int) -> torch.Tensor | None:
        """Return the random generators, uint8 (bytes,), that the worker of this local rank continues, if here."""
        return next((each.content().random for each in self.own if each.worker == local_rank), None)


def open_source(chosen: Sequence[Offer], copies: Iterable[Copy], ranks: ControlGroup) -> MemorySource | None:
    """Return the state of all chosen copies, the main one first; ``None`` where parts are missing. A collective.

    Args:
        copies: those of this rank.
    """
    main = chosen[0]
    whole = main.kind == Kind.WHOLE
    own = [copy for copy in copies if copy.offer in chosen]
    pending = any(each.save_pending for each in chosen)
    if whole and len({each.holder for each in chosen}) == ranks.world_size:
        # Nobody reads the state of a process that keeps it.
        content = own[0].content() if own[0].worker is not None else Snapshot(main.step, {}, None)
        return MemorySource(content, own, None, pending)
    contents = {copy.offer: copy.content() for copy in own}
    sent: tuple[dict[str, Any], list[Chunk]] | None = None
    if (mine := contents.get(main)) is not None:
        sent = mine.header(), [*mine.tensors]
    header, chunks = ranks.from_rank(main.holder, sent)
    found = Snapshot(**header)
    # Copies of the same part have the same chunks, so that one rank lists them for all.
    listed: dict[str, list[Chunk]] = {main.part: chunks}
    first: dict[str, int] = {}
    for each in chosen:
        first[each.part] = min(each.holder, first.get(each.part, each.holder))
    if first.keys() - listed:
        lists = {offer.part: [*each.tensors] for offer, each in contents.items() if first[offer.part] == ranks.rank}
        for part in ranks.gather({form: each for form, each in lists.items() if form != main.part}):
            listed.update(part)
    holders: defaultdict[Chunk, set[int]] = defaultdict(set)
    for each in chosen:
        for chunk in listed[each.part]:
            # What may differ between ranks is read from the main copy's process alone.
            if chunk.name not in found.apart or each.is_of_process(main):
                holders[chunk].add(each.holder)
    if not whole:
        absent = tree.tensor_names(found.state) - {chunk.name for chunk in holders}
        missing = sorted(absent | incomplete(holders).keys())
        if missing:
            if ranks.rank == 0:
                _LOG.warning(
                    "The state of step %d in memory is not whole: of %s parts are missing, of %d tensors in all.",
                    main.step,
                    missing[0],
                    len(missing),
                )
            return None
    # What may differ between ranks is that of the main part, also on a node with several.
    views = {
        chunk: view
        for offer, each in contents.items()
        for chunk, view in each.tensors.items()
        if whole or chunk.name not in found.apart or offer.is_of_process(main)
    }
    ordered = [*holders]
    held = HeldChunks(main.step, ordered, [sorted(holders[chunk]) for chunk in ordered], views)
    # A rank with a whole state keeps what may differ between ranks.
    return MemorySource(contents[own[0].offer] if whole and own else found, own, held, pending)
