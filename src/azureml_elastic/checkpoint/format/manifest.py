"""The manifest: what a checkpoint consists of, written last, with a checksum for everything.

A checkpoint is a folder that is written once, under a name that no other attempt ever uses. Its ``manifest.json`` names
every file with size and xxh3 checksum, holds the state that is no tensor, and carries its own digest. A folder without
a manifest of the right digest is no checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import xxhash

from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["COMMITTED", "DAMAGED", "FLAT", "MANIFEST", "FolderName", "Manifest", "Reference"]

MANIFEST = "manifest.json"

COMMITTED = "committed"
"""The empty file that marks a checkpoint's folder once it has been committed."""

DAMAGED = "damaged"
"""The file that says what was wrong with a checkpoint when it was to be restored."""

FLAT = "$flat"
"""In the state: the name of a tensor that is stored in one dimension, and the sizes that it has."""

_SCHEMA = 2
_NAME = re.compile(r"step-(\d{12})\.round-(\d{6})\.([0-9a-f]{8})(\.kept)?")


@dataclass(frozen=True)
class Reference:
    """Names one checkpoint exactly.

    Args:
        directory: its folder's name within the checkpoint folder.
        step: optimizer steps that it holds.
        digest: of its manifest.
    """

    directory: str
    step: int
    digest: str

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Reference:
        """Read the three fields; others are ignored."""
        return cls(str(document["directory"]), int(document["step"]), str(document["digest"]))

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        directory: the folder's name.
        step: optimizer steps completed.
        round: that wrote it.
        world_size: of that round.
        parent: the committed checkpoint before this one, if any.
        files: by name within the folder.
        state: of all that is tracked, without the tensors; see :mod:`azureml_elastic.checkpoint.state.tree`.
        data: the position in the data, or ``None`` without a loader.
        torch: the version that wrote it.
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

    @property
    def digest(self) -> str:
        """The checksum over all of it."""
        return xxhash.xxh3_128_hexdigest(self._body())

    @property
    def reference(self) -> Reference:
        """What a pointer to this checkpoint holds."""
        return Reference(self.directory, self.step, self.digest)

    def _body(self) -> bytes:
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        document["parent"] = None if self.parent is None else self.parent.to_json()
        document["files"] = {name: [sums.size, sums.xxh3] for name, sums in self.files.items()}
        return json.dumps({"schema": _SCHEMA, **document}, allow_nan=False).encode()

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return b'{"digest": "%s", "body": %s}\n' % (self.digest.encode(), self._body())

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            content: of the file.
            where: it was read, for the message.

        Raises:
            CheckpointDamaged: it is torn, changed, or of an unknown schema.
        """
        try:
            body = json.loads(content)["body"]
            if body.pop("schema") != _SCHEMA:
                raise CheckpointDamaged(f"The manifest {where} is of a schema that this release does not know.")
            parent = body.pop("parent")
            files = {name: FileSum(int(size), str(xxh3)) for name, (size, xxh3) in body.pop("files").items()}
            manifest = cls(parent=None if parent is None else Reference.from_json(parent), files=files, **body)
            if manifest.to_bytes() != content:
                raise CheckpointDamaged(f"The manifest {where} is not what was written: its digest does not match.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"The manifest {where} is torn: {error!r}") from error
        return manifest

    @classmethod
    def read(cls, storage: Storage, directory: str) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointDamaged: there is none, or not as it was written.
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
    """The name of a checkpoint's folder; names sort by step.

    Args:
        step: optimizer steps completed.
        round: that writes it.
        nonce: 8 hexadecimal digits, fresh for each attempt.
        kept: whether it is kept for good.
    """

    step: int
    round: int
    nonce: str
    kept: bool = False

    def __str__(self) -> str:
        """Return the name."""
        return f"step-{self.step:012d}.round-{self.round:06d}.{self.nonce}{'.kept' if self.kept else ''}"

    @classmethod
    def parse(cls, folder: str) -> FolderName | None:
        """Read a folder's name, ``None`` where it is no such name."""
        match = _NAME.fullmatch(folder)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3], match[4] is not None)
