"""Which of a script's tensors are state: compared between two moments of a process, and between its ranks.

What keeps its identity and changes its bytes is written to, and lives as long as the loop: that is state, and so is a
buffer of a module. What is bound anew, such as a batch, a loss or ``a = 0.9 * a + 0.1 * w``, cannot be distinguished by
what it is. Pure but for the tensors that are read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from azureml_elastic.train.found.checksums import checksums
from azureml_elastic.train.found.search import Found, FoundTensor, version_of

_FIRST_BYTES = 1 << 30
_LATER_BYTES = 1 << 28
"""Bytes of the tensors whose checksums are compared at a time: in the first comparisons, and in later ones."""

_FIRST = 3


@dataclass(frozen=True)
class Change:
    """What a rank knows of a tensor that has changed: its present checksum, and whether it is a module's buffer."""

    checksum: int
    buffer: bool


@dataclass
class Changes:
    """What has changed since the last comparisons.

    Args:
        state: tensors that are written to, by path
        rebound: paths that lead to another tensor of the same kind than before, at least twice in a row
        too_large: paths of tensors that have changed, and are too large to be compared
    """

    state: dict[str, FoundTensor] = field(default_factory=dict)
    rebound: list[FoundTensor] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)


@dataclass
class _Known:
    path: str
    reference: weakref.ref[torch.Tensor]
    checksum: int | None
    version: int
    compared: int = 0  # number of the comparison that has computed the checksum
    rebound: int = 0  # comparisons in a row at which the path led to another tensor


class Comparison:
    """The tensors of the last comparison, and which of all have changed since the first."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._paths: dict[str, _Known] = {}
        self._changed: set[str] = set()
        self._number = 0

    def path_of(self, each: FoundTensor) -> str:
        """Return the path by which a tensor was found first."""
        known = self._known.get(id(each.tensor))
        return known.path if known is not None and known.reference() is each.tensor else each.path

    def compare(self, found: Found, settled: set[str]) -> Changes:
        """Compare with the last time; what has changed once counts from then on.

        Args:
            settled: paths about which all is known
        """
        self._number += 1
        changes = Changes()
        new: dict[int, _Known] = {}
        hashed: list[tuple[FoundTensor, _Known]] = []
        for each in found.tensors:
            path = self.path_of(each)
            before = self._known.get(id(each.tensor))
            if before is None or before.reference() is not each.tensor:
                before = None
            known = before or _Known(path, weakref.ref(each.tensor), None, version_of(each.tensor))
            new[id(each.tensor)] = known
            if path in settled:
                continue
            if before is None and path in self._paths:
                self._note_rebound(each, known, changes)
            hashed.append((each, known))
        self._hash(hashed, changes)
        self._known, self._paths = new, {known.path: known for known in new.values()}
        changes.state = {path: each for each, known in hashed if (path := known.path) in self._changed}
        return changes

    def checksums_of(self, state: Mapping[str, FoundTensor]) -> dict[str, int]:
        """Return the present checksums by path."""
        return dict(zip(state, checksums([each.tensor for each in state.values()]), strict=True))

    def _note_rebound(self, each: FoundTensor, known: _Known, changes: Changes) -> None:
        last = self._paths[known.path]
        before = last.reference()
        if before is not None and (before.shape, before.dtype) != (each.tensor.shape, each.tensor.dtype):
            return
        known.rebound = last.rebound + 1
        if each.buffer:
            self._changed.add(known.path)
        elif known.rebound > 1:
            changes.rebound.append(each)

    def _hash(self, pairs: Sequence[tuple[FoundTensor, _Known]], changes: Changes) -> None:
        """Compute checksums, of small tensors and of those that were left out last time first."""
        left = _FIRST_BYTES if self._number <= _FIRST else _LATER_BYTES
        chosen: list[tuple[FoundTensor, _Known]] = []
        for each, known in sorted(pairs, key=lambda pair: (pair[1].compared, pair[0].tensor.nbytes, pair[0].path)):
            version = version_of(each.tensor)
            if each.tensor.nbytes <= left:
                left -= each.tensor.nbytes
                chosen.append((each, known))
            elif version != known.version and each.tensor.nbytes > _LATER_BYTES:
                changes.too_large.append(known.path)
            known.version = version
        for (_, known), value in zip(chosen, checksums([each.tensor for each, _ in chosen]), strict=True):
            if known.checksum is not None and known.checksum != value:
                self._changed.add(known.path)
            known.checksum, known.compared = value, self._number


def agreed(of_ranks: Sequence[Mapping[str, Change]], waited: Counter[str]) -> tuple[list[str], list[str]]:
    """Return what is state on all ranks, and what differs between them.

    Of buffers, as of those of tracked modules, that of one rank stands for all.

    Args:
        of_ranks: what has changed on each rank, by path
        waited: how often a path has changed on some ranks alone; counted here
    """
    same, apart = [], []
    for path in sorted({path for each in of_ranks for path in each}):
        found = [each[path] for each in of_ranks if path in each]
        if len(found) < len(of_ranks):
            waited[path] += 1
            if waited[path] > 1:
                apart.append(path)
        elif found[0].buffer or len({each.checksum for each in found}) == 1:
            same.append(path)
        else:
            apart.append(path)
    return same, apart
