"""Memory of workers that the node's agent keeps open, for the workers of the next round."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import asdict

from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import HandedOverState
from azureml_elastic.ipc.shards import HeldShard, ShardDescription
from azureml_elastic.ipc.worker_messages import (
    Accepted,
    DiscardSnapshot,
    HandOver,
    HeldShards,
    HoldShard,
    Memory,
    MemoryMessage,
    MemoryReply,
    Refused,
    Reply,
    RetainSnapshot,
    ShardsReply,
)

__all__ = ["AgentMemory"]

_LOG = logging.getLogger(__name__)


class AgentMemory:
    """The state and the snapshot shards that workers of a node handed over, and the requests about them. Thread-safe.

    Anonymous memory lives as long as a descriptor of it is open: the agent opens that of the worker through ``/proc``.

    Args:
        local: snapshots on the node's disk, ``None`` without them.
    """

    def __init__(self, local: LocalSnapshots | None = None) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._state: tuple[int, HandedOverState] | None = None
        self._parts: dict[int, tuple[int, HandedOverState]] = {}
        self._shards: dict[tuple[str, str], tuple[int, ShardDescription]] = {}
        self._written = ""

    def answer(self, message: MemoryMessage, number: int, rank: int) -> Reply | None:
        """Process a message of a worker.

        Args:
            message: the message.
            number: number of the worker's round.
            rank: rank of the worker in it.

        Returns:
            The reply, ``None`` where the message is no request.
        """
        with self._lock:
            match message:
                case Memory():
                    return MemoryReply(
                        None if self._state is None else self._state[1], [part for _, part in self._parts.values()]
                    )
                case HeldShards():
                    held = [HeldShard(**asdict(shard), path=_path(fd)) for fd, shard in self._shards.values()]
                    return ShardsReply(held + (self._local.describe() if self._local is not None else []))
                case RetainSnapshot():
                    self._retain(message.folder)
                    return None
                case DiscardSnapshot():
                    self._discard([key for key in self._shards if key[0] == message.folder])
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
            return os.dup(descriptor), shard

    def _hold(self, descriptor: int, shard: ShardDescription) -> None:
        key = (shard.folder, shard.file)
        self._discard([key])
        self._shards[key] = descriptor, shard

    def _hold_memory(self, message: HandOver | HoldShard, number: int, rank: int) -> Reply:
        try:
            opened = os.open(f"/proc/{message.pid}/fd/{message.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return Refused("unavailable", f"The memory cannot be opened: {error}")
        if isinstance(message, HoldShard):
            self._hold(opened, message.shard)
        elif message.part is not None:
            # One of an earlier round stays beside those of this one until its own worker replaces it: a worker that
            # ends before it has restored anything hands nothing over.
            self._drop_parts([message.part])
            state = HandedOverState(_path(opened), message.step, number, rank, message.part)
            self._parts[message.part] = opened, state
            _LOG.info("A part of the state of step %d is held in memory for the next round.", message.step)
        else:
            self._drop_state()
            self._state = opened, HandedOverState(_path(opened), message.step, number, rank)
            _LOG.info("The state of step %d is held in memory for the next round.", message.step)
        return Accepted()

    def take_state(self) -> tuple[int, HandedOverState] | None:
        """Return the whole state that no next worker has restored, if there is one; its descriptor is the caller's."""
        with self._lock:
            state, self._state = self._state, None
            return state

    def completed(self, number: int) -> None:
        """Release what was handed over before this round, which has completed a step and so has restored it."""
        with self._lock:
            if self._state is not None and self._state[1].round < number:
                self._drop_state()
            self._drop_parts([each for each, (_, part) in self._parts.items() if part.round < number])

    def close(self, *, forget: bool = True) -> None:
        """Release all memory.

        Args:
            forget: whether to remove the snapshots on the disk too, at the successful end of the run.
        """
        with self._lock:
            self._drop_state()
            self._drop_parts([*self._parts])
            self._discard(list(self._shards))
        if self._local is not None:
            if forget:
                self._local.forget()
            self._local.close()

    def _retain(self, folder: str) -> None:
        """Release all snapshots but this one, which is complete, and write it to the disk."""
        self._discard([key for key in self._shards if key[0] != folder])
        if folder != self._written:
            self._written = folder
            if self._local is not None:
                self._local.write(list(self._shards.values()))

    def _discard(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            if key in self._shards:
                os.close(self._shards.pop(key)[0])

    def _drop_parts(self, parts: list[int]) -> None:
        for part in parts:
            if part in self._parts:
                os.close(self._parts.pop(part)[0])

    def _drop_state(self) -> None:
        if self._state is not None:
            os.close(self._state[0])
            self._state = None


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
