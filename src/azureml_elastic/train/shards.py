"""Tensors to and from a folder, through ``torch.distributed.checkpoint``.

Replicated tensors are written once, spread over the ranks; sharded ones (DTensor, as FSDP2 has) by their owners, and
are resharded when they are read at another world size. Only tensors pass through here. Reading never unpickles
anything but the plain records of the library's own index file, by an explicit list of their classes.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from azureml_elastic.errors import CheckpointDamaged, CheckpointError

__all__ = ["load", "owned_files", "save"]

_INDEX = ".metadata"


def save(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Write the tensors of all ranks. A collective on ``group``; a failure of one rank is raised on all.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        dcp_save(
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        raise CheckpointError(f"Writing the checkpoint {folder} failed: {_first_line(error)}") from error


def load(folder: Path, present: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint. A collective on ``group``; a failure of one rank is raised on all.

    Args:
        folder: of the checkpoint.
        present: tensors to read into, by name; a checkpoint's tensor that is not among them, or has another shape
            there, is read into new CPU memory.
        group: of the ranks.

    Raises:
        CheckpointError: a rank could not read.
    """
    reader = _Reader(folder)
    index = reader.read_metadata()
    targets: dict[str, Any] = {}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointDamaged(f"{folder / _INDEX} names {name!r}, which is no tensor.")
        target = present.get(name)
        if target is None or target.size() != entry.size or target.dtype != entry.properties.dtype:
            target = torch.empty(entry.size, dtype=entry.properties.dtype)
        targets[name] = target
    try:
        dcp_load(targets, storage_reader=reader, planner=_TensorsOnly(flatten_state_dict=False), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"Reading the checkpoint {folder} failed: {_first_line(error)}") from error
    return targets


def owned_files(folder: Path, rank: int) -> list[Path]:
    """Return the files of a checkpoint that a rank wrote; rank 0 owns the index as well."""
    files = sorted(folder.glob(f"__{rank}_*"))
    return [*files, folder / _INDEX] if rank == 0 else files


def _first_line(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())


class _TensorsOnly(DefaultLoadPlanner):
    """Refuses what would have to be unpickled."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        del value
        raise CheckpointDamaged(f"The checkpoint holds {read_item.dest_index.fqn!r}, which is no tensor.")


class _Reader(FileSystemReader):
    """Reads the index with an unpickler that knows its classes only."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (Path(self.path) / _INDEX).open("rb") as stream:
            metadata = cast("Metadata", _IndexUnpickler(stream).load())
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _CLASSES: ClassVar[Mapping[str, frozenset[str]]] = {
        "torch.distributed.checkpoint.metadata": frozenset(
            {
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            }
        ),
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
        "torch.serialization": frozenset({"_get_layout"}),
        "pathlib": frozenset({"Path", "PosixPath"}),
        "pathlib._local": frozenset({"Path", "PosixPath"}),
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in self._CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointDamaged(
            f"The index of the checkpoint names {module}.{name}, which no checkpoint of this library holds. "
            f"Process {os.getpid()} has not loaded it."
        )
