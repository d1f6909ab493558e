"""The number of labels of a step, as a tensor that knows whether a loss was divided by it.

``Trainer`` hands this number to each model whose ``forward`` has ``**kwargs``, and takes its loss for a sum over the
rank's labels divided by it. Many models ignore the number and return the mean over the micro-batch instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["LabelCount", "count_labels"]

_IGNORED_LABEL = -100

_MOVES = ("to", "cuda", "cpu", "detach", "clone", "contiguous")
"""Methods whose result is the same number."""

_PROPERTIES = ("__get__", "__repr__", "__format__", "size", "dim", "numel", "is_floating_point", "record_stream")


class LabelCount(torch.Tensor):
    """A number of labels.

    Attributes:
        used: whether a computation has used the number, other than to move it to a device
    """

    used: list[bool]

    @staticmethod
    def of(number: torch.Tensor) -> LabelCount:
        """Return a number that was not used yet."""
        count = number.as_subclass(LabelCount)
        count.used = [False]
        return count

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with plain tensors, and note it."""
        found = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, LabelCount)]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the documented way to plain behaviour
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _MOVES and isinstance(result, torch.Tensor):
            moved = result.as_subclass(LabelCount)
            moved.used = found[0].used
            return moved
        if name not in _PROPERTIES:
            for each in found:
                each.used[0] = True
        return result.as_subclass(torch.Tensor) if isinstance(result, LabelCount) else result


def count_labels(trainer: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the number of labels of a micro-batch, counted as the trainer does, without waiting for a GPU."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"]
        if getattr(trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
    return torch.as_tensor(labels.ne(_IGNORED_LABEL).sum())
