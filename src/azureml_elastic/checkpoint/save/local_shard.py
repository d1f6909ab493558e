"""This rank's share of the state: what it is, agreed by all ranks, and its copy in memory."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from azureml_elastic.checkpoint.format.shard_file import Layout
from azureml_elastic.checkpoint.format.write_plan import assign
from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer
from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.checkpoint.state.layout import Piece, held, pieces, signature
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.process_groups import ProcessGroups

__all__ = ["LocalShard", "ShardCopy"]

_LOG = logging.getLogger(__name__)

_FAILED, _CHANGED, _SAME = range(3)


@dataclass(frozen=True)
class _Plan:
    """What this rank writes of a state of a certain form.

    Args:
        form: of the state.
        layout: of this rank's file.
        pieces: where the entries of the layout are found, in their order.
        token: random, the same on all ranks.
    """

    form: tuple[Any, ...]
    layout: Layout
    pieces: tuple[Piece, ...]
    token: str


@dataclass(frozen=True)
class ShardCopy:
    """A copy of a rank's share: the content of its file, and maybe something after it.

    Args:
        area: where it is.
        nbytes: of the file.
        tail: bytes behind it.
        empty: whether the file would hold nothing.
    """

    area: StagingBuffer
    nbytes: int
    tail: int
    empty: bool

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file."""
        yield self.area.view(0, self.nbytes)


class LocalShard:
    """What this rank writes of each checkpoint. For one thread.

    A plan is made once for states of the same form: names, shapes, types and shards of the tensors.

    Args:
        world: the ranks.
        spare: whether a copy may be held while the next one is made.
    """

    def __init__(self, world: ProcessGroups, *, spare: bool = False) -> None:
        self._world = world
        self._areas = [StagingBuffer(world.device) for _ in range(2 if spare else 1)]
        self._held: StagingBuffer | None = None
        self._reserving: threading.Thread | None = None
        self._plan: _Plan | None = None
        self._attempts = 0

    def enter(self) -> None:
        """LocalShard with the ranks of another round from now on."""
        self._plan = None
        self._attempts = 0

    def collect(self, state: TrackedState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state as JSON and as tensors, once all ranks have theirs and know their shares. A collective.

        Raises:
            CheckpointError: a rank cannot say what its state is; raised on all.
        """
        control = self._world.control
        failure: Exception | None = None
        plain: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        verdict = _SAME
        try:
            plain, tensors = state.collect(is_main=control.rank == 0)
            tensors[random_state.tensor_name(control.rank)] = random_state.capture(self._world.device)
            if self._plan is None or self._plan.form != signature(tensors):
                verdict = _CHANGED
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            failure, verdict = error, _FAILED
        lowest = control.lowest(verdict)
        if lowest == _FAILED:
            control.together("Collecting the state", lambda: _raise(failure))
        if lowest == _CHANGED:
            plans = control.together("Planning the checkpoint", lambda: (held(tensors), secrets.token_hex(16)))
            layout = Layout.of(assign([boxes for boxes, _ in plans])[control.rank])
            places = pieces(plans[control.rank][0], [entry.chunk for entry in layout.entries])
            self._plan = _Plan(signature(tensors), layout, tuple(places), plans[0][1])
        return plain, tensors

    def reserve(self) -> None:
        """Have the memory for a copy made, on a thread; nobody may read the copy before."""
        if self._reserving is None:
            assert self._plan is not None
            arguments = (self._plan.layout.nbytes,)
            self._reserving = threading.Thread(target=self._reserve, args=arguments, name="reserve-memory", daemon=True)
            self._reserving.start()

    def hold(self, copy: ShardCopy) -> None:
        """Leave a copy as it is until another one is held."""
        assert len(self._areas) > 1
        self._held = copy.area

    def copy(self, tensors: dict[str, torch.Tensor], tail: bytes = b"") -> ShardCopy:
        """ShardCopy the share to memory, over the copy before that is not held.

        Args:
            tensors: just collected.
            tail: to be put behind it.

        Raises:
            OSError: there is not enough memory.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        assert self._plan is not None
        layout, area = self._plan.layout, self._free
        area.reserve(layout.nbytes + len(tail))
        area.put(0, layout.header)
        for entry, piece in zip(layout.entries, self._plan.pieces, strict=True):
            area.take(entry.begin, piece.of(tensors))
        area.put(layout.nbytes, tail)
        area.synchronize()
        return ShardCopy(area, layout.nbytes, len(tail), not layout.entries)

    def nonce(self) -> str:
        """Return 8 hexadecimal digits, others at each call and the same on all ranks that have called as often."""
        assert self._plan is not None
        self._attempts += 1
        return xxhash.xxh32_hexdigest(f"{self._plan.token}.{self._attempts}".encode())

    @property
    def _free(self) -> StagingBuffer:
        return next(area for area in self._areas if area is not self._held)

    def _reserve(self, nbytes: int) -> None:
        try:
            for area in self._areas:
                area.reserve(nbytes)
        except OSError as error:
            _LOG.warning("There is no memory of %d bytes for checkpoints: %s", nbytes, error)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
