"""The end of tests that hang, fair on a busy machine.

A test may use a number of CPU seconds with all that it starts, which ends a loop that never does. And it may wait for a
number of seconds in which a core was free for it: one in which two cores had four runnable processes counts a half, and
however many there are, a second counts a quarter. So other work on the machine, which slows a test down, gives it more
time, and one that waits for what never comes ends.

An exception of Python does not end everything. A main thread in a call that never returns is ended by the thread of the
watch, with its process. One that keeps the interpreter's lock in such a call, and one that waits for threads at the end
of the process, are ended by a thread of :mod:`faulthandler`, which needs no lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.costs.meter import Meter, descendants

INTERVAL_S = 0.5
GRACE_S = 60.0
"""Of a test that has been ended, for its fixtures; then its process ends."""
LEAST_SHARE = 0.25
"""Of a second, however busy the machine is: else 300 s were an hour beside a load of 24 on two cores."""
LOCKED_S = 240.0
"""For which no thread of Python may run, and which the end of the process may take."""


@dataclass(frozen=True)
class Limits:
    """What a test may use."""

    cpu_s: float
    """Seconds of CPU, with all that it starts."""
    free_s: float
    """Seconds in which a core was free for it."""

    def exceeded(self, cpu_s: float, free_s: float) -> str | None:
        """Say which limit has been reached, if one has."""
        if cpu_s >= self.cpu_s:
            return f"it has used {cpu_s:.0f} of {self.cpu_s:.0f} CPU seconds"
        if free_s >= self.free_s:
            return f"for {free_s:.0f} of {self.free_s:.0f} s a core was free for it ({cpu_s:.0f} CPU seconds used)"
        return None


def share_of_a_core(runnable: int, cores: int) -> float:
    """Return how much of a core one more process would have had.

    Args:
        runnable: number of processes that run or could, with the one that asks.
        cores: number of cores.
    """
    return min(1.0, max(LEAST_SHARE, cores / max(1, runnable)))


class FreeTime:
    """The seconds since it was made, as far as a core was free in them."""

    _file = os.open("/proc/stat", os.O_RDONLY)  # kept open: some tests leave this process no descriptor

    def __init__(self) -> None:
        """Begin at 0."""
        self._cores = os.cpu_count() or 1  # of the machine, as are the runnable processes
        self.start()

    def start(self) -> None:
        """Begin at 0 again."""
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds; ask often, since each time says how busy the machine was since the last."""
        now = time.monotonic()
        # This thread is among the runnable ones, in the place of one that would run if it could.
        self._seconds += (now - self._last) * share_of_a_core(self._runnable(), self._cores)
        self._last = now
        return self._seconds

    def _runnable(self) -> int:
        text = os.pread(self._file, 1_000_000, 0)  # with a counter for each interrupt, so it is long
        return int(text.partition(b"\nprocs_running ")[2].split(b"\n", 1)[0])


class Watch:
    """Fails a test that reaches a limit, and ends the process if that does not help."""

    def __init__(self, meter: Meter, fail: Callable[[str], None], give_up: Callable[[str], None]) -> None:
        """Begin to watch; in the main thread.

        Args:
            meter: what measures CPU time.
            fail: function that raises the failure, called in the main thread.
            give_up: function that writes what has happened where it can be read, before the process ends.
        """
        self._meter, self._fail, self._give_up = meter, fail, give_up
        self._free = FreeTime()
        self._before_test = meter.seconds()
        # Both are open all the time, for when there is no descriptor.
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        self._stderr = os.dup(2)
        self._lock = threading.Lock()
        self._test: str | None = None
        self._limits = Limits(0, 0)
        self._reason: str | None = None
        self._may_raise = False
        self._over = threading.Event()
        # A signal interrupts the main thread's waiting, as an exception set from another thread would not.
        self._handler = signal.signal(signal.SIGALRM, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="test limits", daemon=True)
        self._thread.start()

    def begin(self, test: str, limits: Limits) -> None:
        """Watch a test."""
        with self._lock:
            self._before_test = self._meter.seconds()
            self._free.start()
            self._test, self._limits, self._reason = test, limits, None

    def used(self) -> float:
        """Return the CPU seconds of the test so far."""
        with self._lock:
            return self._used()

    def end(self) -> None:
        """The test has ended, or a debugger has it."""
        with self._lock:
            self._test = None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Mark a part of a test in which an exception becomes its failure, and not pytest's."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def close(self, *, waits: bool = False) -> None:
        """Watch no more; the process ends soon, unless it ``waits``."""
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._handler)
        self._stacks.close()
        if waits:
            faulthandler.cancel_dump_traceback_later()
        else:
            self._postpone()  # the interpreter still waits for threads, and cancels it after that

    def _watch(self) -> None:
        try:
            while not self._over.wait(INTERVAL_S):
                self._postpone()
                self._look()
                self._meter.kill_left()
        except BaseException as error:  # without this thread a test that hangs would hang for ever
            self._end_process(f"The watch of the tests' limits has failed: {error!r}\n")

    def _look(self) -> None:
        """End the test if it has reached a limit."""
        with self._lock:
            # Each time, since both know only what they have seen.
            cpu_s, free_s = self._used(), self._free.seconds()
            if self._test is None or not (reason := self._limits.exceeded(cpu_s, free_s)):
                return
            text = f"{self._test} was ended: {reason}.\n{self._dump()}"
            if self._reason is not None:
                self._end_process(f"{text}It has not ended, so this process does.\n")
            self._reason = text
            # If the signal does not end it, the main thread is in a call that never returns.
            self._limits = Limits(cpu_s + GRACE_S, free_s + GRACE_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    def _postpone(self) -> None:
        """Let :mod:`faulthandler` end this process after a while, unless this is called again before."""
        faulthandler.dump_traceback_later(LOCKED_S, file=self._stderr, exit=True)

    def _end_process(self, text: str) -> None:
        """Write what has happened, and end this process with all that it has started."""
        try:
            self._give_up(text)
        finally:
            self._meter.kill_others()
            os._exit(1)

    def _used(self) -> float:
        return self._meter.seconds() - self._before_test

    def _on_signal(self, number: int, frame: object) -> None:
        if self._may_raise and self._test is not None and self._reason is not None:
            self._may_raise = False
            self._fail(self._reason)

    def _dump(self) -> str:
        """Return the stacks of all threads, and the processes below this one."""
        self._stacks.seek(0)
        self._stacks.truncate()
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._stacks.seek(0)
        lines = [self._stacks.read().decode(errors="replace")]
        for process in descendants():
            command = b""
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
            state = f"process {process.pid} ({process.state}), {process.seconds:.1f} CPU seconds"
            lines.append(f"{state}: {command.decode(errors='replace'):.200}")
        return "\n".join(lines) + "\n"
