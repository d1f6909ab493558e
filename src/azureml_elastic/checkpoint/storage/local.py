"""Checkpoints in a folder of a local disk or a mount.

Checkpoints do not depend on renaming, locking or file times, in which a blob mount differs from a disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from typing_extensions import override

from azureml_elastic.checkpoint.storage.early_writing import begin_writing
from azureml_elastic.checkpoint.storage.local_errors import OUT_OF_SPACE, unusable
from azureml_elastic.checkpoint.storage.storage import BLOCK_BYTES, Storage

__all__ = ["LocalStorage"]


class LocalStorage(Storage):
    """A folder of a file system, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    @override
    def prepare(self) -> None:
        probe = self.root / f".write-test-{uuid.uuid4().hex}"
        try:
            self.make("")
            try:
                os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except OSError as error:
                if error.errno not in OUT_OF_SPACE:  # space may be available again when the first checkpoint is due
                    raise
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise unusable(self.root, error) from error
        with contextlib.suppress(OSError):  # storage that permits no removal is usable
            probe.unlink(missing_ok=True)

    @override
    def make(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    @override
    @contextlib.contextmanager
    def writing(self, folder: str, name: str) -> Iterator[Callable[[memoryview], None]]:
        path = self.root / folder / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

        written = 0

        def write(block: memoryview) -> None:
            nonlocal written
            done = 0
            while done < len(block):
                done += os.write(descriptor, block[done:])
            begin_writing(descriptor, written, done)
            written += done

        try:
            try:
                yield write
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _fsync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    @override
    def publish(self, folder: str, name: str, content: bytes) -> None:
        super().publish(folder, name, content)
        _fsync_directory(self.root)

    @override
    def replace(self, name: str, content: bytes) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / name
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _fsync_directory(path.parent)

    @override
    def read(self, folder: str, name: str) -> bytes:
        return (self.root / folder / name).read_bytes()

    @override
    @contextlib.contextmanager
    def reading(self, folder: str, name: str) -> Iterator[Callable[[int, memoryview], None]]:
        descriptor = os.open(self.root / folder / name, os.O_RDONLY | os.O_CLOEXEC)

        def fill(begin: int, memory: memoryview) -> None:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done : done + BLOCK_BYTES]], begin + done)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends at byte {begin + done}", name)
                done += count

        try:
            yield fill
        finally:
            os.close(descriptor)

    @override
    def size(self, folder: str, name: str) -> int | None:
        try:
            return (self.root / folder / name).stat().st_size
        except OSError:
            return None

    @override
    def folders(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    @override
    def files(self, folder: str) -> dict[str, int]:
        try:
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()}
        except FileNotFoundError:
            return {}

    @override
    def remove(self, folder: str, first: str) -> None:
        (self.root / folder / first).unlink(missing_ok=True)
        shutil.rmtree(self.root / folder, ignore_errors=True)


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
