"""A state in memory, sent by all ranks that hold it to those that do not: straight into place, and verified.

The state is cut into pieces: ranges of large tensors, and groups of small ones. Each piece has a route: from one of its
holders to a first receiver, from there to a second one, and so on. Holders and first receivers take turns, so that each
holder sends its part of the state once, whatever the number of receivers.

Every process computes the checksums of what it sends and receives, while the next pieces are on their way, and all
compare them at the end. What arrived damaged is sent again by another holder. A process that ends meanwhile breaks the
round up, as in any collective.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.checkpoint.snapshots.snapshot import Snapshot, chunk_of
from azureml_elastic.checkpoint.state.memory import memory_of
from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import CheckpointDamaged, CheckpointError
from azureml_elastic.plurals import counted

__all__ = ["Piece", "Ranks", "cut", "route", "send_to_others"]

_LOG = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
"""Size of a piece: its checksum is computed while it is in the processor's cache."""

_WINDOW = 64
"""Number of pieces that a process has on their way."""

_ATTEMPTS = 3
_ALIGNMENT = 16


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Wait for its end."""


class Ranks(Protocol):
    """What a transfer needs of the control group."""

    rank: int
    world_size: int

    def from_rank(self, source: int, value: Any) -> Any:
        """Return one rank's value on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values on every rank."""

    def send(self, tensor: torch.Tensor, rank: int, number: int) -> Pending:
        """Begin to send a tensor, under a number, to a rank that receives it."""

    def receive(self, tensor: torch.Tensor, rank: int, number: int) -> Pending:
        """Begin to overwrite a tensor with one that a rank sends under this number."""


@dataclass(frozen=True)
class Piece:
    """Bytes that are sent together.

    Args:
        chunks: one tensor, or several small ones.
        begin: offset of the first byte, of one tensor.
        end: offset after the last byte; of several tensors, the size of all with their padding.
        shared: whether all holders have the same bytes.
    """

    chunks: tuple[Chunk, ...]
    begin: int
    end: int
    shared: bool


def cut(chunks: Iterable[Chunk], shared: Collection[str]) -> list[Piece]:
    """Return the pieces of a state.

    Args:
        chunks: its tensors.
        shared: names of those that are equal on all ranks that hold the state.
    """
    pieces: list[Piece] = []
    small: dict[bool, list[Chunk]] = {False: [], True: []}

    def close(together: bool) -> None:
        group = small[together]
        if sum(chunk.nbytes for chunk in group):
            size = group[0].nbytes if len(group) == 1 else sum(map(_padded, group))
            pieces.append(Piece(tuple(group), 0, size, together))
        small[together] = []

    for chunk in chunks:
        together = chunk.name in shared
        if chunk.nbytes > _PIECE_BYTES:
            ranges = itertools.pairwise([*range(0, chunk.nbytes, _PIECE_BYTES), chunk.nbytes])
            pieces += [Piece((chunk,), begin, end, together) for begin, end in ranges]
            continue
        if sum(map(_padded, small[together])) + chunk.nbytes > _PIECE_BYTES:
            close(together)
        small[together].append(chunk)
    close(together=False)
    close(together=True)
    return pieces


def route(number: int, piece: Piece, holders: Sequence[int], receivers: Sequence[int], attempt: int = 0) -> list[int]:
    """Return the ranks that a piece passes through, the one that holds it first.

    Args:
        number: number of the piece.
        piece: the piece.
        holders: ranks that hold the state; what is not the same on all is taken from the first.
        receivers: all other ranks.
        attempt: number of times that it was sent before.
    """
    sources = holders if piece.shared else holders[:1]
    turn = number // len(sources) % len(receivers)
    return [sources[(number + attempt) % len(sources)], *receivers[turn:], *receivers[:turn]]


def send_to_others(
    own: Snapshot | None,
    ranks: Ranks,
    holders: Sequence[int],
    shared: Callable[[Iterable[str]], Collection[str]],
    targets: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]],
) -> Snapshot:
    """Return the state on all ranks. A collective.

    Args:
        own: the state, of a rank that holds it.
        ranks: all ranks.
        holders: those that hold it; one at least, and not all of them.
        shared: function that returns which of these tensors are equal on all holders; called on the first one.
        targets: function that returns tensors to be overwritten, by the tracked state without tensors; for what is not
            among them, or does not fit, there is new CPU memory.

    Raises:
        CheckpointError: this process has no memory for the state.
        CheckpointDamaged: it did not arrive undamaged; raised on all ranks.
    """
    sent: tuple[dict[str, Any], list[Chunk], set[str]] | None = None
    if ranks.rank == holders[0]:
        assert own is not None
        sent = own.header(), [chunk_of(*item) for item in own.tensors.items()], set(shared(own.tensors))
    header, chunks, together = ranks.from_rank(holders[0], sent)
    pieces = cut(chunks, together)
    if own is None:
        own = Snapshot(**header, tensors=_placed(chunks, targets(header["state"]), header["step"]))
    others = [rank for rank in range(ranks.world_size) if rank not in set(holders)]
    left = [*range(len(pieces))]
    content = _Content(own.tensors, writable=ranks.rank in others)
    for attempt in range(_ATTEMPTS):
        routes = {number: route(number, pieces[number], holders, others, attempt) for number in left}
        sums = _exchange(ranks, content, pieces, routes)
        found = ranks.gather(sums)
        left = [number for number, way in routes.items() if len({found[rank][number] for rank in way}) > 1]
        if not left:
            return own
        _LOG.warning(
            "%s of the state of step %d arrived damaged, and %s sent again.",
            counted(len(left), "piece"), header["step"], "is" if len(left) == 1 else "are",
        )  # fmt: skip
    raise CheckpointDamaged(
        f"The state of step {header['step']} was sent {_ATTEMPTS} times from the ranks {[*holders]} to {others}, but "
        f"{counted(len(left), 'piece')} of it arrived with another checksum each time. Check the network and the "
        "memory of these nodes."
    )


def _placed(chunks: Iterable[Chunk], targets: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return the tensors to receive: those of the targets that are contiguous CPU memory of the right form, or new."""
    found: dict[str, torch.Tensor] = {}
    try:
        for chunk in chunks:
            dtype, target = getattr(torch, chunk.dtype), targets.get(chunk.name)
            fits = (
                target is not None
                and (target.dtype, tuple(target.shape)) == (dtype, chunk.shape)
                and not device_of(target.device).separate
                and target.is_contiguous()
            )
            found[chunk.name] = (
                target.detach() if fits and target is not None else torch.empty(chunk.shape, dtype=dtype)
            )
    except (RuntimeError, MemoryError) as error:
        mebibytes = sum(chunk.nbytes for chunk in chunks) >> 20
        raise CheckpointError(
            f"There is no memory for the state of step {step} that other ranks send, {mebibytes} MiB: {error}. Raise "
            "the memory limit of the process, or use larger nodes."
        ) from error
    return found


class _Content:
    """The bytes of a state's pieces.

    Args:
        tensors: tensors by name.
        writable: whether their bytes are received, and not sent alone.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, writable: bool) -> None:
        # Once for each tensor: one that is not contiguous would be copied for each of its pieces.
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self._writable = writable

    def of(self, piece: Piece) -> torch.Tensor:
        """Return the bytes: a view of one tensor, or a copy of several."""
        if len(piece.chunks) == 1:
            (chunk,) = piece.chunks
            return self._tensors[chunk.name].reshape(-1).view(torch.uint8)[piece.begin : piece.end].cpu()
        content = torch.zeros(piece.end, dtype=torch.uint8)
        if not self._writable:
            self._copy(piece, content, into=False)
        return content

    def take(self, piece: Piece, content: torch.Tensor) -> None:
        """Take over received bytes."""
        if len(piece.chunks) > 1:
            self._copy(piece, content, into=True)

    def _copy(self, piece: Piece, content: torch.Tensor, *, into: bool) -> None:
        begin = 0
        for chunk in piece.chunks:
            part = content[begin : begin + chunk.nbytes].view(getattr(torch, chunk.dtype)).view(chunk.shape)
            tensor = self._tensors[chunk.name]
            (tensor if into else part).copy_(part if into else tensor)
            begin += _padded(chunk)


def _exchange(
    ranks: Ranks, content: _Content, pieces: Sequence[Piece], routes: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Send, receive and pass on what this rank is to; return the checksums of its pieces by their numbers."""
    sums: dict[int, int] = {}
    sending: deque[Pending] = deque()

    def send(number: int, data: torch.Tensor, to: int) -> None:
        if len(sending) >= _WINDOW:
            sending.popleft().wait()
        sending.append(ranks.send(data, to, number))

    for number, data, way in _arrived(ranks, content, pieces, routes):
        after = way.index(ranks.rank) + 1
        if after < len(way):
            send(number, data, way[after])
        sums[number] = xxhash.xxh3_64_intdigest(memory_of(data))
        if after > 1:
            content.take(pieces[number], data)
    for pending in sending:
        pending.wait()
    return sums


def _arrived(
    ranks: Ranks, content: _Content, pieces: Sequence[Piece], routes: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, torch.Tensor, Sequence[int]]]:
    """Yield what this rank has of its routes: at once what it holds, and what it receives when that has arrived."""
    receiving: deque[tuple[Pending, int, torch.Tensor]] = deque()

    def take() -> tuple[int, torch.Tensor, Sequence[int]]:
        pending, number, data = receiving.popleft()
        pending.wait()
        return number, data, routes[number]

    for number, way in routes.items():
        if ranks.rank not in way:
            continue
        data = content.of(pieces[number])
        before = way.index(ranks.rank) - 1
        if before < 0:
            yield number, data, way
            continue
        if len(receiving) >= _WINDOW:
            yield take()
        receiving.append((ranks.receive(data, way[before], number), number, data))
    while receiving:
        yield take()


def _padded(chunk: Chunk) -> int:
    """Return the bytes of a small tensor in a piece, so that the next one is aligned."""
    return -(-chunk.nbytes // _ALIGNMENT) * _ALIGNMENT
