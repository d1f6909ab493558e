"""A part of a flat tensor, as ``torch.distributed.checkpoint`` wants to see it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import Self

__all__ = ["Fragment"]


class Fragment(torch.Tensor):
    """A tensor of one dimension, of which this rank holds some consecutive elements, maybe none.

    It has the size of the whole and no memory of its own; nothing can be computed with it.

    Args:
        held: the elements, a view of one dimension of the live memory.
        start: where they are in the whole.
        total: elements of the whole.
    """

    held: torch.Tensor
    start: int

    def __new__(cls, held: torch.Tensor, start: int, total: int) -> Self:
        """Make one."""
        whole: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, (total,), dtype=held.dtype, device=held.device
        )
        whole.held, whole.start = held, start
        return whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the box that is here: torch's protocol for reading and for writing."""
        if not self.held.numel() and self.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.held.numel()]))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what is to be written: torch's protocol for writing."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([self.numel()])),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        """Return the elements that are here: torch's protocol for both."""
        return self.held

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        """Refuse to compute."""
        raise TypeError(f"{operation} on a Fragment, of which most elements are elsewhere")
