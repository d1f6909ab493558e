"""Memory of workers that this node's agent holds on to, for the workers that follow them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from azureml_elastic.checkpoint.snapshots.local_snapshots import LocalSnapshots

__all__ = ["AgentMemory", "HandedOverMemory", "SnapshotShards"]

_LOG = logging.getLogger(__name__)


class HandedOverMemory:
    """One state at most, in anonymous memory that lives as long as its descriptor is open here. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._round = 0
        self._description: dict[str, Any] | None = None

    def keep(self, pid: int, descriptor: int, *, step: int, number: int, rank: int) -> None:
        """Open another process's memory, in place of what was held before.

        Args:
            pid: of the process.
            descriptor: of the memory in that process.
            step: optimizer steps completed.
            number: of the round in which they were.
            rank: of the worker.

        Raises:
            OSError: it is gone already.
        """
        opened = _open(pid, descriptor)
        with self._lock:
            self._close()
            self._descriptor, self._round = opened, number
            self._description = {"path": _path(opened), "step": step, "round": number, "rank": rank}

    def describe(self) -> dict[str, Any] | None:
        """Return ``path``, ``step``, ``round`` and ``rank``, or ``None`` where nothing is held."""
        with self._lock:
            return self._description

    def drop(self, before: int | None = None) -> None:
        """Let go of it.

        Args:
            before: only of what an earlier round than this one has left.
        """
        with self._lock:
            if self._descriptor >= 0 and (before is None or self._round < before):
                self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._description = -1, None


class SnapshotShards:
    """Shares of copies of the state, each by the name of the copy and of its file. Thread-safe.

    Args:
        local: copies on the node's disk, if there are any.
    """

    def __init__(self, local: LocalSnapshots | None = None) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
        self._written = ""

    def put(self, pid: int, descriptor: int, description: Mapping[str, Any]) -> None:
        """Open another process's memory.

        Args:
            pid: of the process.
            descriptor: of the memory in that process.
            description: with ``folder`` and ``file``.

        Raises:
            OSError: it is gone already.
        """
        opened = _open(pid, descriptor)
        key = (description["folder"], description["file"])
        with self._lock:
            self._let_go([key])
            self._held[key] = opened, {**description, "path": _path(opened)}

    def describe(self) -> list[dict[str, Any]]:
        """Return the descriptions, each with the ``path`` of the memory or of the file."""
        with self._lock:
            held = [description for _, description in self._held.values()]
        return held + (self._local.describe() if self._local is not None else [])

    def drop(self, folder: str) -> None:
        """Let go of a copy that is not whole."""
        with self._lock:
            self._let_go([key for key in self._held if key[0] == folder])

    def keep_only(self, folder: str) -> None:
        """Let go of all others: this copy is whole."""
        with self._lock:
            self._let_go([key for key in self._held if key[0] != folder])
            if folder != self._written:
                self._written = folder
                if self._local is not None:
                    self._local.write(list(self._held.values()))

    def close(self, *, forget: bool) -> None:
        """Let go of all in memory.

        Args:
            forget: also remove what is on the disk.
        """
        with self._lock:
            self._let_go(list(self._held))
        if self._local is not None and forget:
            self._local.forget()
        if self._local is not None:
            self._local.close()

    def _let_go(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            if key in self._held:
                os.close(self._held.pop(key)[0])


class AgentMemory:
    """All that the workers of a node have in memory, and the messages about it.

    Args:
        local: copies on the node's disk, if there are any.
    """

    OPS: ClassVar = frozenset(
        {"handover", "memory", "hold_shard", "retain_snapshot", "held_shards", "discard_snapshot"}
    )

    def __init__(self, local: LocalSnapshots | None = None) -> None:
        self._kept = HandedOverMemory()
        self._shelf = SnapshotShards(local)

    def answer(self, message: Mapping[str, Any], number: int, rank: int) -> dict[str, Any] | None:
        """Do what a worker asks.

        Args:
            message: of the worker.
            number: of its round.
            rank: that it has in it.

        Returns:
            The reply, ``None`` where it expects none.
        """
        op = message["op"]
        if op == "memory":
            return {"memory": self._kept.describe()}
        if op == "held_shards":
            return {"held": self._shelf.describe()}
        if op in ("retain_snapshot", "discard_snapshot"):
            (self._shelf.keep_only if op == "retain_snapshot" else self._shelf.drop)(message["folder"])
            return None
        try:
            if op == "hold_shard":
                self._shelf.put(message["pid"], message["fd"], message["description"])
            else:
                self._kept.keep(message["pid"], message["fd"], step=message["step"], number=number, rank=rank)
                _LOG.info("The state of step %d stays in memory for the next round.", message["step"])
        except OSError as error:
            return {"error": "unavailable", "message": f"The memory cannot be opened: {error}"}
        return {"ok": True}

    def completed(self, number: int) -> None:
        """Let go of states handed over before this round: it has completed a step, so whoever needed them has them."""
        self._kept.drop(before=number)

    def close(self, *, forget: bool = True) -> None:
        """Let go of everything.

        Args:
            forget: what is on the disk as well: the run has ended well.
        """
        self._kept.drop()
        self._shelf.close(forget=forget)


def _open(pid: int, descriptor: int) -> int:
    return os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDONLY | os.O_CLOEXEC)


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
