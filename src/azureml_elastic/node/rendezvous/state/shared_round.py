"""The newest version of the round, as all threads of a node know it."""

from __future__ import annotations

import threading

from azureml_elastic.node.core.newest_round import NewestRound
from azureml_elastic.node.core.round import Round

__all__ = ["SharedNewestRound"]


class SharedNewestRound(NewestRound):
    """A :class:`NewestRound` that is thread-safe.

    The table client, the hub and the connections to other hubs write to it, so that a change of the round is known
    whichever of them brings it first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def observe(self, round_: Round) -> None:
        """See :class:`NewestRound`."""
        with self._lock:
            super().observe(round_)

    def accept(self, round_: Round) -> bool:
        """See :class:`NewestRound`."""
        with self._lock:
            return super().accept(round_)
