"""Checkpoints in a folder of a local disk or a mount.

Checkpoints do not depend on renaming, locking or file times, in which a blob mount differs from a disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from typing_extensions import override

from azureml_elastic.checkpoint.storage.storage import BLOCK_BYTES, Storage
from azureml_elastic.errors import CheckpointError, UsageError

_SYNC_FILE_RANGE_WRITE = 2  # not among Python's names

_LIBC = ctypes.CDLL(None, use_errno=True)

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system that is full, or of a user whose quota is used up."""

_NO_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_IMPOSSIBLE = frozenset({errno.ENOENT, errno.EINVAL, errno.ELOOP})

_ANOTHER = "choose another checkpoint folder"
_SHOWN_CHARACTERS = 200


def begin_writing(descriptor: int, begin: int, nbytes: int) -> None:
    """Have the kernel begin to write a part of a file to the disk, so that a later ``fsync`` waits for the rest alone.

    A hint: where the system or the file system has no such call, nothing happens, and ``fsync`` reports what failed.
    """
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(
            ctypes.c_int(descriptor),
            ctypes.c_int64(begin),
            ctypes.c_int64(nbytes),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )


def fill(descriptor: int, begin: int, memory: memoryview, name: str) -> None:
    """Read a file from an offset on, as much as the memory takes.

    Raises:
        OSError: the file, whose name is for the message, ends too early or cannot be read.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done : done + BLOCK_BYTES]], begin + done)
        if count == 0:
            raise OSError(errno.EIO, f"the content ends at byte {begin + done}", name)
        done += count


def unusable(folder: Path, error: OSError | ValueError) -> UsageError | CheckpointError:
    """Return the error for a folder that could not be created, or in which no file could be created.

    A ``ValueError`` stands for a path that no operating system takes.
    """
    begin = f"The checkpoint folder {_shown(folder)} cannot be used: "
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number in _NO_FOLDER:
        return UsageError(f"{begin}{_shown(_file_in_place(folder))} is not a folder. Remove it, or {_ANOTHER}.")
    if number == errno.ENAMETOOLONG:
        longest = max(len(os.fsencode(part)) for part in folder.parts)
        return UsageError(
            f"{begin}the path has {len(os.fsencode(folder)):,} bytes and its longest name {longest:,}; most file "
            f"systems take 4,095 and 255. Shorten it, or {_ANOTHER}."
        )
    if number in _FORBIDDEN:
        return UsageError(
            f"{begin}the user with id {os.geteuid()} may not create files in {_shown(_nearest(folder))}. Give this "
            f"user write permission, or {_ANOTHER}."
        )
    if number == errno.EROFS:
        return UsageError(
            f"{begin}the file system of {_shown(_nearest(folder))} is read-only. Mount it for writing (in an Azure ML "
            f"job: an output with the mode rw_mount), or {_ANOTHER}."
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if number in _IMPOSSIBLE:
        return UsageError(f"{begin}nothing can be created there ({reason}). Correct it, or {_ANOTHER}.")
    return CheckpointError(f"{begin}{reason}. Repair the disk or the mount, or {_ANOTHER}.")


def _nearest(folder: Path) -> Path:
    return next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)


def _file_in_place(folder: Path) -> Path:
    existing = (path for path in (*reversed(folder.parents), folder) if os.path.lexists(path))
    return next((path for path in existing if not os.path.isdir(path)), folder)  # noqa: PTH112 - raises no error


def _shown(path: Path) -> str:
    text = repr(str(path))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


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
        # Exclusively: a checksum in a manifest is that of a name which is written once.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        written = 0

        def write(block: memoryview) -> None:
            nonlocal written
            done = 0
            while done < len(block):
                done += os.write(descriptor, block[done:])
            # While the checksum of the next block is computed: else fsync() would have all of the file to write.
            begin_writing(descriptor, written, done)
            written += done

        try:
            try:
                yield write
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _fsync_directory(path.parent)  # the name is as durable as the content
        except BaseException:  # the part takes space, of which a full disk has none for the next attempt
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    @override
    def publish(self, folder: str, name: str, content: bytes) -> None:
        super().publish(folder, name, content)
        _fsync_directory(self.root)  # which has the folder's own name

    @override
    def replace(self, name: str, content: bytes) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / name
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # before the new name: after a crash it might have no content otherwise
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

        try:
            yield lambda begin, memory: fill(descriptor, begin, memory, name)
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
