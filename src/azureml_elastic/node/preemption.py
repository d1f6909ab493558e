"""The notice that this node is about to be taken away."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

__all__ = ["Preemption"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Turns SIGTERM and SIGINT into a request to leave.

    A second signal is no more urgent than the first: Azure repeats itself, and a save must not be cut short.

    Args:
        grace: how long the workers have to reach a step boundary and save.
        wake: called, from a thread, when the notice comes.
    """

    def __init__(self, grace: timedelta, wake: Callable[[], None]) -> None:
        self._grace = grace.total_seconds()
        # A signal handler may interrupt anything, also a holder of the lock that it would need: it only puts.
        self._notices: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._tell, args=(wake,), name="preemption", daemon=True).start()
        self._noticed_at: float | None = None
        self.signal: signal.Signals | None = None

    def listen(self) -> None:
        """Take the signals; to be called again whenever someone else has taken them."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)

    @property
    def noticed(self) -> bool:
        """Whether this node must go."""
        return self._noticed_at is not None

    @property
    def overdue(self) -> bool:
        """Whether the workers have had their time."""
        return self._noticed_at is not None and time.monotonic() - self._noticed_at >= self._grace

    @property
    def reason(self) -> str:
        """What announced it."""
        return self.signal.name if self.signal else "no notice"

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that a signal ended: 143 after SIGTERM."""
        return 128 + int(self.signal or signal.SIGTERM)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
            self.signal = signal.Signals(signum)
            self._notices.put(None)

    def _tell(self, wake: Callable[[], None]) -> None:
        self._notices.get()
        wake()
