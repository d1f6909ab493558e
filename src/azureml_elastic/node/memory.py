"""The state that a worker has handed over, held for the worker that follows it on this node."""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["KeptState"]


class KeptState:
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
        opened = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            self._close()
            self._descriptor, self._round = opened, number
            path = f"/proc/{os.getpid()}/fd/{opened}"
            self._description = {"path": path, "step": step, "round": number, "rank": rank}

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
