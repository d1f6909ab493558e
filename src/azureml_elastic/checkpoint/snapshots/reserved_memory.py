"""Memory for the next hand-over, allocated and mapped while training goes on.

Both take longer than the copy, while all nodes stand still. At the time of a hand-over the memory is needed anyway;
reserving it makes that need a lasting one, so that it is left where a node has little.
"""

from __future__ import annotations

import logging
import threading

import torch

from azureml_elastic.checkpoint.save.staging_buffer import StagingBuffer

__all__ = ["ReservedMemory"]

_LOG = logging.getLogger(__name__)

_SHARE = 0.25
"""Fraction of the node's available memory that may be reserved."""


class ReservedMemory:
    """Memory of the host that a thread allocates, for one hand-over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: StagingBuffer | None = None
        self._ready: StagingBuffer | None = None

    def begin(self, nbytes: int, available: int) -> None:
        """Begin to allocate, unless that was begun or the node has little memory.

        Args:
            nbytes: size that a hand-over is expected to have.
            available: memory of the node that its processes may still take.
        """
        if self._wanted is None and nbytes <= _SHARE * available:
            self._wanted = buffer = StagingBuffer(torch.device("cpu"))
            threading.Thread(target=self._allocate, args=(buffer, nbytes), name="reserve-memory", daemon=True).start()

    def take(self, nbytes: int) -> StagingBuffer | None:
        """Return memory of at least this size, which is the caller's, ``None`` where it is not there."""
        with self._lock:
            buffer, self._ready, self._wanted = self._ready, None, None
        return buffer if buffer is not None and buffer.nbytes >= nbytes else None

    def _allocate(self, buffer: StagingBuffer, nbytes: int) -> None:
        try:
            buffer.reserve(nbytes)
        except OSError as error:
            _LOG.info("No memory is reserved for a hand-over: %s", error)
            return
        with self._lock:
            if self._wanted is buffer:  # otherwise the hand-over has not waited for it
                self._ready = buffer
