"""A part of each step that may be broken off, and what is copied at its beginning to undo it.

A queue that the forward pass fills is one step ahead where the backward pass fails; an average that a callback updates
is so where a later callback fails and all of them run again. Which tensors a part changes is learned while it runs;
what it has not seen yet is copied whether it changes or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from azureml_elastic.train.found.comparison import checksums
from azureml_elastic.train.found.search import version_of, write

_CHECKED = 2
"""Times that a tensor's checksums are compared: later its version counter, which misses writes through ``.data``."""

_UNSEEN_BYTES = 1 << 28
"""Limit for copies of what may not change at all: larger tensors are first copied once they are known to."""


@dataclass
class _Begun:
    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[str, int]
    sums: Mapping[str, int]
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)


class StepPart:
    """One part of each step, such as the forward pass."""

    def __init__(self) -> None:
        self._changing: set[str] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self._seen: Counter[str] = Counter()
        self._begun: _Begun | None = None

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin the part, after what came before; copy those of the tensors that it is known to change."""
        self.end()
        if not tensors:
            return
        sums = self._sums({path: each for path, each in tensors.items() if self._seen[path] < _CHECKED})
        versions = {path: version_of(each) for path, each in tensors.items()}
        copied = (self._changing & tensors.keys()) | self._unseen(tensors)
        self._begun = _Begun(tensors, versions, sums, {path: self._copied(path, tensors[path]) for path in copied})

    def end(self) -> None:
        """End the part, and learn what it has changed."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        self._seen.update(begun.tensors.keys())
        now = self._sums({path: begun.tensors[path] for path in begun.sums})
        self._changing |= _changed(begun) | {path for path, value in begun.sums.items() if now[path] != value}
        # What was copied as it was not known yet, and has not changed, costs no further memory.
        for path in begun.copies.keys() - self._changing:
            del self._buffers[path]

    def undo(self) -> list[str]:
        """Undo what the part has changed; return the paths of what it has changed and was not copied."""
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        for path, copy in begun.copies.items():
            write(begun.tensors[path], copy)
        return sorted(_changed(begun) - begun.copies.keys())

    def _unseen(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        left, chosen = _UNSEEN_BYTES, set()
        for path in sorted(tensors.keys() - self._seen.keys(), key=lambda path: tensors[path].nbytes):
            left -= tensors[path].nbytes
            if left < 0:
                break
            chosen.add(path)
        return chosen

    def _copied(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (tensor.shape, tensor.dtype, tensor.device):
            self._buffers[path] = buffer = torch.empty_like(tensor, requires_grad=False)
        write(buffer, tensor)
        return buffer

    @staticmethod
    def _sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return dict(zip(tensors, checksums([*tensors.values()]), strict=True))


def _changed(begun: _Begun) -> set[str]:
    return {path for path, each in begun.tensors.items() if version_of(each) != begun.versions[path]}
