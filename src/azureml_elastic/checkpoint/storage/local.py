"""Checkpoints in a folder of a local disk or a mount.

Checkpoints do not depend on renaming, locking or file times, in which a blob mount differs from a disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from azureml_elastic.checkpoint.storage.storage import FileSum, Storage

__all__ = ["LocalStorage"]

_BLOCK = 1 << 23


class LocalStorage(Storage):
    """A folder of a file system.

    Args:
        root: path of the folder; need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        """Return the path."""
        return str(self.root)

    def make(self, folder: str) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    def write(self, folder: str, name: str, blocks: Iterable[bytes | memoryview]) -> FileSum:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        path = self.root / folder / name
        digest = xxhash.xxh3_128()
        size = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for block in blocks:
                    for part in _parts(memoryview(block).cast("B")):
                        digest.update(part)
                        size += _write_all(descriptor, part)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _fsync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return FileSum(size, digest.hexdigest())

    def publish(self, folder: str, name: str, content: bytes) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        self.write(folder, name, [content])
        _fsync_directory(self.root)

    def replace(self, name: str, content: bytes) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / name
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        _fsync_directory(path.parent)

    def read(self, folder: str, name: str) -> bytes:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        return (self.root / folder / name).read_bytes()

    @contextlib.contextmanager
    def reading(self, folder: str, name: str) -> Iterator[Callable[[int, memoryview], None]]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        descriptor = os.open(self.root / folder / name, os.O_RDONLY | os.O_CLOEXEC)

        def fill(begin: int, memory: memoryview) -> None:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done : done + _BLOCK]], begin + done)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends at byte {begin + done}", name)
                done += count

        try:
            yield fill
        finally:
            os.close(descriptor)

    def size(self, folder: str, name: str) -> int | None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        try:
            return (self.root / folder / name).stat().st_size
        except OSError:
            return None

    def problem(self, folder: str, name: str, expected: FileSum) -> str | None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        path = self.root / folder / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                return f"{path} has {size} bytes instead of {expected.size}"
            if self._sum(path) != expected.xxh3:
                return f"{path} has another checksum than when it was written"
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return None

    def folders(self) -> list[str]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        try:
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()}
        except FileNotFoundError:
            return {}

    def remove(self, folder: str, first: str) -> None:
        """See :class:`~azureml_elastic.checkpoint.storage.storage.Storage`."""
        (self.root / folder / first).unlink(missing_ok=True)
        shutil.rmtree(self.root / folder, ignore_errors=True)

    @staticmethod
    def _sum(path: Path) -> str:
        digest = xxhash.xxh3_128()
        block = bytearray(_BLOCK)
        view = memoryview(block)
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                digest.update(view[:count])
        return digest.hexdigest()


def _parts(block: memoryview) -> Iterable[memoryview]:
    for begin in range(0, len(block), _BLOCK):
        yield block[begin : begin + _BLOCK]


def _write_all(descriptor: int, block: memoryview) -> int:
    done = 0
    while done < len(block):
        done += os.write(descriptor, block[done:])
    return done


def _fsync_directory(path: Path) -> None:
    """Make the names in a folder durable, where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)
