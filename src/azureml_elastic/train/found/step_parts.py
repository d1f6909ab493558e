"""A part of each step that may be broken off, and what is copied at its beginning to undo it.

A queue that the forward pass fills is one step ahead where the backward pass fails; an average that a callback updates
is so where a later callback fails and all of them run again. Which tensors a part changes is learned while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from azureml_elastic.train.found.checksums import checksums
from azureml_elastic.train.found.search import version_of, write

__all__ = ["StepPart"]

_CHECKED = 2
"""Times that checksums are compared: later the version counters, which miss what is written through ``.data``."""


@dataclass
class _Begun:
    """The tensors as they were when the part began."""

    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[str, int]
    sums: Mapping[str, int]
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)


class StepPart:
    """One part of each step, such as the forward pass."""

    def __init__(self) -> None:
        self._changing: set[str] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self._checked = 0
        self._begun: _Begun | None = None

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin the part, after what came before; copy those of the tensors that it is known to change."""
        self.end()
        if not tensors:
            return
        sums = self._sums(tensors) if self._checked < _CHECKED else {}
        versions = {path: version_of(each) for path, each in tensors.items()}
        copies = {path: self._copied(path, tensors[path]) for path in self._changing & tensors.keys()}
        self._begun = _Begun(tensors, versions, sums, copies)

    def end(self) -> None:
        """End the part, and learn what it has changed."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        self._changing |= _changed(begun)
        if begun.sums:
            self._checked += 1
            now = self._sums(begun.tensors)
            self._changing |= {path for path, value in begun.sums.items() if now[path] != value}

    def undo(self) -> list[str]:
        """Undo what the part has changed; return the paths of what it has changed and was not copied."""
        begun, self._begun = self._begun, None
        if begun is None:
            return []
        for path, copy in begun.copies.items():
            write(begun.tensors[path], copy)
        return sorted(_changed(begun) - begun.copies.keys())

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
