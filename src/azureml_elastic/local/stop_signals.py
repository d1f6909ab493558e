"""The signals that stop a local run: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from typing_extensions import Self

__all__ = ["StopSignals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Collector of the signals that stop a run, a context manager that installs and removes their handlers.

    Signals raise ``KeyboardInterrupt`` or ``SystemExit`` until :meth:`hold` is called or one has been received. From
    then on they are only collected, so that they cut off neither the end of the nodes nor the report. Only Python's
    default handlers are replaced: what the program ignores (``nohup``) or handles itself stays as it is, and a thread
    other than the main one has no handlers.
    """

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._raises = True
        self._replaced: list[tuple[signal.Signals, signal._HANDLER]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                handler = signal.getsignal(signum)
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._replaced.append((signum, handler))
                    signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._replaced:
            signal.signal(signum, handler)

    def hold(self) -> None:
        """Collect signals from now on, without an exception."""
        self._raises = False

    @property
    def first(self) -> signal.Signals | None:
        """The first received signal; ``None`` before."""
        return self._received[0] if self._received else None

    @property
    def hurried(self) -> bool:
        """Whether more than one signal was received."""
        return len(self._received) > 1

    def raise_received(self) -> None:
        """Raise ``KeyboardInterrupt`` after SIGINT, and ``SystemExit`` with 128 + its number after another signal.

        Without a received signal nothing is raised.
        """
        if self.first == signal.SIGINT:
            raise KeyboardInterrupt
        if self.first is not None:
            sys.exit(128 + self.first)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as Python calls it
        self._received.append(signal.Signals(signum))
        if self._raises:
            self.hold()
            self.raise_received()
