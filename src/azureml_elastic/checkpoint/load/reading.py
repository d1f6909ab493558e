"""Reading the tensors of a checkpoint, at any world size and sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from azureml_elastic.checkpoint.format.catalogue import entries
from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.format.shard_file import Chunk, Entry
from azureml_elastic.checkpoint.state.compatibility import TensorKind
from azureml_elastic.checkpoint.state.layout import Read, incomplete, memory_of, reads
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, UsageError

_THREADS = 4


def load(
    storage: Storage,
    manifest: Manifest,
    present: Mapping[str, torch.Tensor],
    control: ControlGroup,
    wanted: Callable[[str], bool] = lambda _: True,
    check: Callable[[Mapping[str, TensorKind]], UsageError | None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Read the wanted tensors of a checkpoint, by name. A collective; a failure of one rank is raised on all.

    They are read into those that are present; one that is missing or has another shape or type is read into new CPU
    memory.

    Args:
        present: tensors to read into: whole ones, or DTensors, of which each rank reads its part.
        wanted: whether this rank needs a tensor, by its name.
        check: why the checkpoint, with these tensors, does not fit; called before anything is read.

    Raises:
        CheckpointError: a rank could not read.
        UsageError: the checkpoint does not fit a rank.
    """
    where = f"{storage}/{manifest.directory}"
    # Each header is read by one rank, and sent to the others: a file for each rank of the world that wrote them would
    # otherwise be opened by every rank of this one.
    mine = sorted(manifest.files)[control.rank :: control.world_size]
    parts = control.together(
        f"Reading the headers of {where}",
        lambda: [(name, entry) for name in mine for entry in entries(storage, manifest, name)],
    )
    stored = [each for part in parts for each in part]
    chunks = [entry.chunk for _, entry in stored]
    # Before anything is overwritten, and on all ranks: one that goes on alone would wait for the others.
    refusals = control.gather(check({each.name: TensorKind(each.shape, each.dtype) for each in chunks}))
    if (refusal := next((each for each in refusals if each is not None), None)) is not None:
        raise refusal
    targets: dict[str, torch.Tensor] = {}

    def fill() -> None:
        for name, (nbytes, whole) in incomplete(chunks).items():
            raise CheckpointDamaged(f"Of the {whole} bytes of {name!r} the checkpoint holds {nbytes}.")
        targets.update(targets_for((each for each in chunks if wanted(each.name)), present, manifest.step))
        by_file: defaultdict[str, list[Read]] = defaultdict(list)
        for read in reads(targets, chunks):
            by_file[stored[read.source][0]].append(read)
        # By file, which is opened once; an object store serves several at a time.
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read-checkpoint") as pool:
            tasks = [pool.submit(_read, storage, manifest, name, each, stored) for name, each in by_file.items()]
            for task in tasks:
                task.result()

    control.together(f"Reading {where}", fill)
    return targets


def targets_for(chunks: Iterable[Chunk], present: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return tensors of the shape of each chunk's whole to read a state into: those present, or new CPU memory.

    Raises:
        CheckpointError: this process has no memory for them.
    """
    found: dict[str, torch.Tensor] = {}
    chunks = list(chunks)
    try:
        for chunk in chunks:
            if chunk.name not in found:
                found[chunk.name] = _target(present.get(chunk.name), chunk)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"There is no memory for the state of step {step}, {sum(chunk.nbytes for chunk in chunks) >> 20} MiB: "
            f"{error}. Raise the memory limit of the process, or use larger nodes."
        ) from error
    return found


def _target(present: torch.Tensor | None, chunk: Chunk) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype)
    if present is not None and tuple(present.shape) == chunk.shape:
        return present if present.dtype == dtype else torch.empty_like(present, dtype=dtype)
    return torch.empty(chunk.shape, dtype=dtype)


def _read(
    storage: Storage, manifest: Manifest, name: str, wanted: Iterable[Read], stored: list[tuple[str, Entry]]
) -> None:
    with storage.reading(manifest.directory, name) as fill, torch.no_grad():
        for each in wanted:
            _copy(fill, stored[each.source][1], each)


def _copy(fill: Callable[[int, memoryview], None], entry: Entry, read: Read) -> None:
    """Read a part of a chunk; through a copy only where it is scattered in the file or in memory."""
    chunk, target = entry.chunk, read.target
    if target.numel() == 0:
        return
    # Rows of a chunk follow each other in the file, so that a part which is as wide as the chunk is read on its own.
    row = prod(chunk.sizes[1:]) * chunk.itemsize
    together = read.sizes[1:] == chunk.sizes[1:]
    begin = entry.begin + (read.offsets[0] * row if read.sizes and together else 0)
    if together and target.device.type == "cpu" and target.is_contiguous():
        fill(begin, memory_of(target))
        return
    sizes = read.sizes if together else chunk.sizes
    copy = torch.empty(sizes, dtype=target.dtype)
    fill(begin, memory_of(copy))
    if not together:
        for dimension, (offset, size) in enumerate(zip(read.offsets, read.sizes, strict=True)):
            copy = copy.narrow(dimension, offset, size)
    target.copy_(copy)
