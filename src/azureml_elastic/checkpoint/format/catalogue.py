"""Listing, verifying, pruning and exporting a folder of checkpoints outside of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.checkpoint.format.manifest import (
    COMMITTED,
    DAMAGED,
    FLAT,
    HANDED_OVER,
    MANIFEST,
    FolderName,
    Manifest,
    retire,
)
from azureml_elastic.checkpoint.format.shard_file import Chunk, Entry, Layout, read_header
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointDamaged, UsageError

_THREADS = 4


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with the name of a checkpoint.

    Args:
        name: parsed name of the folder.
        manifest: manifest of the checkpoint, ``None`` where it cannot be read.
        committed: whether the folder has a commit marker.
        nbytes: total size of its files.
        problem: reason for a missing manifest, or the files missing or of another size; ``None`` if complete.
    """

    name: FolderName
    manifest: Manifest | None
    committed: bool
    nbytes: int
    problem: str | None


def survey(storage: Storage) -> list[FoundCheckpoint]:
    """Return all checkpoints and incomplete attempts by step; of the files only sizes are checked."""
    found = []
    for folder in storage.folders():
        name = FolderName.parse(folder)
        if name is None:
            continue
        files = storage.files(folder)
        try:
            manifest = Manifest.read(storage, folder)
            wrong = [file for file, sums in manifest.files.items() if files.get(file) != sums.size]
            problem = f"missing or of another size: {', '.join(sorted(wrong))}" if wrong else None
        except CheckpointDamaged as error:
            manifest = None
            problem = str(error) if MANIFEST in files else "no manifest: it was never completed"
        found.append(FoundCheckpoint(name, manifest, COMMITTED in files, sum(files.values()), problem))
    return found


def verify(storage: Storage, manifest: Manifest) -> list[str]:
    """Read every file of a checkpoint and return how they differ from the manifest; empty where they do not."""
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = pool.map(lambda item: storage.problem(manifest.directory, *item), manifest.files.items())
        return [problem for problem in problems if problem is not None]


def newest_whole(storage: Storage) -> Manifest | None:
    """Return the undamaged committed checkpoint of the highest step; reads every byte of it."""
    for found in reversed(survey(storage)):
        manifest = found.manifest if found.committed and found.problem is None else None
        if manifest is not None and not verify(storage, manifest):
            return manifest
    return None


def handed_over(storage: Storage, after: int) -> Iterator[Manifest]:
    """Yield the checkpoints that agents made of states in their memory, those of the highest steps first.

    Only those of a step after ``after``. Only sizes are checked, as by :func:`find_newest`.
    """
    for folder in reversed(storage.folders()):
        name = FolderName.parse(folder)
        if name is None or name.step <= after:
            continue
        files = storage.files(folder)
        if HANDED_OVER in files and DAMAGED not in files:
            with contextlib.suppress(CheckpointDamaged):  # its agent was killed before the manifest was written
                manifest = Manifest.read(storage, folder)
                if all(files.get(file) == sums.size for file, sums in manifest.files.items()):
                    yield manifest


def furthest(storage: Storage, committed: Reference | None) -> Reference | None:
    """Return the handed-over checkpoint that is furthest beyond the committed one, or that one where there is none."""
    manifest = next(handed_over(storage, -1 if committed is None else committed.step), None)
    return committed if manifest is None else manifest.reference


def find_newest(storage: Storage) -> Reference | None:
    """Return the newest complete checkpoint of a folder without a pointer, a committed one if there is any.

    Only sizes are checked; a restore verifies the checksums, and falls back to older checkpoints.
    """
    complete = [found for found in survey(storage) if found.manifest is not None and found.problem is None]
    # The round before the step: a newer round may have gone back to an earlier step, and trained on from there.
    newest = max(complete, key=lambda found: (found.committed, found.name.round, found.name.step), default=None)
    return None if newest is None or newest.manifest is None else newest.manifest.reference


def newest_committed(storage: Storage) -> Reference | None:
    """Return the complete checkpoint that was committed last, by the commit markers of a folder without a pointer.

    Only sizes are checked, as by :func:`find_newest`.
    """
    newest = find_newest(storage)
    return newest if newest is not None and COMMITTED in storage.files(newest.directory) else None


def prune(storage: Storage, keep: int) -> list[str]:
    """Remove all but ``keep`` of the newest undamaged checkpoints and those kept for good; return the removed folders.

    Not to be called while a run writes to the storage.

    Raises:
        UsageError: every checkpoint is damaged, and nothing was removed.
    """
    newest = newest_whole(storage)
    if newest is None:
        raise UsageError(f"No checkpoint in {storage} is committed and undamaged, so nothing was removed.")
    return retire(storage, newest, keep, all_runs=True)


def entries(storage: Storage, manifest: Manifest, name: str) -> list[Entry]:
    """Return the entries of a file of a checkpoint.

    Raises:
        CheckpointDamaged: the header of the file is damaged.
        OSError: the file cannot be read.
    """
    with storage.reading(manifest.directory, name) as fill:
        return read_header(fill, f"{storage}/{manifest.directory}/{name}")[0]


def export(storage: Storage, manifest: Manifest, prefix: str, target: Path) -> int:
    """Write a new safetensors file with the whole tensors of a tracked object, and return their number.

    The prefix is the name of the object, or of a part of it such as ``engine/parameters``; it is removed from the names
    of the tensors. The checkpoint was verified by the caller.

    Raises:
        UsageError: the checkpoint holds no such tensors.
        OSError: a file cannot be read or written.
    """
    import numpy as np

    stored = [(file, entry) for file in sorted(manifest.files) for entry in entries(storage, manifest, file)]
    parts = [(file, entry) for file, entry in stored if entry.chunk.name.startswith(f"{prefix}/")]
    if not parts:
        raise UsageError(
            f"The checkpoint {manifest.directory} holds no tensors of {prefix!r}; it has {', '.join(manifest.state)}."
        )
    shapes = dict(_stored_flat(manifest.state))
    whole: dict[str, Chunk] = {}
    for _, entry in parts:
        chunk = entry.chunk
        name, shape = chunk.name.removeprefix(f"{prefix}/"), shapes.get(chunk.name, chunk.shape)
        whole[chunk.name] = Chunk.of_whole(name, shape, chunk.dtype, chunk.itemsize)
    layout = Layout.of(whole.values())
    begins = {entry.chunk.name: entry.begin for entry in layout.entries}
    # Parts are copied into the mapped file one by one, so that memory is needed for one of them alone.
    with target.open("xb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    for file, entry in parts:
        chunk = entry.chunk
        if chunk.nbytes == 0:
            continue
        content = bytearray(chunk.nbytes)
        with storage.reading(manifest.directory, file) as fill:
            fill(entry.begin, memoryview(content))
        source = np.frombuffer(content, np.uint8).reshape(*chunk.sizes, chunk.itemsize)
        begin = begins[whole[chunk.name].name]
        tensor = np.memmap(target, np.uint8, "r+", begin, (*chunk.shape, chunk.itemsize))  # with the stored shape
        tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = source
        tensor.flush()
    return len(whole)


def _stored_flat(state: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of tensors that are stored flat, and their shapes."""
    if isinstance(state, Mapping):
        if FLAT in state:
            name, sizes = state[FLAT]
            yield name, tuple(sizes)
        else:
            for each in state.values():
                yield from _stored_flat(each)
