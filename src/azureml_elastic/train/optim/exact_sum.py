"""A sum of gradients that is bit-identical at any world size.

A sum of floating-point numbers depends on their order, and so on the distribution of the terms over the ranks; a sum
of integers does not. Each term is therefore multiplied by a power of two, rounded and added up as an integer. The power
is chosen for each block of 256 numbers from its largest number in any term of any rank, such that the sum just fits.
(The idea of a common exponent: J. Demmel, H. D. Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013.)

Numbers of up to 32 bits are added up in 32 bits, so that no more is sent than for a sum of floats. Of S terms, each is
rounded to a multiple of ``2**(ceil(log2(S)) - 30)`` of the power of two above its block's largest number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

_BLOCK = 256
"""Numbers that have a power of two in common."""

_CHUNK = 1 << 17
"""Numbers that are converted at once: what a core's cache holds, with the intermediate results."""

_MESSAGE = 1 << 23
"""Numbers that are sent at once, while the next ones are converted."""

_Term = Sequence[torch.Tensor | None]  # of the shapes and types of the sums


@dataclass(frozen=True)
class _Format:
    """A floating-point format and the integers of the same size.

    Args:
        fraction: bits of a number's fraction
        bias: bias of its exponent
    """

    real: torch.dtype
    integer: torch.dtype
    fraction: int
    bias: int

    def exponents(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the biased exponents, int32 (blocks,), of numbers (blocks,); that of a negative one is negative."""
        return largest.view(self.integer).bitwise_right_shift(self.fraction).to(torch.int32)

    def powers(self, exponents: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the powers of two that make integers of terms, and their inverses, NaN where a term is not finite.

        Both are ``real`` (blocks,), for ``exponents``, int32 (blocks,), of the largest numbers; so many terms must fit.
        """
        # A term becomes at most 2**room, so that the sum is at most 2**30: it must not become 2**31, which has no place
        # beside the sign. (2**62 and 2**63 in 64 bits.)
        room = 8 * self.integer.itemsize - 2 - max(terms - 1, 0).bit_length()
        # The inverse must not be smaller than the smallest normal number: numbers that are nearly that small are
        # rounded to multiples of it. Powers of two have exact inverses.
        used = exponents.clamp(min=room).to(self.integer)
        powers = (2 * self.bias - 1 + room - used).bitwise_left_shift(self.fraction).view(self.real)
        return powers, powers.reciprocal().masked_fill_(exponents > 2 * self.bias, torch.nan)


_NARROW = _Format(torch.float32, torch.int32, fraction=23, bias=127)
_WIDE = _Format(torch.float64, torch.int64, fraction=52, bias=1023)


class ExactSum:
    """The sum of tensors over all ranks, the same for any distribution of the terms; used again for each step.

    Numbers of up to 32 bits are added up as int32 after a scaling in float32, wider ones and integers as int64 in
    float64; each sum is cast to the type of its tensor at the end.

    Args:
        like: tensors of the shape, type and device of the sums, the same on all ranks; any shapes, on one device
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._like = list(like)
        # Integers, such as counters of batches, are exact as 64-bit floats up to 2**53.
        wide = [not each.is_floating_point() or each.dtype.itemsize > _NARROW.real.itemsize for each in like]
        self._sums = []
        for form, wanted in ((_NARROW, False), (_WIDE, True)):
            chosen = {index: each for index, each in enumerate(like) if wide[index] == wanted}
            if chosen:
                self._sums.append(_SumOfFormat(form, chosen))
        self._terms = 0

    def clear(self) -> None:
        """Drop all terms."""
        self._terms = 0
        for each in self._sums:
            each.clear()

    def add(self, term: _Term) -> None:
        """Add a term of this rank; it has a tensor for each of ``like``, of its shape, or ``None`` for zeros.

        The tensors are kept, and must not be changed before :meth:`finish`: the power of two of a block is known only
        then, from the terms of all ranks.
        """
        self._terms += 1
        for each in self._sums:
            each.add(term)

    def finish(self) -> list[torch.Tensor | None]:
        """Return the sums, and drop the terms. A collective.

        Returns:
            A sum for each of ``like``, of its shape and type; ``None`` where no rank has a term. Where a term is not
            finite, the sum of its block is NaN.
        """
        found: list[torch.Tensor | None] = [None] * len(self._like)
        if not self._like:
            return found
        ranks = dist.get_world_size()
        # Each rank has a place for its number of terms, so that one collective agrees on the exponents and counts both.
        counts = [self._terms if rank == dist.get_rank() else 0 for rank in range(ranks)]
        largest = [each.exponents() for each in self._sums]
        agreed = torch.cat(
            [*largest, torch.tensor(counts, dtype=torch.int32, device=largest[0].device)]
        )  # (blocks + ranks,)
        if ranks > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        *exponents, counted = agreed.split([*map(len, largest), ranks])  # type: ignore[no-untyped-call]
        firsts = [part[each.firsts] for each, part in zip(self._sums, exponents, strict=True)]
        numbers = torch.cat([*firsts, counted]).tolist()  # all that the host has to know, in one wait for the device
        tensors = [tensor for each in self._sums for tensor in each.tensors]
        present = {tensor for tensor, exponent in zip(tensors, numbers, strict=False) if exponent >= 0}
        for each, part in zip(self._sums, exponents, strict=True):
            for tensor, total in each.finish(part, sum(numbers[-ranks:]), present, exchange=ranks > 1):
                found[tensor] = total.to(self._like[tensor].dtype)
        self.clear()
        return found


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Numbers that are converted at once: several small tensors, or a range of a large one.

    Args:
        blocks: place in the sum
        tensors: index of each tensor, and its first block relative to the chunk
        shapes: tensors of the shapes of which the chunk consists, and the index of each; ``None`` for those that fill
            up blocks
        numbers: range of the numbers of a large tensor, ``None`` where the tensors are whole
    """

    blocks: range
    tensors: dict[int, int]
    shapes: tuple[tuple[int | None, torch.Tensor], ...]
    numbers: range | None = None

    @property
    def words(self) -> slice:
        """Place in the sum, in numbers."""
        return slice(self.blocks.start * _BLOCK, self.blocks.stop * _BLOCK)


class _SumOfFormat:
    """The sum of the tensors that are added up in the same format.

    Attributes:
        tensors: the tensors by index
        firsts: first block of each, int64 (tensors,)
    """

    def __init__(self, form: _Format, tensors: dict[int, torch.Tensor]) -> None:
        self.tensors = tensors
        self._format = form
        device = next(iter(tensors.values())).device
        self._zeros = torch.zeros(_CHUNK, dtype=form.real, device=device)
        self._chunks = _cut(tensors, self._zeros)
        firsts: dict[int, int] = {}
        for chunk in self._chunks:
            for tensor, block in chunk.tensors.items():
                firsts.setdefault(tensor, chunk.blocks.start + block)
        self.firsts = torch.tensor(list(firsts.values()), device=device)
        self._scratch = torch.empty(_CHUNK, dtype=form.real, device=device)
        self._rounded = torch.empty(_CHUNK, dtype=form.integer, device=device)
        # -1 is below each absolute value: "no term". Its exponent is negative as well, and loses each maximum.
        self._largest = torch.full((self._chunks[-1].blocks.stop,), -1, dtype=form.real, device=device)
        self._terms: list[list[torch.Tensor]] = [[] for _ in self._chunks]

    def clear(self) -> None:
        self._largest.fill_(-1)
        for terms in self._terms:
            terms.clear()

    def exponents(self) -> torch.Tensor:
        return self._format.exponents(self._largest)

    def add(self, term: _Term) -> None:
        for chunk, terms in zip(self._chunks, self._terms, strict=True):
            missing = [tensor for tensor in chunk.tensors if term[tensor] is None]
            if len(missing) == len(chunk.tensors):  # often buffers that did not change
                continue
            own = self._take(chunk, term)
            absolute = torch.abs(own.to(self._format.real), out=self._scratch[: own.numel()])
            largest = absolute.view(-1, _BLOCK).amax(1)  # (blocks of the chunk,)
            for tensor in missing:
                first = chunk.tensors[tensor]
                largest[first : first + _blocks(self.tensors[tensor].numel())] = -1
            before = self._largest[chunk.blocks.start : chunk.blocks.stop]
            torch.maximum(before, largest, out=before)
            terms.append(own)

    def finish(
        self, exponents: torch.Tensor, count: int, present: set[int], *, exchange: bool
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the sums by index. A collective if ``exchange``.

        Args:
            exponents: biased exponent of each block's largest number on all ranks, int32 (blocks,)
            count: number of terms on all ranks
            present: tensors of which a rank has a term
            exchange: whether there are other ranks
        """
        powers, inverses = self._format.powers(exponents, count)
        words = torch.empty(len(self._largest) * _BLOCK, dtype=self._format.integer, device=exponents.device)
        sent: list[tuple[list[_Chunk], dist.Work | None]] = []
        for message in self._messages(present):  # the next one is converted while this one is sent
            for index in message:
                chunk = self._chunks[index]
                factors = powers[chunk.blocks.start : chunk.blocks.stop, None]  # (blocks of the chunk, 1)
                self._add_up(self._terms[index], factors, words[chunk.words])
            chunks = [self._chunks[index] for index in message]
            place = slice(chunks[0].words.start, chunks[-1].words.stop)
            sent.append((chunks, dist.all_reduce(words[place], async_op=True) if exchange else None))
        sums = words.view(self._format.real)  # which take the place of the integers, chunk by chunk
        for chunks, work in sent:
            if work is not None:
                work.wait()
            for chunk in chunks:
                total = self._scratch[: len(chunk.blocks) * _BLOCK].copy_(words[chunk.words])
                factors = inverses[chunk.blocks.start : chunk.blocks.stop, None]
                torch.mul(total.view(-1, _BLOCK), factors, out=sums[chunk.words].view(-1, _BLOCK))
                if chunk.numbers is None:
                    shapes = [shape for _, shape in chunk.shapes]
                    found = _unflatten_dense_tensors(sums[chunk.words], shapes)  # type: ignore[no-untyped-call]
                    for (tensor, _), part in zip(chunk.shapes, found, strict=True):
                        if tensor in present:
                            yield tensor, part
                elif chunk.numbers.stop == self.tensors[next(iter(chunk.tensors))].numel():
                    (tensor,) = chunk.tensors
                    like = self.tensors[tensor]
                    begin = chunk.words.start - chunk.numbers.start
                    yield tensor, sums[begin : begin + like.numel()].view(like.shape)

    def _messages(self, present: set[int]) -> Iterator[list[int]]:
        """Yield the indices of chunks that are sent together: neighbours, without those that no rank has."""
        message: list[int] = []
        for index, chunk in enumerate(self._chunks):
            wanted = not present.isdisjoint(chunk.tensors)
            if wanted:
                message.append(index)
            if message and (not wanted or chunk.words.stop - self._chunks[message[0]].words.start >= _MESSAGE):
                yield message
                message = []
        if message:
            yield message

    def _add_up(self, terms: list[torch.Tensor], powers: torch.Tensor, words: torch.Tensor) -> None:
        """Write the sum of a chunk's terms, (numbers,) each, to integers, (numbers,); ``powers`` is (blocks, 1)."""
        if not terms:
            words.zero_()
        scaled, rounded = self._scratch[: words.numel()], self._rounded[: words.numel()]
        for index, term in enumerate(terms):
            torch.mul(term.to(self._format.real).view(-1, _BLOCK), powers, out=scaled.view(-1, _BLOCK))
            # The one step that loses anything: a product with a power of two is exact, and so is the sum of integers.
            scaled.round_()
            if index == 0:
                words.copy_(scaled)
            else:
                words.add_(rounded.copy_(scaled))

    def _take(self, chunk: _Chunk, term: _Term) -> torch.Tensor:
        """Return the numbers of a chunk, (blocks * 256,); not copied where they are whole blocks of one tensor."""
        if chunk.numbers is not None:
            (tensor,) = chunk.tensors
            whole = term[tensor]
            assert whole is not None
            part = whole.detach().reshape(-1)[chunk.numbers.start : chunk.numbers.stop]
            missing = len(chunk.blocks) * _BLOCK - part.numel()
            return torch.cat([part, self._zeros[:missing]]) if missing else part
        parts = []
        for index, shape in chunk.shapes:
            own = shape if index is None else term[index]
            parts.append(self._zeros[: shape.numel()] if own is None else own)
        return _flatten_dense_tensors(parts).detach()  # type: ignore[no-any-return, no-untyped-call]


def _cut(tensors: Mapping[int, torch.Tensor], zeros: torch.Tensor) -> list[_Chunk]:
    """Return the chunks of tensors: a large one has several, small ones share them."""
    chunks: list[_Chunk] = []
    together: dict[int, torch.Tensor] = {}
    end = 0

    def close() -> None:
        nonlocal end
        firsts: dict[int, int] = {}
        shapes: list[tuple[int | None, torch.Tensor]] = []
        begin = end
        for index, tensor in together.items():
            firsts[index] = end - begin
            end += _blocks(tensor.numel())
            shapes.append((index, tensor))
            missing = (end - begin - firsts[index]) * _BLOCK - tensor.numel()
            if missing:
                shapes.append((None, zeros[:missing]))
        if together:
            chunks.append(_Chunk(range(begin, end), firsts, tuple(shapes)))
            together.clear()

    for index, tensor in tensors.items():
        size = tensor.numel()
        if sum(_blocks(each.numel()) for each in together.values()) + _blocks(size) > _CHUNK // _BLOCK:
            close()
        if size <= _CHUNK:
            together[index] = tensor
            continue
        for start in range(0, size, _CHUNK):
            numbers = range(start, min(start + _CHUNK, size))
            chunks.append(_Chunk(range(end, end + _blocks(len(numbers))), {index: 0}, (), numbers))
            end += _blocks(len(numbers))
    close()
    return chunks


def _blocks(size: int) -> int:
    """Return the number of blocks of a tensor; an empty one has a block, too, so that it is known who has it."""
    return max(1, -(-size // _BLOCK))
