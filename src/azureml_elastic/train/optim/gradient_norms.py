"""The squared norms of a micro-batch's gradient and of the mean over the ranks, as AdaScale needs them.

Where the ranks exchange the gradient of a single micro-batch, both are taken of the buckets of
``DistributedDataParallel``, before and after the exchange: a bucket is one tensor, that has just been written. Where a
rank accumulates over several, or the script has a communication hook of its own, a hook of each parameter takes the
norms instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientNorms"]


@dataclass(eq=False)
class _Norms:
    """What the hooks of one backward pass have found; without references to models, whose reducers refer to it.

    Args:
        in_buckets: whether the norms are those of buckets
        local: squared norms before the exchange
        buckets: buckets that were exchanged
    """

    in_buckets: bool = False
    local: list[torch.Tensor] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)

    def clear(self) -> None:
        self.local.clear()
        self.buckets.clear()


class GradientNorms:
    """The norms of the gradients of parameters, which modules average over the ranks.

    Args:
        modules: modules that average gradients
        parameters: parameters that are trained
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._models = [each for each in modules if isinstance(each, DistributedDataParallel)]
        averaged = {id(parameter) for model in self._models for parameter in model.parameters()}
        self._has_buckets = all(id(parameter) in averaged for parameter in parameters)
        self._has_hooks = False
        self._norms = _Norms()

    def begin(self, *, exchanged: bool) -> None:
        """Prepare for the forward and backward pass of a micro-batch.

        Args:
            exchanged: whether its gradient alone is exchanged
        """
        self._norms.clear()
        self._norms.in_buckets = exchanged and self._has_buckets
        if self._norms.in_buckets:
            self._has_buckets = self._norms.in_buckets = all(_hook(model, self._norms) for model in self._models)
        if not self._norms.in_buckets and not self._has_hooks:
            self._has_hooks = True
            for parameter in self._parameters:
                parameter.register_hook(self._measure)  # type: ignore[no-untyped-call]

    def local(self) -> float:
        """Return the squared norm of the gradient of the micro-batch."""
        return _total(self._norms.local)

    def mean(self) -> float:
        """Return the squared norm of the gradients that the parameters have after the exchange."""
        if self._norms.in_buckets:
            return _total([_squared(bucket) for bucket in self._norms.buckets])
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norms = torch._foreach_norm([each.to(_dtype_of_norm(each)) for each in gradients])  # noqa: SLF001 - what clip_grad_norm_ uses
        return _total([norm.double().square() for norm in norms])

    def _measure(self, gradient: torch.Tensor) -> None:
        if not self._norms.in_buckets:
            self._norms.local.append(_squared(gradient.detach()))


def _hook(model: DistributedDataParallel, norms: _Norms) -> bool:
    """Have the norms of a model's buckets taken; return false if the script has a communication hook of its own."""
    registered: list[tuple[Any, Any]] = model._comm_hooks  # noqa: SLF001 - also of a model that was formed again
    if registered:
        return registered[0][1] is norms
    group = model.process_group
    try:
        # torch compares annotations, which are texts in this module; a lambda has none.
        # Of torch's class: for this group alone, and not the script's own.
        DistributedDataParallel.register_comm_hook(
            model, norms, lambda norms, bucket: _exchange(norms, bucket.buffer(), group)
        )
    except RuntimeError:  # torch allows one, and a built-in one is not in the list
        return False
    return True


def _exchange(norms: _Norms, bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, as torch does without a hook, and take its norm before that."""
    if norms.in_buckets:
        norms.local.append(_squared(bucket))
        norms.buckets.append(bucket)  # the mean will be there, and holds until the next backward pass
    work = dist.all_reduce(bucket.div_(group.size()), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


def _squared(tensor: torch.Tensor) -> torch.Tensor:
    """Return the squared norm."""
    if tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64):
        flat = tensor.view(-1)
        return torch.dot(flat, flat)  # four fifths of the time of a norm, and without its root
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=_dtype_of_norm(tensor))
    return norm.square()


def _dtype_of_norm(gradient: torch.Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _total(squares: Sequence[torch.Tensor]) -> float:
    if len({each.dtype for each in squares}) > 1:
        squares = [each.double() for each in squares]
    return float(torch.stack(list(squares)).sum(dtype=torch.float64).item()) if squares else 0.0
