"""Memory of workers that the node's agent keeps open, for the workers of the next round."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots

__all__ = ["AgentMemory"]

_LOG = logging.getLogger(__name__)


class AgentMemory:
    """The state and the snapshot shards that workers of a node handed over, and the requests about them. Thread-safe.

    Anonymous memory lives as long as a descriptor of it is open: the agent opens that of the worker through ``/proc``.

    Args:
        local: snapshots on the node's disk, ``None`` without them.
    """

    OPS: ClassVar = frozenset(
        {"handover", "memory", "hold_shard", "retain_snapshot", "held_shards", "discard_snapshot"}
    )

    def __init__(self, local: LocalSnapshots | None = None) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._state: tuple[int, dict[str, Any]] | None = None
        self._shards: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
        self._written = ""

    def answer(self, message: Mapping[str, Any], number: int, rank: int) -> dict[str, Any] | None:
        """Process a request of a worker.

        Args:
            message: request, with one of :attr:`OPS` as ``op``.
            number: number of the worker's round.
            rank: rank of the worker in it.

        Returns:
            The reply, ``None`` where the request has none.
        """
        op = message["op"]
        with self._lock:
            if op == "memory":
                return {"memory": None if self._state is None else self._state[1]}
            if op == "held_shards":
                held = [description for _, description in self._shards.values()]
                return {"held": held + (self._local.describe() if self._local is not None else [])}
            if op == "retain_snapshot":
                self._retain(message["folder"])
                return None
            if op == "discard_snapshot":
                self._discard([key for key in self._shards if key[0] == message["folder"]])
                return None
            try:
                opened = os.open(f"/proc/{int(message['pid'])}/fd/{int(message['fd'])}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                return {"error": "unavailable", "message": f"The memory cannot be opened: {error}"}
            path = f"/proc/{os.getpid()}/fd/{opened}"
            if op == "hold_shard":
                description = {**message["description"], "path": path}
                key = (description["folder"], description["file"])
                self._discard([key])
                self._shards[key] = opened, description
            else:
                self._drop_state()
                self._state = opened, {"path": path, "step": message["step"], "round": number, "rank": rank}
                _LOG.info("The state of step %d is held in memory for the next round.", message["step"])
        return {"ok": True}

    def completed(self, number: int) -> None:
        """Release a state of an earlier round than this one, which has completed a step and so has restored it."""
        with self._lock:
            if self._state is not None and self._state[1]["round"] < number:
                self._drop_state()

    def close(self, *, forget: bool = True) -> None:
        """Release all memory.

        Args:
            forget: whether to remove the snapshots on the disk too, at the successful end of the run.
        """
        with self._lock:
            self._drop_state()
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

    def _drop_state(self) -> None:
        if self._state is not None:
            os.close(self._state[0])
            self._state = None
