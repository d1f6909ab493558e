"""The elastic loader of datasets in shards.

The number of samples that a stream still has is known only when they are read. The ranks therefore exchange what each
stream gives to a window and where it stands afterwards, a few numbers a step, so that every rank knows the whole
position and any rank can continue any stream. Windows are read one ahead: the last one of an epoch is known before it
is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.batching import Batching
from azureml_elastic.train.data.loader import ElasticLoader, require_foreign
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, share, weight
from azureml_elastic.train.data.shard_streams import Part, ShardedDataset, ShardSpec, ShardStreamReader

__all__ = ["ShardLoader"]


class ShardLoader(ElasticLoader):
    """Iterable over this rank's batches of a dataset in shards. It has no length: no rank knows the samples ahead.

    Args:
        dataset: dataset in shards
        spec: properties of the data that must not change over restarts
        batching: division of windows into micro-batches
        state: position of this loader
        position: position of the run
        device: device that the tensors of a batch are moved to
        exchange: collective that adds a vector over all ranks, in place
        kind: ``torch.utils.data.DataLoader``, or a class of the same arguments
        options: further arguments of ``kind``

    Raises:
        UsageError: an option is one that the loader sets itself.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        spec: ShardSpec,
        batching: Batching,
        *,
        state: LoaderState,
        position: Position,
        device: torch.device,
        exchange: Callable[[torch.Tensor], None],
        kind: type[DataLoader[Any]] = DataLoader,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(spec, state, position, device)
        require_foreign(options)
        if options.get("persistent_workers"):
            raise UsageError("persistent_workers=True keeps processes that read the last epoch's streams; remove it.")
        self._dataset = dataset
        self._batching = batching
        self._exchange = exchange
        self._kind = kind
        self._collate = options.get("collate_fn") or default_collate
        self._options = {key: value for key, value in options.items() if key != "collate_fn"}

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches from the cursor to the end of the epoch, with their collated samples.

        Raises:
            UsageError: there are more ranks than streams.
        """
        position, spec = self._position, self.spec
        generation, world_size = position.generation, position.identity.world_size
        cursor = self._state.cursor
        if world_size > spec.streams:
            raise UsageError(
                f"The {spec.shards} shards and global_batch_size={spec.global_batch_size} make {spec.streams} streams, "
                f"fewer than the {world_size} ranks, so that some would have nothing to read. Write more shards."
            )
        groups = self._groups(world_size, position.identity.rank)
        reader = self._reader(cursor, groups)
        defaults = {"pin_memory": self._device.type == "cuda", "generator": self._generator}
        parts = iter(self._kind(reader, batch_size=None, collate_fn=as_it_is, **{**defaults, **self._options}))

        def following(cursor: Cursor) -> tuple[list[Part], Window | None]:
            mine = [part for part in islice(parts, len(groups)) if part.streams]
            window = self._agree(mine, cursor)
            return mine, None if not window.count or (spec.drop_last and window.count < size) else window

        size = self._batching.window_size(spec.global_batch_size, world_size)
        mine, window = following(cursor)
        while window is not None and position.generation == generation:
            mine_after, after = following(window.after)
            if position.generation != generation:
                return
            window = replace(window, ends_epoch=after is None)
            filled = [part for part in mine if part.ids] or [Part(reader.filler())]
            for index, part in enumerate(filled):
                own = len(part.ids)
                share_of_it = weight(own, window.count, world_size)
                yield MicroBatch(window, own, share_of_it, index, index == len(filled) - 1, part.place), part.batch
            cursor, mine, window = window.after, mine_after, after
        if position.generation == generation:
            position.when_ended(self._state, cursor)
            if not position.in_epochs:
                self._state.cursor = Cursor(cursor.epoch + 1)

    def filler(self) -> Any:
        """Return a collated batch of one or two samples of the dataset."""
        return self._reader(self._state.cursor, []).filler()

    def _reader(self, cursor: Cursor, groups: list[list[int]]) -> ShardStreamReader:
        size = self._batching.window_size(self.spec.global_batch_size, self._position.identity.world_size)
        seeded = self._batching.exact
        return ShardStreamReader(self._dataset, self.spec, cursor, groups, size, self._collate, is_seeded=seeded)

    def _groups(self, world_size: int, rank: int) -> list[list[int]]:
        """Return the streams of each part of a window; as many parts as all processes can read at once."""
        mine = list(share(self.spec.streams, world_size, rank))
        processes = max(1, int(self._options.get("num_workers", 0)))
        if self._batching.logical_workers is not None:
            groups = [[stream] for stream in mine]
        else:
            number = min(processes, len(mine))
            groups = [[mine[index] for index in share(len(mine), number, part)] for part in range(number)]
        return groups + [[] for _ in range(-len(groups) % processes)]

    def _agree(self, mine: list[Part], cursor: Cursor) -> Window:
        """Return the window that all ranks' parts make, and where all streams stand after it. A collective."""
        streams = self.spec.streams
        table = torch.zeros(1 + 2 * streams, dtype=torch.int64)
        for part in mine:
            table[0] += len(part.ids)
            for stream, at, read in part.streams:
                table[1 + 2 * stream], table[2 + 2 * stream] = at, read
        self._exchange(table)
        count, *numbers = table.tolist()
        after = Cursor(cursor.epoch, cursor.consumed + count, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        ids = tuple(each for part in mine for each in part.ids)
        return Window(ids=ids, count=count, before=cursor, after=after, epoch_size=None)


def as_it_is(part: Any) -> Any:
    """Return a part, whose samples are collated already."""
    return part
