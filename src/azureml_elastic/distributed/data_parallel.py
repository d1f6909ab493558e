"""Data parallelism that a process keeps while the ranks around it change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ElasticDataParallel"]

_KEPT = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""What ``nn.Module`` sets up anew, and a script may have changed."""


class _Elastic:
    """What belongs to this process, not to the model: a deep copy of the model shares it."""

    def __init__(
        self, absorb: Callable[[RuntimeError], bool], discarded: Callable[[], bool], options: dict[str, Any]
    ) -> None:
        self.absorb = absorb
        self.discarded = discarded
        self.options = options

    def __deepcopy__(self, _: Any) -> _Elastic:
        return self


class ElasticDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` whose process group can be replaced under it.

    Args:
        module: to train.
        absorb: called with an error of the forward pass; returns whether the step at hand is discarded, so that the pass
            is repeated without the other ranks, and raises nothing then.
        discarded: tells whether the step at hand counts for nothing.
        options: of ``DistributedDataParallel``.
    """

    def __init__(
        self, module: nn.Module, absorb: Callable[[RuntimeError], bool], discarded: Callable[[], bool], **options: Any
    ) -> None:
        super().__init__(module, **options)
        self._elastic = _Elastic(absorb, discarded, options)

    def reform(self) -> None:
        """Go on with the process group that there is now. A collective, the same as making a new one."""
        kept = {name: getattr(self, name) for name in _KEPT if hasattr(self, name)}
        module, elastic = self.module, self._elastic
        del self.reducer  # its hooks on the parameters go with it
        DistributedDataParallel.__init__(self, module, **elastic.options)
        self._elastic = elastic
        for name, value in kept.items():
            setattr(self, name, value)

    def dissolve(self) -> None:
        """Let go of the process group for good: there is no training after this."""
        for name in ("reducer", "logger", "process_group"):
            self.__dict__.pop(name, None)

    def share_buffers(self) -> None:
        """Make the buffers of all ranks those of rank 0. A collective."""
        if self.broadcast_buffers and self.modules_buffers:
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module; in training, buffers are made equal to rank 0's before. Else no other rank is involved."""
        if self._elastic.discarded() or not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not self._elastic.absorb(error):
                raise
            return self.module(*inputs, **named)
