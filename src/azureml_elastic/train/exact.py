"""The sum of gradients to the bit the same at any world size.

A sum of floating-point numbers depends on their order, and so on which rank has added up which of them. Whole numbers
do not: each micro-batch's gradient is multiplied by a power of two, such that the largest of all has as many bits as
the sum leaves room for, rounded to 64 bits, and these are added up. The power follows from the largest gradient over
all ranks, for each parameter by itself. (The idea of a common exponent: J. Demmel, H. D. Nguyen, "Fast Reproducible
Floating-Point Summation", ARITH 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["exact_sum"]

_BITS = 62
"""Of a signed number of 64 bits, with one to spare."""

_BUCKET = 1 << 23
"""Numbers that are reduced at once: 64 MB."""

_ABSENT = -1.0


def exact_sum(
    terms: Sequence[Sequence[torch.Tensor | None]], *, like: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor | None]:
    """Return the sums of tensors over all ranks, the same whichever rank has which term. A collective.

    Args:
        terms: this rank's; each a tensor for each of ``like``, or ``None`` for zeros.
        like: tensors of the shape, type and device of the sums, the same on all ranks.
        count: terms on all ranks together, at least; the same at any world size.

    Returns:
        A sum for each of ``like``; ``None`` where no rank has a term. Where a term is not finite, its sum is NaN.
    """
    if not like:
        return []
    device = like[0].device
    largest = torch.full((len(like),), _ABSENT, dtype=torch.float64)
    for term in terms:
        for index, tensor in enumerate(term):
            if tensor is not None:
                top = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
                largest[index] = max(float(largest[index]), math.inf if math.isnan(top) else top)
    largest = largest.to(device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    tops: list[float] = largest.tolist()
    room = _BITS - max(count - 1, 0).bit_length()
    sums: list[torch.Tensor | None] = [None] * len(like)
    bucket: list[int] = []
    size = 0
    for index, top in enumerate(tops):
        if top == _ABSENT:
            continue
        if not math.isfinite(top):
            sums[index] = torch.full_like(like[index], math.nan)
            continue
        bucket.append(index)
        size += like[index].numel()
        if size >= _BUCKET:
            _reduce(bucket, terms, like, tops, room, sums)
            bucket, size = [], 0
    if bucket:
        _reduce(bucket, terms, like, tops, room, sums)
    return sums


def _reduce(
    bucket: list[int],
    terms: Sequence[Sequence[torch.Tensor | None]],
    like: Sequence[torch.Tensor],
    tops: list[float],
    room: int,
    sums: list[torch.Tensor | None],
) -> None:
    flat = torch.zeros(sum(like[index].numel() for index in bucket), dtype=torch.int64, device=like[0].device)
    places = flat.split([like[index].numel() for index in bucket])  # type: ignore[no-untyped-call]
    # |top| < 2**exponent, so that a term has at most `room` bits; doubles reach to 2**1023.
    shifts = [min(room - math.frexp(tops[index])[1], 1000) for index in bucket]
    for place, index, shift in zip(places, bucket, shifts, strict=True):
        for term in terms:
            tensor = term[index]
            if tensor is not None:
                place += (tensor.detach().flatten().double() * 2.0**shift).round_().to(torch.int64)  # noqa: PLW2901
    dist.all_reduce(flat)
    for place, index, shift in zip(places, bucket, shifts, strict=True):
        sums[index] = (place.double() * 2.0**-shift).to(like[index].dtype).view_as(like[index])
