"""Memory of workers that the node's agent keeps open, for the workers of the next round.

What an agent holds in memory ends with it, for instance when its container is restarted. Where the plan names a local
folder, each snapshot is written there too. Each agent locks a folder of its own below that of the run::

    FOLDER/run id/node/owner                                   locked while the agent lives
    FOLDER/run id/node/<snapshot>/rank-00000.safetensors       a shard
    FOLDER/run id/node/<snapshot>/rank-00000.safetensors.json  its description, written last

An agent that starts also offers the snapshots of folders without a lock. The description has the checksum of
the shard, so that a torn shard is never used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter

from azureml_elastic.errors import ElasticError
from azureml_elastic.file_lock import is_abandoned, lock
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.ipc.message import ShardDescription
from azureml_elastic.ipc.worker_messages import (
    Accepted,
    DiscardSnapshot,
    HandOver,
    HoldShard,
    Memory,
    MemoryMessage,
    MemoryReply,
    Refused,
    Reply,
    RetainSnapshot,
)
from azureml_elastic.private_folder import make_private

_LOG = logging.getLogger(__name__)

_OWNER = "owner"
_PIECE_BYTES = 1 << 26

_LOCK_SECONDS = 2.0
"""Time limit for an agent to lock its own folder: other agents that start lock it for a moment to test it."""

_DESCRIPTION = TypeAdapter(ShardDescription)

Shard = tuple[int, ShardDescription]
"""The descriptor of memory, and the description of the shard in it."""


class LocalSnapshots:
    """The snapshots of one agent, in the run's folder on a local disk. Thread-safe; a background thread writes them.

    Raises:
        OSError: the folder cannot be created, or another process has locked it.
    """

    def __init__(self, folder: Path, node: str, *, lock_seconds: float = _LOCK_SECONDS) -> None:
        self._run = folder
        self._own = folder / node
        make_private(self._own)
        try:
            self._lock = lock(self._own / _OWNER, lock_seconds)
        except BlockingIOError as error:
            raise BlockingIOError(f"{error}: two agents of this run have the same name") from error
        self._abandoned = [
            path for path in sorted(folder.iterdir()) if path != self._own and is_abandoned(path / _OWNER)
        ]
        # Described once, as nobody writes to folders without a lock.
        self._inherited = [shard for path in self._abandoned for shard in _read(path)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local-snapshots")
        self._changed = threading.Lock()
        self._next: list[Shard] = []

    def describe(self) -> list[ShardDescription]:
        """Return the descriptions of all shards on the disk."""
        return self._inherited + list(_read(self._own))

    def write(self, shards: list[Shard]) -> None:
        """Write a complete snapshot in the background. One that still waits for its turn is replaced by the next."""
        # Descriptors of its own: the agent closes those that it was given as soon as the next snapshot is complete.
        copies: list[Shard] = []
        try:
            for descriptor, shard in shards:
                copies.append((os.dup(descriptor), shard))
        except OSError as error:
            _LOG.warning("A snapshot cannot be written to %s: %s", self._own, error)
            _close(copies)
            return
        with self._changed:
            replaced, self._next = self._next, copies
        _close(replaced)
        self._pool.submit(self._write_next)

    def forget(self) -> None:
        """Remove all snapshots, at the successful end of the run."""
        self._pool.shutdown(wait=True)
        for path in (self._own, *self._still_abandoned()):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._run.rmdir()  # fails while other agents have folders in it

    def close(self) -> None:
        """Unlock the folder; the snapshots stay for the next agent on this machine."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        _close(self._next)
        self._next = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write_next(self) -> None:
        with self._changed:
            shards, self._next = self._next, []
        if not shards:
            return  # an earlier call has written them
        folder = self._own / shards[0][1].folder
        try:
            folder.mkdir(exist_ok=True)
            # A description only after its shard is on the disk, so that none of a torn shard is ever read.
            for descriptor, shard in shards:
                _copy(descriptor, folder / shard.file, shard)
                with (folder / f"{shard.file}.json").open("x") as stream:
                    json.dump(asdict(shard), stream)
            self._retire(folder)
        except (OSError, ValueError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            _LOG.warning("A snapshot could not be written to %s: %s", self._own, error)
        finally:
            _close(shards)

    def _retire(self, newest: Path) -> None:
        """Keep two snapshots: other nodes may not have written the newest one yet."""
        others = [path for path in self._own.iterdir() if path.is_dir() and path != newest]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        # Those of earlier agents only now: until this node has written one of its own they may be the newest there are.
        for path in [*others[:-1], *self._still_abandoned()]:
            shutil.rmtree(path, ignore_errors=True)
        self._abandoned, self._inherited = [], []

    def _still_abandoned(self) -> list[Path]:
        # An agent that was started again under the name of an earlier one has its folder by now.
        return [path for path in self._abandoned if is_abandoned(path / _OWNER)]


def _close(shards: list[Shard]) -> None:
    for descriptor, _ in shards:
        os.close(descriptor)


def _copy(descriptor: int, target: Path, shard: ShardDescription) -> None:
    """Copy within the kernel, so that neither the interpreter nor the worker that owns the memory waits."""
    size = shard.size + shard.tail
    with target.open("x+b") as stream:
        done = 0
        while done < size:
            count = os.sendfile(stream.fileno(), descriptor, done, min(_PIECE_BYTES, size - done))
            if count == 0:
                raise OSError(f"the memory of {target.name} ends after {done} of {size} bytes")
            done += count
        os.fsync(stream.fileno())
        # What was written is checked, not the memory: its worker may take the next snapshot into it at any moment.
        with (
            mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as memory,
            memoryview(memory) as view,
            view[: shard.size] as content,
        ):
            written = xxhash.xxh3_128_hexdigest(content)
    if written != shard.xxh3:
        raise OSError(f"{target} changed while it was written: its memory is in use again; take snapshots less often")


def _read(own: Path) -> Iterator[ShardDescription]:
    for path in sorted(own.glob("*/*.json")):
        with contextlib.suppress(OSError, ValueError):  # torn, or removed just now
            yield replace(_DESCRIPTION.validate_json(path.read_bytes()), path=str(path.with_suffix("")))


class AgentMemory:
    """The state and the snapshot shards that workers of a node handed over, and the requests about them. Thread-safe.

    Anonymous memory lives as long as a descriptor of it is open: the agent opens that of the worker through ``/proc``.

    Args:
        local: snapshots on the node's disk, ``None`` without them.
    """

    def __init__(self, local: LocalSnapshots | None = None) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._states: dict[int | None, tuple[int, HandedOverState]] = {}  # by part
        self._shards: dict[tuple[str, str], tuple[int, ShardDescription]] = {}
        self._written = ""

    def answer(self, message: MemoryMessage, number: int, rank: int) -> Reply | None:
        """Process a message of a worker, which had this rank in the round of this number.

        Returns:
            The reply, ``None`` where the message is no request.
        """
        with self._lock:
            match message:
                case Memory():
                    shards = [shard for _, shard in self._shards.values()]
                    shards += self._local.describe() if self._local is not None else []
                    return MemoryReply([state for _, state in self._states.values()], shards)
                case RetainSnapshot():
                    self._retain(message.folder)
                    return None
                case DiscardSnapshot():
                    _release(self._shards, [key for key in self._shards if key[0] == message.folder])
                    return None
                case HandOver() | HoldShard():
                    return self._hold_memory(message, number, rank)

    def hold(self, descriptor: int, shard: ShardDescription) -> None:
        """Hold a shard, whose memory's descriptor belongs to this object from now on."""
        with self._lock:
            self._hold(descriptor, shard)

    def open_shard(self, folder: str, file: str) -> tuple[int, ShardDescription]:
        """Return a new descriptor of a shard's memory, and the shard's description.

        Raises:
            ElasticError: no such shard is held.
        """
        with self._lock:
            if (folder, file) not in self._shards:
                raise ElasticError(f"this node does not hold the shard {file} of the snapshot {folder}")
            descriptor, shard = self._shards[folder, file]
            return os.dup(descriptor), shard  # under the lock: the next snapshot may release it while it is sent

    def _hold(self, descriptor: int, shard: ShardDescription) -> None:
        key = (shard.folder, shard.file)
        _release(self._shards, [key])
        self._shards[key] = descriptor, replace(shard, path=_path(descriptor))

    def _hold_memory(self, message: HandOver | HoldShard, number: int, rank: int) -> Reply:
        try:
            opened = os.open(f"/proc/{message.pid}/fd/{message.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return Refused("unavailable", f"The memory cannot be opened: {error}")
        if isinstance(message, HoldShard):
            self._hold(opened, message.shard)
        else:
            # A part of an earlier round stays beside those of this one until its own worker replaces it: a worker that
            # ends before it has restored anything hands nothing over.
            _release(self._states, [message.part])
            state = HandedOverState(_path(opened), message.step, number, rank, message.part)
            self._states[message.part] = opened, state
            what = "The state" if message.part is None else "A part of the state"
            _LOG.info("%s of step %d is held in memory for the next round.", what, message.step)
        return Accepted()

    def take_state(self) -> tuple[int, HandedOverState] | None:
        """Return the whole state that no next worker has restored, if there is one; its descriptor is the caller's."""
        with self._lock:
            return self._states.pop(None, None)

    def completed(self, number: int) -> None:
        """Release what was handed over before this round, which has completed a step and so has restored it."""
        with self._lock:
            _release(self._states, [part for part, (_, state) in self._states.items() if state.round < number])

    def close(self, *, forget: bool = True) -> None:
        """Release all memory; at the successful end of the run (``forget``) remove the snapshots on the disk, too."""
        with self._lock:
            _release(self._states, [*self._states])
            _release(self._shards, [*self._shards])
        if self._local is not None:
            if forget:
                self._local.forget()
            self._local.close()

    def _retain(self, folder: str) -> None:
        """Release all snapshots but this one, which is complete, and write it to the disk."""
        _release(self._shards, [key for key in self._shards if key[0] != folder])
        if folder != self._written:  # each worker of the node asks for it
            self._written = folder
            if self._local is not None:
                self._local.write(list(self._shards.values()))


def _release(held: dict[Any, tuple[int, Any]], keys: Iterable[Any]) -> None:
    for key in keys:
        if key in held:
            os.close(held.pop(key)[0])


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
