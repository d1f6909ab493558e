"""Memory for the next hand-over, allocated while training goes on.

The kernel takes as long to allocate memory as a worker does to fill it, while all nodes stand still. At the time of a
hand-over the memory is needed anyway; reserving it makes that need a lasting one, so that it is left where a node has
little.
"""

from __future__ import annotations

import logging
import threading

from azureml_elastic.checkpoint.snapshots.anonymous_memory import AnonymousMemory

__all__ = ["ReservedMemory"]

_LOG = logging.getLogger(__name__)

_SHARE = 0.25
"""Fraction of the node's available memory that may be reserved."""

_PIECE_BYTES = 32 << 20
"""Size that is allocated at once: a hand-over waits for the end of one piece."""


class ReservedMemory:
    """Memory that a thread allocates, of which a hand-over takes as much as is there, and the rest as fresh memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: AnonymousMemory | None = None

    def begin(self, nbytes: int, available: int) -> None:
        """Begin to allocate, unless that is under way or the node has little memory.

        Args:
            nbytes: size that a hand-over is expected to have.
            available: memory of the node that its processes may still take.
        """
        if self._memory is not None or nbytes > _SHARE * available:
            return
        try:
            self._memory = memory = AnonymousMemory(nbytes)
        except OSError as error:
            _LOG.info("No memory is reserved for a hand-over: %s", error)
            return
        threading.Thread(target=self._allocate, args=(memory, nbytes), name="reserve-memory", daemon=True).start()

    def take(self, nbytes: int) -> AnonymousMemory:
        """Return memory of a size, which is the caller's.

        Raises:
            OSError: there is not enough memory.
        """
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is None:
            return AnonymousMemory(nbytes)
        memory.resize(nbytes)
        return memory

    def _allocate(self, memory: AnonymousMemory, nbytes: int) -> None:
        for begin in range(0, nbytes, _PIECE_BYTES):
            with self._lock:
                if self._memory is not memory:
                    return
                try:
                    memory.allocate(begin, min(_PIECE_BYTES, nbytes - begin))
                except OSError as error:
                    _LOG.info("No more memory is reserved for a hand-over: %s", error)
                    return
