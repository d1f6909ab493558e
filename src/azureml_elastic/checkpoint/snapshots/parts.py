"""The state of a sharded run in the memory of what is left of it: found, checked for completeness, and resharded.

With replicas each part of the state is held by several nodes. Survivors of a sudden loss hand over what each process
holds, as they do with a whole state. They may be one step apart: who has completed a step has everybody's gradients,
while another one's last collective has failed. The furthest step counts of which all parts are there; ranks that have
not completed it read them from those that have, see :mod:`~azureml_elastic.checkpoint.snapshots.transfer`. Nothing is
written to storage.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Chunk
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot
from azureml_elastic.checkpoint.snapshots.transfer import HeldChunks
from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.layout import incomplete
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.ipc.agent_interface import HandedOverState

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfferedPart:
    """Description of a part that a rank can read. All ranks of a node offer the same parts.

    Args:
        origin: number of the round that completed the last step. Parts of the same step of two rounds do not go
            together: one of them has gone back to an earlier step, and trained it again.
        round: number of the round of the process that handed it over.
        rank: rank in that round of that process.
        save_pending: whether a checkpoint of that state was begun and not committed.
        form: text that is equal for parts of the same chunks.
        holder: rank that can read it.
    """

    step: int
    origin: int
    round: int
    rank: int
    position: str
    save_pending: bool
    form: str
    holder: int


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a state in the memory of this node's agent, whose tensors are views of that."""

    handed_over: HandedOverState
    header: Snapshot
    chunks: Mapping[Chunk, torch.Tensor]

    def offer(self, holder: int) -> OfferedPart:
        """Return the description for the other ranks."""
        held, header = self.handed_over, self.header
        form = xxhash.xxh3_128_hexdigest(json.dumps([vars(chunk) for chunk in sorted(self.chunks)]).encode())
        pending = header.save_pending
        return OfferedPart(held.step, header.origin, held.round, held.rank, header.position, pending, form, holder)

    def is_of_state(self, offered: OfferedPart) -> bool:
        """Return whether this is a part of the same state."""
        state = self.handed_over.step, self.header.origin, self.header.position
        return state == (offered.step, offered.origin, offered.position)

    def is_of(self, offered: OfferedPart) -> bool:
        """Return whether this is a certain part."""
        return (self.handed_over.round, self.handed_over.rank) == (offered.round, offered.rank)


def open_parts(handed_over: Iterable[HandedOverState]) -> list[Part]:
    """Return the parts in the memory of this node's agent that can be read."""
    parts = []
    for each in handed_over:
        try:
            parts.append(Part(each, *Snapshot.map_memory(each.path)))
        except (OSError, CheckpointDamaged, ValueError) as error:
            _LOG.warning("A part of the state of step %d that was handed over cannot be read: %s", each.step, error)
    return parts


def choose_parts(offers: Sequence[OfferedPart], at_least: int) -> list[tuple[OfferedPart, list[OfferedPart]]]:
    """Return the states that parts are offered of, the furthest first: the main part of each, and all its parts.

    The main part is that of the newest round's lowest rank. What may differ between ranks is taken from it.
    """
    states: defaultdict[tuple[int, int, str], list[OfferedPart]] = defaultdict(list)
    for each in offers:
        if each.step >= at_least:
            states[each.step, each.origin, each.position].append(each)
    return [
        (max(states[key], key=lambda each: (each.round, -each.rank, -each.holder)), states[key])
        for key in sorted(states, reverse=True)
    ]


@dataclass(frozen=True, eq=False)
class CompleteParts:
    """All parts of the state of a step: everything but tensors, these, and the parts of this node.

    ``save_pending`` is whether a checkpoint of the state was begun and not committed.
    """

    header: Snapshot
    held: HeldChunks
    save_pending: bool
    own: Sequence[Part]


def find_complete(parts: Sequence[Part], at_least: int, control: ControlGroup) -> CompleteParts | None:
    """Return all parts of the furthest step of which all are there, ``None`` where that is none. A collective.

    Args:
        parts: parts of this node.
        at_least: lowest step.
    """
    offers = [offer for each in control.gather([part.offer(control.rank) for part in parts]) for offer in each]
    for main, same in choose_parts(offers, at_least):
        # Replicas hold the same chunks, so that one rank lists them for all that offer the same form.
        first = {form: min(each.holder for each in same if each.form == form) for form in {each.form for each in same}}
        own = [part for part in parts if part.is_of_state(main)]
        by_form = {part.offer(control.rank).form: [*part.chunks] for part in own}
        mine = {form: chunks for form, chunks in by_form.items() if first[form] == control.rank}
        header = next((part.header for part in own if part.is_of(main)), None) if main.holder == control.rank else None
        gathered = control.gather((mine, header))
        header = gathered[main.holder][1]
        assert header is not None
        holders: defaultdict[Chunk, set[int]] = defaultdict(set)
        for form, chunks in itertools.chain.from_iterable(each.items() for each, _ in gathered):
            for chunk in chunks:
                # What may differ between ranks is read from the main part's process alone.
                apart = chunk.name in header.apart
                holders[chunk].update(
                    each.holder
                    for each in same
                    if each.form == form and (not apart or (each.round, each.rank) == (main.round, main.rank))
                )
        found = {chunk: sorted(ranks) for chunk, ranks in holders.items() if ranks}
        absent = tree.tensor_names(header.state) - {chunk.name for chunk in found}
        missing = sorted(absent | incomplete(found).keys())
        if not missing:
            pending = any(each.save_pending for each in same)
            ordered = sorted(found)
            # What may differ between ranks is that of the main part, also on a node with several.
            views = {
                chunk: view
                for part in own
                for chunk, view in part.chunks.items()
                if chunk.name not in header.apart or part.is_of(main)
            }
            held = HeldChunks(main.step, ordered, [found[chunk] for chunk in ordered], views)
            return CompleteParts(header, held, pending, own)
        if control.rank == 0:
            _LOG.warning(
                "The state of step %d in memory is not whole: of %s parts are missing, of %d tensors in all.",
                main.step,
                missing[0],
                len(missing),
            )
    return None
