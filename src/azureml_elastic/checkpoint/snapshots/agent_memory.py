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
        self._states: dict[int | None, tuple[int, HandedOverState]] = {}  # by part
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
                    return MemoryReply([state for _, state in self._states.values()])
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
        else:
            # A part of an earlier round stays beside those of this one until its own worker replaces it: a worker that
            # ends before it has restored anything hands nothing over.
            self._drop_states([message.part])
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
            self._drop_states([part for part, (_, state) in self._states.items() if state.round < number])

    def close(self, *, forget: bool = True) -> None:
        """Release all memory.

        Args:
            forget: whether to remove the snapshots on the disk too, at the successful end of the run.
        """
        with self._lock:
            self._drop_states([*self._states])
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

    def _drop_states(self, parts: list[int | None]) -> None:
        for part in parts:
            if part in self._states:
                os.close(self._states.pop(part)[0])


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
