"""The loader of data in shards.

How many samples the streams still have is known when they are read. So the ranks tell each other what each stream gives to
a window, and where it stands then: one exchange of a few numbers a step. With it every rank knows the whole position,
and any of them can go on with any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import Batching, ElasticLoader, require_foreign
from azureml_elastic.train.data.position import LoaderState, MicroBatch, Position, Window
from azureml_elastic.train.data.sampling import Cursor, share, weight
from azureml_elastic.train.data.shard_streams import Part, ShardedDataset, ShardSpec, ShardStreamReader

__all__ = ["ShardLoader"]


class ShardLoader(ElasticLoader):
    """Yields batches of a data set in shards.

    Args:
        dataset: in shards.
        spec: what must stay the same over restarts.
        batching: how windows become micro-batches.
        stream: its place in the run.
        position: of the run.
        device: to which the tensors of a batch are moved.
        exchange: adds up a vector over all ranks, in place; a collective.
        kind: ``torch.utils.data.DataLoader``, or a class of the same arguments.
        options: further arguments of it.

    Raises:
        UsageError: an option is one that the loader sets itself.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        spec: ShardSpec,
        batching: Batching,
        *,
        stream: LoaderState,
        position: Position,
        device: torch.device,
        exchange: Callable[[torch.Tensor], None],
        kind: type[DataLoader[Any]] = DataLoader,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(spec, stream, position, device)
        require_foreign(options)
        if options.get("persistent_workers"):
            raise UsageError(
                "persistent_workers=True keeps processes that would read the last epoch's streams; drop it."
            )
        self._dataset = dataset
        self._batching = batching
        self._exchange = exchange
        self._kind = kind
        self._collate = options.get("collate_fn") or default_collate
        self._options = {key: value for key, value in options.items() if key != "collate_fn"}

    def batches(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield micro-batches with what was read for them.

        Raises:
            UsageError: there are more ranks than streams.
        """
        position, spec = self._position, self.spec
        generation, world_size = position.generation, position.identity.world_size
        cursor = self._stream.cursor
        if world_size > spec.streams:
            raise UsageError(
                f"The {spec.shards} shards and global_batch_size={spec.global_batch_size} make {spec.streams} streams, "
                f"fewer than the {world_size} ranks, so that some would have nothing to read. Write more shards."
            )
        size = self._batching.window_size(spec.global_batch_size, world_size)
        groups = self._groups(world_size, position.identity.rank)
        reader = ShardStreamReader(
            self._dataset, spec, cursor, groups, size, self._collate, is_seeded=self._batching.exact
        )
        ours_too = {"pin_memory": self._device.type == "cuda", "generator": self._generator}
        parts = iter(self._kind(reader, batch_size=None, collate_fn=as_it_is, **{**ours_too, **self._options}))
        while True:
            mine = [part for part in islice(parts, len(groups)) if part.streams]
            window = self._agree(mine, cursor)
            if position.generation != generation:
                return
            if not window.count or (spec.drop_last and window.count < size):
                position.when_ended(self._stream, cursor)
                if not position.in_epochs:
                    self._stream.cursor = Cursor(cursor.epoch + 1)
                return
            filled = [part for part in mine if part.ids] or [Part(reader.stand_in())]
            for index, part in enumerate(filled):
                own = len(part.ids)
                share_of_it = weight(own, window.count, world_size)
                yield MicroBatch(window, own, share_of_it, index, index == len(filled) - 1, part.place), part.batch
            cursor = window.after

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
    """Return what is collated already."""
    return part
