"""Chunks of a state in the memory of some ranks, sent to the ranks that want them: straight into place, and verified.

The ranks hold the whole state or parts of it, and want the whole or parts. What they want is cut into pieces: ranges
of large chunks, and groups of small ones. Each piece has a route: from one of its holders to a first receiver, from
there to a second one, and so on. Holders and first receivers take turns, so that each holder sends its part of the
state once, whatever the number of receivers.

Every process computes the checksums of what it sends and receives, while the next pieces are on their way, and all
compare them at the end. What arrived damaged is sent again by another holder. A process that ends meanwhile breaks the
round up, as in any collective.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Chunk
from azureml_elastic.checkpoint.state.layout import memory_of, reads
from azureml_elastic.distributed.control_group import ControlGroup, Transfer
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.plurals import counted

_LOG = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""Size of a piece: its checksum is computed while it is in the processor's cache."""

_SMALL_BYTES = 256 << 10
"""Size up to which regions are sent together: one copy more costs less than one message more."""

_WINDOW = 64
"""Number of pieces that a process has on their way."""

_ATTEMPTS = 3
_ALIGNMENT = 16


@dataclass(frozen=True)
class Region:
    """A part of a chunk, by the chunk's number."""

    source: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
        """Return it as a view, of shape ``sizes``, of a tensor that begins at these offsets of the chunk."""
        for dimension, (offset, begin, size) in enumerate(zip(self.offsets, begins, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset - begin, size)
        return tensor.detach()

    def split(self, itemsize: int) -> Iterator[Region]:
        """Yield parts of at most the size of a piece, each contiguous where this is."""
        along = next((dimension for dimension, size in enumerate(self.sizes) if size > 1), None)
        if along is None or prod(self.sizes) * itemsize <= _PIECE_BYTES:
            yield self
            return
        begin, size = self.offsets[along], self.sizes[along]
        rows = max(1, _PIECE_BYTES // (prod(self.sizes[along + 1 :]) * itemsize))
        for row in range(0, size, rows):
            offsets = (*self.offsets[:along], begin + row, *self.offsets[along + 1 :])
            sizes = (*self.sizes[:along], min(rows, size - row), *self.sizes[along + 1 :])
            yield from Region(self.source, offsets, sizes).split(itemsize)


@dataclass(frozen=True)
class Piece:
    """Regions that are sent together.

    Args:
        regions: one, or several small ones.
        begins: offset of each region's first byte in the piece, and the size of the piece.
        holders: ranks that hold all of them.
        receivers: ranks that want all of them.
    """

    regions: tuple[Region, ...]
    begins: tuple[int, ...]
    holders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size, with the padding between small regions."""
        return self.begins[-1]


def cut(
    wanted: Mapping[Region, Sequence[int]], chunks: Sequence[Chunk], holders: Sequence[Sequence[int]]
) -> list[Piece]:
    """Return the pieces that are sent: ``wanted`` has the ranks that want each region, and do not hold it."""
    small: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = defaultdict(list)
    pieces: defaultdict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for region, receivers in wanted.items():
        ends = tuple(holders[region.source]), tuple(receivers)
        itemsize = chunks[region.source].itemsize
        for part in region.split(itemsize):
            nbytes = prod(part.sizes) * itemsize
            if nbytes > _SMALL_BYTES:
                pieces[ends[1]].append(Piece((part,), (0, nbytes), *ends))
            else:
                small[ends].append(part)
    for ends, regions in small.items():
        pieces[ends[1]] += (Piece(group, begins, *ends) for group, begins in _packed(regions, chunks))
    # In turns, so that none of the receivers waits for the end of what others receive.
    in_turns = itertools.zip_longest(*pieces.values())
    return [piece for each in in_turns for piece in each if piece is not None]


def _packed(regions: Iterable[Region], chunks: Sequence[Chunk]) -> Iterator[tuple[tuple[Region, ...], tuple[int, ...]]]:
    """Yield groups of regions with the offsets of each; all begin at a multiple of an element's size."""
    group: list[Region] = []
    begins = [0]
    for region in regions:
        nbytes = prod(region.sizes) * chunks[region.source].itemsize
        if group and begins[-1] + nbytes > _PIECE_BYTES:
            yield tuple(group), tuple(begins)
            group, begins = [], [0]
        group.append(region)
        begins.append(begins[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
    if group:
        yield tuple(group), tuple(begins)


def route(number: int, piece: Piece, attempt: int = 0) -> list[int]:
    """Return the ranks that a piece passes through, the one that holds it first; another one at each attempt."""
    holders, receivers = piece.holders, piece.receivers
    # By what is left of the number: by the number itself each holder would always meet the same first receiver.
    turn = number // len(holders) % len(receivers)
    return [holders[(number + attempt) % len(holders)], *receivers[turn:], *receivers[:turn]]


@dataclass(frozen=True, eq=False)
class HeldChunks:
    """The chunks of a state in the memory of some ranks, without repetition, and the tensors of this rank's own."""

    step: int
    chunks: Sequence[Chunk]
    holders: Sequence[Sequence[int]]
    own: Mapping[Chunk, torch.Tensor]

    def read(self, targets: Mapping[str, torch.Tensor], ranks: ControlGroup) -> None:
        """Overwrite tensors, of which each rank may have others, or none. A collective.

        Raises:
            CheckpointDamaged: what was sent did not arrive undamaged; raised on all ranks.
            RuntimeError: a peer was lost meanwhile.
        """
        mine = {Region(read.source, read.offsets, read.sizes): read.target for read in reads(targets, self.chunks)}
        mine = {region: target for region, target in mine.items() if target.numel()}
        with torch.no_grad():
            # A rank that holds some of what it wants copies that, and receives the rest alone.
            for region in [each for each in mine if self.chunks[each.source] in self.own]:
                mine.pop(region).copy_(self.view(region))
            pieces = cut(self._gather(mine, ranks), self.chunks, self.holders)
            content = _Content(self, mine)
            left = [*range(len(pieces))]
            for attempt in range(_ATTEMPTS):
                if not left:
                    return
                if attempt:
                    _LOG.warning(
                        "%s of the state of step %d arrived damaged, and %s sent again.",
                        counted(len(left), "piece"), self.step, "is" if len(left) == 1 else "are",
                    )  # fmt: skip
                routes = {number: route(number, pieces[number], attempt) for number in left}
                # Two checksums do not tell which of them is wrong, so that all ranks on the way get the piece again.
                found = ranks.gather(_exchange(ranks, content, pieces, routes))
                left = [number for number, way in routes.items() if len({found[rank][number] for rank in way}) > 1]
        if left:
            raise CheckpointDamaged(
                f"The state of step {self.step} was sent {_ATTEMPTS} times between the ranks, but "
                f"{counted(len(left), 'piece')} of it arrived with another checksum each time, the first one from "
                f"{[*pieces[left[0]].holders]} at {[*pieces[left[0]].receivers]}. Check the network and the memory of "
                "these nodes."
            )

    def _gather(self, mine: Iterable[Region], ranks: ControlGroup) -> dict[Region, list[int]]:
        whole = [Region(n, (0,) * len(each.sizes), each.sizes) for n, each in enumerate(self.chunks) if each.nbytes]
        regions = [*mine]
        wanted: defaultdict[Region, list[int]] = defaultdict(list)
        # Of a replicated state ranks want all or nothing, which is not spelt out: there may be hundreds of them.
        for rank, asked in enumerate(ranks.gather(None if regions == whole else regions)):
            for region in whole if asked is None else asked:
                wanted[region].append(rank)
        return wanted

    def view(self, region: Region) -> torch.Tensor:
        """Return a region of a chunk that this rank holds."""
        return region.of(self.own[self.chunks[region.source]], (0,) * len(region.sizes))


class _Content:
    """The bytes of pieces on this rank: of what it may send, and of tensors that it receives, by their regions."""

    def __init__(self, held: HeldChunks, wanted: Mapping[Region, torch.Tensor]) -> None:
        self._held = held
        self._targets = {
            part: part.of(target, region.offsets)
            for region, target in wanted.items()
            for part in region.split(held.chunks[region.source].itemsize)
        }

    def held(self, piece: Piece) -> torch.Tensor:
        """Return the bytes to send, uint8 (nbytes,): a view of memory, or a copy of several regions."""
        views = [self._held.view(region) for region in piece.regions]
        if len(views) == 1:
            return _bytes(views[0].cpu().contiguous())
        content = torch.zeros(piece.nbytes, dtype=torch.uint8)
        for part, view in zip(self._parts(piece, content), views, strict=True):
            part.copy_(view)
        return content

    def place(self, piece: Piece) -> torch.Tensor:
        """Return memory to receive the bytes, uint8 (nbytes,): that of the tensor itself where it can be."""
        target = self._targets[piece.regions[0]]
        if len(piece.regions) == 1 and target.is_contiguous() and not device_of(target.device).separate:
            return _bytes(target)
        return torch.empty(piece.nbytes, dtype=torch.uint8)

    def take(self, piece: Piece, content: torch.Tensor) -> None:
        """Copy received bytes, uint8 (nbytes,), to the tensors that they were not received into."""
        for region, part in zip(piece.regions, self._parts(piece, content), strict=True):
            target = self._targets[region]
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)

    def _parts(self, piece: Piece, content: torch.Tensor) -> Iterator[torch.Tensor]:
        for region, begin in zip(piece.regions, piece.begins, strict=False):
            dtype = getattr(torch, self._held.chunks[region.source].dtype)
            nbytes = prod(region.sizes) * dtype.itemsize
            yield content[begin : begin + nbytes].view(dtype).view(region.sizes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _exchange(
    ranks: ControlGroup, content: _Content, pieces: Sequence[Piece], routes: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Send, receive and pass on what this rank is to; return the checksums of its pieces by their numbers."""
    sums: dict[int, int] = {}
    sending: deque[tuple[Transfer, int]] = deque()
    receiving: deque[tuple[Transfer, int, torch.Tensor]] = deque()

    def has(number: int, data: torch.Tensor) -> None:
        way = routes[number]
        # Passed on before its checksum is computed, and before it is copied to where it belongs: the next rank waits.
        if (after := way.index(ranks.rank) + 1) < len(way):
            sending.append((ranks.send(data, way[after], number), number))
        sums[number] = xxhash.xxh3_64_intdigest(memory_of(data))

    def take() -> None:
        pending, number, data = receiving.popleft()
        pending.wait()
        has(number, data)
        content.take(pieces[number], data)

    for number, way in routes.items():
        if ranks.rank not in way:
            continue
        before = way.index(ranks.rank) - 1
        if before >= 0:
            if len(receiving) >= _WINDOW:
                take()
            data = content.place(pieces[number])
            receiving.append((ranks.receive(data, way[before], number), number, data))
            continue
        while len(sending) >= _WINDOW:
            pending, oldest = sending.popleft()
            # A rank that waits for a piece to leave has passed on all before it. Thus it only ever waits for one that
            # is behind: two that hold and receive would otherwise wait for each other.
            while receiving and receiving[0][1] < oldest:
                take()
            pending.wait()
        has(number, content.held(pieces[number]))
    while receiving:
        take()
    for pending, _ in sending:
        pending.wait()
    return sums
