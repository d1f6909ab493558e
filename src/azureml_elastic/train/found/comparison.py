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
import xxhash

from azureml_elastic.checkpoint.state.layout import memory_of
from azureml_elastic.train.found.search import Found, FoundTensor, version_of

_FIRST_BYTES = 1 << 30
_LATER_BYTES = 1 << 28
"""Bytes of the tensors whose checksums are compared at a time: in the first comparisons, and in later ones."""

_FIRST = 3

_ROW = 1024
"""Elements of a row, of which a device sums rows and columns: so that moved elements change the checksum as well."""
_STEP = 1031
"""Weight of a row beside that of the one before; larger than those of all columns."""


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
            if before is None or before.reference() is not each.tensor:  # an id alone may be another tensor's by now
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


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of the bytes of each tensor; a device is waited for once."""
    results: list[int | torch.Tensor] = [_of_memory(each) if each.is_cpu else _on_device(each) for each in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(results):
        if isinstance(each, torch.Tensor):
            by_device.setdefault(each.device, []).append(index)
    for indices in by_device.values():
        values = torch.stack([torch.as_tensor(results[index]) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = int(value)
    return [int(each) for each in results]


def _of_memory(tensor: torch.Tensor) -> int:
    content = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return xxhash.xxh3_64_intdigest(memory_of(content))


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum as a tensor, int64 (), on the device, so that no kernel is waited for."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(wide)
    whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:whole].view(-1, _ROW), bits[whole:]  # (n, _ROW), and fewer than _ROW
    # int64 wraps around: the sums do not depend on the order in which a device adds them up.
    columns = torch.arange(1, _ROW + 1, device=bits.device)
    numbers = torch.arange(1, len(rows) + 1, device=bits.device) * _STEP
    total = (rows.sum(0, dtype=torch.int64) * columns).sum() + (rows.sum(1, dtype=torch.int64) * numbers).sum()
    return total + (rest.to(torch.int64) * (columns[: rest.numel()] + _STEP * (len(rows) + 1))).sum()
