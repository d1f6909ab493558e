"""What is in a folder of checkpoints, looked at from outside of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.checkpoint.format.manifest import COMMITTED, FLAT, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.format.retention import retire
from azureml_elastic.checkpoint.format.shard_file import HEADER_LENGTH_BYTES, Entry, Layout, header_length, read_header
from azureml_elastic.checkpoint.format.write_plan import Chunk
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import CheckpointDamaged, UsageError

__all__ = ["FoundCheckpoint", "entries", "export", "newest_whole", "prune", "survey", "verify"]

_THREADS = 4


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that bears a checkpoint's name.

    Args:
        name: of the folder, taken apart.
        manifest: of the checkpoint, ``None`` where it cannot be read.
        committed: whether it bears the mark of a commit.
        nbytes: of all its files.
        problem: why there is no manifest, or which files are missing or have another size.
    """

    name: FolderName
    manifest: Manifest | None
    committed: bool
    nbytes: int
    problem: str | None

    @property
    def directory(self) -> str:
        """The folder."""
        return str(self.name)


def survey(storage: Storage) -> list[FoundCheckpoint]:
    """Return all checkpoints and what is left of attempts, by step; only sizes are checked."""
    found = []
    for folder in storage.folders():
        name = FolderName.parse(folder)
        if name is None:
            continue
        files = storage.files(folder)
        manifest: Manifest | None = None
        problem: str | None = None
        try:
            manifest = Manifest.read(storage, folder)
            wrong = [file for file, sums in manifest.files.items() if files.get(file) != sums.size]
            problem = f"missing or of another size: {', '.join(sorted(wrong))}" if wrong else None
        except CheckpointDamaged as error:
            problem = str(error) if MANIFEST in files else "no manifest: it was never completed"
        found.append(FoundCheckpoint(name, manifest, COMMITTED in files, sum(files.values()), problem))
    return found


def verify(storage: Storage, manifest: Manifest) -> list[str]:
    """Read every file of a checkpoint and return what is wrong with them; nothing where all is as it was written."""
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = pool.map(lambda item: storage.problem(manifest.directory, *item), manifest.files.items())
        return [problem for problem in problems if problem is not None]


def newest_whole(storage: Storage) -> Manifest | None:
    """Return the committed checkpoint of the highest step that is whole, each byte of it read."""
    for found in reversed(survey(storage)):
        manifest = found.manifest if found.committed and found.problem is None else None
        if manifest is not None and not verify(storage, manifest):
            return manifest
    return None


def prune(storage: Storage, keep: int) -> list[str]:
    """Remove all but the newest whole checkpoints; not while a run writes here.

    Args:
        storage: of the checkpoints.
        keep: how many stay, besides those that are kept for good.

    Returns:
        The names of the folders that were removed.

    Raises:
        UsageError: no checkpoint is whole: nothing was removed.
    """
    newest = newest_whole(storage)
    if newest is None:
        raise UsageError(f"No checkpoint in {storage} is committed and whole, so nothing was removed.")
    return retire(storage, newest, keep)


def entries(storage: Storage, manifest: Manifest, name: str) -> list[Entry]:
    """Return what a file of a checkpoint holds.

    Raises:
        CheckpointDamaged: its header is not what this library writes.
        OSError: it cannot be read.
    """
    where = f"{storage}/{manifest.directory}/{name}"
    with storage.reading(manifest.directory, name) as read:
        first = bytearray(HEADER_LENGTH_BYTES)
        read(0, memoryview(first))
        text = bytearray(header_length(bytes(first), where))
        read(HEADER_LENGTH_BYTES, memoryview(text))
    return read_header(bytes(text), where)


def export(storage: Storage, manifest: Manifest, prefix: str, target: Path) -> int:
    """Write one safetensors file with the tensors of one tracked object, each of them whole.

    Args:
        storage: of the checkpoints.
        manifest: of the checkpoint; verify it before.
        prefix: the name under which the object was tracked, or with a part of it, such as ``engine/parameters``; the
            tensors' names in the file are without it.
        target: the file to write; must not be there.

    Returns:
        How many tensors were written.

    Raises:
        UsageError: the checkpoint holds no such tensors.
        OSError: a file cannot be read or written.
    """
    import numpy as np

    parts = [(file, entry) for file in sorted(manifest.files) for entry in entries(storage, manifest, file)]
    parts = [(file, entry) for file, entry in parts if entry.chunk.name.startswith(f"{prefix}/")]
    if not parts:
        raise UsageError(
            f"The checkpoint {manifest.directory} holds no tensors of {prefix!r}; it has {', '.join(manifest.state)}."
        )
    flat = dict(_flat(manifest.state))
    layout = Layout.of(_wholes((entry.chunk for _, entry in parts), prefix, flat))
    places = {entry.chunk.name: entry for entry in layout.entries}
    with target.open("xb") as stream:
        stream.write(layout.header)
        stream.truncate(layout.nbytes)
    for file, entry in parts:
        chunk, place = entry.chunk, places[entry.chunk.name.removeprefix(f"{prefix}/")]
        if chunk.nbytes == 0:
            continue
        content = bytearray(chunk.nbytes)
        with storage.reading(manifest.directory, file) as read:
            read(entry.begin, memoryview(content))
        source = np.frombuffer(content, np.uint8).reshape(*chunk.sizes, chunk.itemsize)
        whole = np.memmap(target, np.uint8, "r+", place.begin, (*chunk.shape, chunk.itemsize))  # as it is stored
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = source
        whole.flush()
    return len(places)


def _wholes(chunks: Iterable[Chunk], prefix: str, flat: Mapping[str, tuple[int, ...]]) -> list[Chunk]:
    found = {}
    for chunk in chunks:
        name, shape = chunk.name.removeprefix(f"{prefix}/"), flat.get(chunk.name, chunk.shape)
        found[name] = Chunk(name, (0,) * len(shape), shape, shape, chunk.dtype, chunk.itemsize)
    return list(found.values())


def _flat(state: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are stored in one dimension, with the sizes that they have."""
    if isinstance(state, Mapping):
        if FLAT in state:
            name, sizes = state[FLAT]
            yield name, tuple(sizes)
        else:
            for each in state.values():
                yield from _flat(each)
