"""The manifest: what a checkpoint consists of, written last, with a checksum for everything.

A checkpoint is a folder that is written once, under a name that no other attempt ever uses. Its ``manifest.json`` names
every file with size and xxh3 checksum, holds the state that is no tensor, and carries its own digest. A folder without
a manifest of the right digest is no checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from azureml_elastic.errors import CheckpointDamaged

__all__ = [
    "MANIFEST",
    "FileSum",
    "Manifest",
    "Reference",
    "checksum",
    "directory_name",
    "fsync_directory",
    "replace_durably",
    "round_of",
    "verify_file",
    "write_new",
]

MANIFEST = "manifest.json"
_SCHEMA = 1
_NAME = re.compile(r"step-(\d{12})\.round-(\d{6})\.[0-9a-f]{8}")
_CHUNK = 1 << 22


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
class FileSum:
    """Size in bytes and xxh3_128 checksum of one file."""

    size: int
    xxh3: str


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
        state: of all that is tracked, without the tensors; see :mod:`azureml_elastic.train.tree`.
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
    def read(cls, folder: Path, directory: str) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointDamaged: there is none, or not as it was written.
        """
        path = folder / directory / MANIFEST
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointDamaged(f"The manifest {path} cannot be read: {error}") from error
        manifest = cls.from_bytes(content, str(path))
        if manifest.directory != directory:
            raise CheckpointDamaged(f"The manifest {path} belongs to {manifest.directory!r}.")
        return manifest


def directory_name(step: int, round_number: int, nonce: str) -> str:
    """Return the name of a checkpoint's folder; names sort by step.

    Args:
        step: optimizer steps completed.
        round_number: that writes it.
        nonce: 8 hexadecimal digits, fresh for each attempt.
    """
    return f"step-{step:012d}.round-{round_number:06d}.{nonce}"


def round_of(directory: str) -> int | None:
    """Return the round in a checkpoint folder's name, ``None`` where it is no such name."""
    match = _NAME.fullmatch(directory)
    return None if match is None else int(match[2])


def checksum(path: Path) -> FileSum:
    """Read a file and return its size and checksum.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileSum(size, digest.hexdigest())


def verify_file(path: Path, expected: FileSum) -> str | None:
    """Return what is wrong with a file, ``None`` where nothing is."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path} has {size} bytes instead of {expected.size}"
        if checksum(path).xxh3 != expected.xxh3:
            return f"{path} has another checksum than when it was written"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, durably. Readers must check it: a crash may leave a part of it."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    fsync_directory(path.parent)


def replace_durably(path: Path, content: bytes) -> None:
    """Replace a file on a local disk, by one writer: readers see the old or the new content, even after a power cut."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable, where the file system knows how to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)
