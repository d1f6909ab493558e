"""A sum of gradients that is bit-identical at any world size.

A sum of floating-point numbers depends on their order, and so on the distribution of the terms over the ranks; a sum
of integers does not. Each term is therefore multiplied by a power of two, chosen for each parameter from its largest
gradient over all ranks such that the sum just fits, rounded to 64 bits and added up as an integer. (The idea of a
common exponent: J. Demmel, H. D. Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["exact_sum"]

_BITS = 62
"""Bits of a signed 64-bit integer, with one to spare."""

_BUCKET = 1 << 23
"""Numbers that are reduced at once: 64 MB."""

_ABSENT = -1.0


def exact_sum(
    terms: Sequence[Sequence[torch.Tensor | None]], *, like: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor | None]:
    """Return the sums of tensors over all ranks, the same for any distribution of the terms. A collective.

    Args:
        terms: terms of this rank; each has a tensor for each of ``like``, or ``None`` for zeros
        like: tensors of the shape, type and device of the sums, the same on all ranks
        count: upper bound of the number of terms on all ranks together; the same at any world size

    Returns:
        A sum for each of ``like``; ``None`` where no rank has a term. Where a term is not finite, its sum is NaN.
    """
    if not like:
        return []
    device = like[0].device
    largest = torch.full((len(like),), _ABSENT, dtype=torch.float64, device=device)
    for term in terms:
        largest = torch.maximum(largest, _largest_of(term, device))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    tops: list[float] = largest.tolist()
    room = _BITS - max(count - 1, 0).bit_length()
    sums: list[torch.Tensor | None] = [None] * len(like)

    def reduce(bucket: list[int]) -> None:
        sizes = [like[index].numel() for index in bucket]
        # |top| < 2**exponent, so that a term has at most `room` bits; doubles reach to 2**1023.
        powers = [2.0 ** min(room - math.frexp(tops[index])[1], 1000) for index in bucket]
        scale = torch.tensor(powers, dtype=torch.float64, device=device)
        scale = scale.repeat_interleave(torch.tensor(sizes, device=device), output_size=sum(sizes))
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        for term in terms:
            parts = [_flat(term[index], like[index]) for index in bucket]
            total += torch.cat(parts).mul_(scale).round_().to(torch.int64)
        dist.all_reduce(total)
        found = total.double().div_(scale)
        for index, part in zip(bucket, found.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            sums[index] = part.to(like[index].dtype).view_as(like[index])

    bucket: list[int] = []
    size = 0
    for index, top in enumerate(tops):
        if not math.isfinite(top):
            sums[index] = torch.full_like(like[index], math.nan)
        elif top != _ABSENT:
            bucket.append(index)
            size += like[index].numel()
        if size >= _BUCKET:
            reduce(bucket)
            bucket, size = [], 0
    if bucket:
        reduce(bucket)
    return sums


def _largest_of(term: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the largest absolute value in each tensor of a term; infinite where a value is not finite."""
    found = torch.full((len(term),), _ABSENT, dtype=torch.float64, device=device)
    present = [(index, tensor.detach()) for index, tensor in enumerate(term) if tensor is not None]
    for index, tensor in present:
        if not tensor.numel():
            found[index] = 0.0
    present = [(index, tensor) for index, tensor in present if tensor.numel()]
    if present:
        tensors = [tensor if tensor.is_floating_point() else tensor.double() for _, tensor in present]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(tensors, math.inf)])  # noqa: SLF001
        found[[index for index, _ in present]] = norms.nan_to_num(nan=math.inf, posinf=math.inf)
    return found


def _flat(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.zeros(like.numel(), dtype=torch.float64, device=like.device)
    return tensor.detach().flatten().double()
