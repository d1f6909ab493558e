"""The manifest of a checkpoint, written after all other files, with checksums of them and of itself.

A checkpoint is a folder that is written once, under a name that no other attempt uses. Its ``manifest.json`` has size
and xxh3 checksum of every file, the state without the tensors, and its own digest. A folder without a manifest of the
right digest is no checkpoint.

Retention: the newest checkpoints of the run's lineage are kept, and some for good.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import xxhash

from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import CheckpointDamaged

MANIFEST = "manifest.json"

COMMITTED = "committed"
"""Commit marker: an empty file in the folder of a committed checkpoint."""

DAMAGED = "damaged"
"""Damage marker: a file with the problems of a checkpoint that could not be restored."""

HANDED_OVER = "handed-over"
"""Marker in the folder of a checkpoint that an agent made, when it ended, of a state that it held in memory."""

FLAT = "$flat"
"""Key in the state: the name of a tensor that is stored flat, and its shape."""

_SCHEMA = 2
_NAME = re.compile(r"step-(\d{12})\.round-(\d{6})\.([0-9a-f]{8})(\.kept)?")


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint.

    Args:
        step: optimizer steps completed.
        round: number of the round that wrote it.
        parent: previous committed checkpoint, ``None`` for the first.
        files: size and checksum of each file, by name.
        state: tracked state without the tensors, see :mod:`azureml_elastic.checkpoint.state.tree`.
        data: position in the data, ``None`` without a loader.
        torch: version of torch that wrote it.
        classes: class of each tracked optimizer and learning rate scheduler, by name.
    """

    directory: str
    step: int
    round: int
    world_size: int
    parent: Reference | None
    files: Mapping[str, FileSum]
    state: Mapping[str, Any]
    data: Mapping[str, Any] | None
    torch: str
    classes: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The checksum of the manifest."""
        return xxhash.xxh3_128_hexdigest(self._body())

    @property
    def reference(self) -> Reference:
        """The reference to this checkpoint."""
        return Reference(self.directory, self.step, self.digest)

    def _body(self) -> bytes:
        document = {each.name: getattr(self, each.name) for each in fields(self)}
        document["parent"] = None if self.parent is None else self.parent.to_json()
        document["files"] = {name: [sums.size, sums.xxh3] for name, sums in self.files.items()}
        return json.dumps({"schema": _SCHEMA, **document}, allow_nan=False).encode()

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return b'{"digest": "%s", "body": %s}\n' % (self.digest.encode(), self._body())

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Parse the content of a file, whose location is for error messages.

        Raises:
            CheckpointDamaged: the content is torn, changed, or of an unknown schema.
        """
        try:
            body = json.loads(content)["body"]
            if body.pop("schema") != _SCHEMA:
                raise CheckpointDamaged(f"The manifest {where} has a schema that this release does not support.")
            parent = body.pop("parent")
            files = {name: FileSum(int(size), str(xxh3)) for name, (size, xxh3) in body.pop("files").items()}
            manifest = cls(parent=None if parent is None else Reference.from_json(parent), files=files, **body)
            # The bytes as a whole, not only the digest of what was parsed: that would miss what the parser ignores.
            if manifest.to_bytes() != content:
                raise CheckpointDamaged(f"The manifest {where} is not what was written: its digest does not match.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"The manifest {where} is torn: {error!r}") from error
        return manifest

    @classmethod
    def read(cls, storage: Storage, directory: str) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointDamaged: it is missing or damaged.
        """
        where = f"{storage}/{directory}/{MANIFEST}"
        try:
            content = storage.read(directory, MANIFEST)
        except OSError as error:
            raise CheckpointDamaged(f"The manifest {where} cannot be read: {error}") from error
        manifest = cls.from_bytes(content, where)
        if manifest.directory != directory:
            raise CheckpointDamaged(f"The manifest {where} belongs to {manifest.directory!r}.")
        return manifest


@dataclass(frozen=True)
class FolderName:
    """Name of a checkpoint's folder, which sorts by step.

    It has a nonce of 8 hexadecimal digits, new for each attempt, and is marked where the checkpoint is kept for good.
    """

    step: int
    round: int
    nonce: str
    kept: bool = False

    def __str__(self) -> str:
        return f"step-{self.step:012d}.round-{self.round:06d}.{self.nonce}{'.kept' if self.kept else ''}"

    @classmethod
    def parse(cls, folder: str) -> FolderName | None:
        """Parse a folder's name; return ``None`` where it is not that of a checkpoint."""
        match = _NAME.fullmatch(folder)
        return match and cls(int(match[1]), int(match[2]), match[3], match[4] is not None)


def lineage(storage: Storage, newest: Manifest) -> list[Manifest]:
    """Return a checkpoint and its ancestors, as far as their manifests can be read."""
    found = [newest]
    while (parent := found[-1].parent) is not None:
        try:
            found.append(Manifest.read(storage, parent.directory))
        except CheckpointDamaged:
            break
    return found


def retire(storage: Storage, newest: Manifest, keep: int, *, all_runs: bool = False) -> list[str]:
    """Remove old checkpoints and incomplete attempts, the manifest of each first, and return their folders.

    Not removed are ``keep`` checkpoints of the lineage of the newest committed one, those that are kept for good, the
    newest damaged one, for examination, folders of newer rounds, where another process may be writing, and whole
    committed checkpoints that do not belong to the lineage: this run has neither written nor restored them.

    With ``all_runs`` committed checkpoints outside of the lineage are removed, too.

    Raises:
        OSError: a folder could not be removed.
    """
    line = [manifest.directory for manifest in lineage(storage, newest)]
    kept, own = set(line[:keep]), set(line[keep:])
    names = [(folder, FolderName.parse(folder)) for folder in storage.folders() if folder not in kept]
    old = [folder for folder, name in names if name is not None and name.round <= newest.round and not name.kept]
    files = {folder: storage.files(folder) for folder in old}
    # Folders sort by step, so that the last damaged one is the newest.
    quarantined = [folder for folder in old if DAMAGED in files[folder]]
    foreign = {folder for folder in old if COMMITTED in files[folder] and DAMAGED not in files[folder]} - own
    spared = {*quarantined[-1:], *(() if all_runs else foreign)}
    removed = [folder for folder in old if folder not in spared]
    for folder in removed:
        # Its manifest first: what is left where this breaks off was never completed, rather than damaged.
        storage.remove(folder, MANIFEST)
    return removed


def for_good(step: int, before: int | None, keep_every_steps: int | None) -> bool:
    """Return whether a checkpoint of this step, after one of step ``before``, is kept for good.

    The first one in each ``keep_every_steps`` steps is.
    """
    return keep_every_steps is not None and step // keep_every_steps > (before or 0) // keep_every_steps
