"""What rank 0's agent sees of the rounds of a script without a session, in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable

from azureml_elastic.ledger.events import RanksConnecting, StateSaved
from azureml_elastic.node.agent.event_rate import EventRate
from azureml_elastic.node.agent.event_recorder import Recorder

__all__ = ["ObservationLog"]


class ObservationLog:
    """Writer of what is seen of the rounds: fewer saves the longer the node runs, but the last one of each round.

    Args:
        recorder: writer of the ledger's events.
        clock: clock in monotonic seconds.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._rate = EventRate(clock)
        self._number = 0
        self._connected = False
        self._saved: float | None = None
        self._recorded = True

    def seen(self, number: int, *, connected_at: float | None, saved_at: float | None) -> None:
        """Record what is new.

        Args:
            number: number of the round.
            connected_at: when its workers have begun to connect to each other, in monotonic seconds; ``None`` before.
            saved_at: when the last save was seen, in monotonic seconds; ``None`` before the first one.
        """
        if number != self._number:
            self.flush()
            self._number, self._connected, self._saved = number, False, None
        if connected_at is not None and not self._connected:
            self._connected = True
            self._recorder.record(RanksConnecting, number, self._wall(connected_at))
        if saved_at is not None and saved_at != self._saved:
            self._saved, self._recorded = saved_at, False
            if self._rate.due():
                self.flush()

    def flush(self) -> None:
        """Record the last save that was seen, unless that was done."""
        if self._saved is not None and not self._recorded:
            self._recorded = True
            self._recorder.record(StateSaved, self._number, self._wall(self._saved))

    def _wall(self, at: float) -> float:
        return time.time() - (self._clock() - at)
