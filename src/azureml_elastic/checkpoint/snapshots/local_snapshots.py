"""The newest copy of the state on this node's own disk, where the agent's end does not reach it.

The agent's memory goes with the agent: when its container is started again on the same machine, say. So what it holds
on to is written to a local disk as well, where the plan names one. Each agent has a folder of its own below that of the
run, with a lock that shows that it lives::

    FOLDER/run id/node/owner                                   locked by the agent
    FOLDER/run id/node/<copy>/rank-00000.safetensors           a share
    FOLDER/run id/node/<copy>/rank-00000.safetensors.json      its description, written last

An agent that starts offers what others have left whose lock is free. A share that is torn has another checksum than its
description says, and is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["LocalSnapshots"]

_LOG = logging.getLogger(__name__)

_OWNER = "owner"
_PIECE_BYTES = 1 << 26


class LocalSnapshots:
    """What is on the disk. Thread-safe; it is written on a thread of its own.

    Args:
        folder: of this run, on a local disk.
        node: this agent's name.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._run = folder
        self._own = folder / node
        self._own.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._own / _OWNER)
        self._left = [path for path in sorted(folder.iterdir()) if path != self._own and self._is_left(path)]
        self._inherited = [description for path in self._left for description in _read(path)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local-copies")
        self._changed = threading.Lock()
        self._next: list[tuple[int, Mapping[str, Any]]] = []

    def describe(self) -> list[dict[str, Any]]:
        """Return the descriptions of what is there, each with the ``path`` of the share."""
        return self._inherited + list(_read(self._own))

    def write(self, shares: list[tuple[int, Mapping[str, Any]]]) -> None:
        """Write a whole copy; returns at once. One that has to wait is left out when the next one comes.

        Args:
            shares: descriptors of memory, and what is in it: ``folder``, ``file``, ``size``, ``tail``, ``xxh3``.
        """
        mine: list[tuple[int, Mapping[str, Any]]] = []
        try:
            for descriptor, description in shares:
                mine.append((os.dup(descriptor), description))
        except OSError as error:
            _LOG.warning("A copy of the state cannot be written to %s: %s", self._own, error)
            _close(mine)
            return
        with self._changed:
            waiting, self._next = self._next, mine
        _close(waiting)
        self._pool.submit(self._write_next)

    def forget(self) -> None:
        """Remove everything: the run has ended well."""
        self._pool.shutdown(wait=True)
        for path in (self._own, *self._left):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._run.rmdir()  # by the last of them

    def close(self) -> None:
        """Leave what there is to the next agent on this machine."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        _close(self._next)
        self._next = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write_next(self) -> None:
        with self._changed:
            shares, self._next = self._next, []
        if not shares:
            return  # it was left out
        place = self._own / shares[0][1]["folder"]
        try:
            place.mkdir(exist_ok=True)
            for descriptor, description in shares:
                _copy(descriptor, place / description["file"], description)
                with (place / f"{description['file']}.json").open("x") as stream:
                    json.dump({key: value for key, value in description.items() if key != "path"}, stream)
            self._retire(place)
        except (OSError, ValueError) as error:
            shutil.rmtree(place, ignore_errors=True)
            _LOG.warning("A copy of the state could not be written to %s: %s", self._own, error)
        finally:
            _close(shares)

    def _retire(self, newest: Path) -> None:
        """Keep two: other nodes may not have written the newest one yet."""
        others = [path for path in self._own.iterdir() if path.is_dir() and path != newest]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in [*others[:-1], *self._left]:
            shutil.rmtree(path, ignore_errors=True)
        self._left, self._inherited = [], []

    @staticmethod
    def _is_left(path: Path) -> bool:
        if not (path / _OWNER).exists():
            return False
        descriptor = _locked(path / _OWNER)
        if descriptor >= 0:
            os.close(descriptor)
        return descriptor >= 0


def _close(shares: list[tuple[int, Mapping[str, Any]]]) -> None:
    for descriptor, _ in shares:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Return a descriptor with the lock of a file, -1 where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


def _copy(descriptor: int, target: Path, description: Mapping[str, Any]) -> None:
    """Copy within the kernel: the interpreter goes on meanwhile; and so does the worker, to whom the memory belongs."""
    size = description["size"] + description["tail"]
    with target.open("x+b") as stream:
        done = 0
        while done < size:
            count = os.sendfile(stream.fileno(), descriptor, done, min(_PIECE_BYTES, size - done))
            if count == 0:
                raise OSError(f"the memory of {target.name} ends after {done} of {size} bytes")
            done += count
        os.fsync(stream.fileno())
        with mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
            content = view[: description["size"]]
            written = xxhash.xxh3_128_hexdigest(content)
            content.release()
    if written != description["xxh3"]:
        raise OSError(f"{target} took longer than until the next copy but one; take copies less often")


def _read(own: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(own.glob("*/*.json")):
        with contextlib.suppress(OSError, ValueError):  # torn, or removed just now
            yield {**json.loads(path.read_text()), "path": str(path.with_suffix(""))}
