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

from azureml_elastic.checkpoints.placement import assign
from azureml_elastic.checkpoints.shard_file import Layout
from azureml_elastic.train import randomness
from azureml_elastic.train.layout import Piece, held, pieces, signature
from azureml_elastic.train.staging import Area
from azureml_elastic.train.state import TrackedState
from azureml_elastic.train.world import World

__all__ = ["Share"]

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


class Share:
    """What this rank writes of each checkpoint. For one thread.

    A plan is made once for states of the same form: names, shapes, types and shards of the tensors.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._area = Area(world.device)
        self._reserving: threading.Thread | None = None
        self._plan: _Plan | None = None
        self._attempts = 0

    def enter(self) -> None:
        """Share with the ranks of another round from now on."""
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
            tensors[randomness.tensor_name(control.rank)] = randomness.capture(self._world.device)
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

    def copy(self, tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview] | None:
        """Copy the share to memory, over the copy before, and return the content of its file.

        Args:
            tensors: just collected.

        Returns:
            The content, ``None`` where the share is empty.

        Raises:
            OSError: there is not enough memory.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        assert self._plan is not None
        layout, start = self._plan.layout, len(self._plan.layout.header)
        self._area.reserve(layout.nbytes - start)
        for entry, piece in zip(layout.entries, self._plan.pieces, strict=True):
            self._area.take(entry.begin - start, piece.of(tensors))
        self._area.settle()
        return self._blocks(layout) if layout.entries else None

    def nonce(self) -> str:
        """Return 8 hexadecimal digits, others at each call and the same on all ranks that have called as often."""
        assert self._plan is not None
        self._attempts += 1
        return xxhash.xxh32_hexdigest(f"{self._plan.token}.{self._attempts}".encode())

    def _blocks(self, layout: Layout) -> Iterator[bytes | memoryview]:
        yield layout.header
        yield self._area.view(0, layout.nbytes - len(layout.header))

    def _reserve(self, nbytes: int) -> None:
        try:
            self._area.reserve(nbytes)
        except OSError as error:
            _LOG.warning("There is no memory of %d bytes for checkpoints: %s", nbytes, error)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
