"""A part of a flat tensor with the protocol of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import Self

__all__ = ["Fragment"]


class Fragment(torch.Tensor):
    """A one-dimensional tensor of which this rank holds a range of elements, which may be empty.

    It has the size of the whole tensor but no memory of its own, and does not support computations.

    Args:
        held: elements of this rank, a flat view of the live memory.
        start: index of the first of them in the whole tensor.
        total: number of elements of the whole tensor.
    """

    held: torch.Tensor
    start: int

    def __new__(cls, held: torch.Tensor, start: int, total: int) -> Self:  # noqa: D102 - see the class
        whole: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, (total,), dtype=held.dtype, device=held.device
        )
        whole.held, whole.start = held, start
        return whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.held.numel() and self.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.held.numel()]))]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
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
        return self.held

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operation} is not supported on a Fragment, whose other elements are on other ranks")
