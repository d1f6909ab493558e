"""The elastic loader of datasets in shards.

The number of samples left in a stream is known only when they are read. The ranks therefore exchange, for each window,
the samples that each stream contributes and its position afterwards: every rank has the whole position, and any rank
can continue any stream. Windows are read one ahead, so that the last one of an epoch is known before it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Window
from azureml_elastic.train.data.sampling import Cursor, share, weight
from azureml_elastic.train.data.shard_streams import Part, ShardedDataset, ShardStreamReader

__all__ = ["ShardLoader"]


class ShardLoader(ElasticLoader):
    """Iterable over this rank's batches of a dataset in shards. It has no length: the samples are not known ahead.

    Args:
        exchange: collective that adds a vector over all ranks, in place
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        state: LoaderState,
        context: LoaderContext,
        exchange: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(state, context)
        if context.options.get("persistent_workers"):
            raise UsageError("persistent_workers=True keeps processes that read the last epoch's streams; remove it.")
        self._dataset = dataset
        self._exchange = exchange

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples."""
        position, spec, size = self._position, self._spec, self._window_size
        generation, world_size = position.generation, position.identity.world_size
        cursor = self._state.cursor
        if world_size > spec.streams:
            raise UsageError(
                f"The {spec.shards} shards and global_batch_size={spec.global_batch_size} make {spec.streams} streams, "
                f"fewer than the {world_size} ranks, so that some would have nothing to read. Write more shards, or "
                "give each worker a larger batch."
            )
        groups = self._groups(world_size, position.identity.rank)
        reader = self._reader(cursor, groups)
        parts = iter(self._make(reader, batch_size=None, collate_fn=identity))

        def following(cursor: Cursor) -> tuple[list[Part], Window | None]:
            mine = [part for part in islice(parts, len(groups)) if part.streams]
            window = self._agree(mine, cursor)
            return mine, None if not window.count or (spec.drop_last and window.count < size) else window

        mine, window = following(cursor)
        while window is not None and position.generation == generation:
            mine_after, after = following(window.after)
            if position.generation != generation:
                return
            window = replace(window, ends_epoch=after is None)
            filled = [part for part in mine if part.ids] or [Part(reader.filler())]
            for index, part in enumerate(filled):
                own, last = len(part.ids), index == len(filled) - 1
                yield MicroBatch(window, own, weight(own, window.count, world_size), index, last, part.seed), part.batch
            cursor, mine, window = window.after, mine_after, after
        if position.generation == generation:
            self._steps.ended(self._state, cursor)
            if not position.in_epochs:
                self._state.cursor = Cursor(cursor.epoch + 1)

    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the dataset."""
        return self._reader(self._state.cursor, []).filler()

    def _reader(self, cursor: Cursor, groups: list[list[int]]) -> ShardStreamReader:
        seeded = self._batching.exact
        return ShardStreamReader(self._dataset, self._spec, cursor, groups, self._window_size, self._collate, seeded)

    def _groups(self, world_size: int, rank: int) -> list[list[int]]:
        """Return the streams of each part of a window; as many parts as all processes can read at once."""
        mine = list(share(self._spec.streams, world_size, rank))
        processes = max(1, int(self._context.options.get("num_workers", 0)))
        if self._batching.logical_workers is not None:
            groups = [[stream] for stream in mine]
        else:
            number = min(processes, len(mine))
            groups = [[mine[index] for index in share(len(mine), number, part)] for part in range(number)]
        return groups + [[] for _ in range(-len(groups) % processes)]

    def _agree(self, mine: list[Part], cursor: Cursor) -> Window:
        """Return the window of all ranks' parts, with the positions of all streams after it. A collective."""
        table = torch.zeros(1 + 2 * self._spec.streams, dtype=torch.int64)
        for part in mine:
            table[0] += len(part.ids)
            for stream, at, read in part.streams:
                table[1 + 2 * stream], table[2 + 2 * stream] = at, read
        self._exchange(table)
        count, *numbers = table.tolist()
        after = Cursor(cursor.epoch, cursor.consumed + count, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        ids = tuple(each for part in mine for each in part.ids)
        return Window(ids=ids, count=count, before=cursor, after=after, epoch_size=None)


def identity(part: Any) -> Any:
    """Return a part, whose samples are collated already; a function by name, for processes that are spawned."""
    return part
