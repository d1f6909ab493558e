"""Children of a training process that outlive a SIGTERM which was not meant for them.

Every child that is spawned imports this module, so it imports the standard library alone, and its package nothing that
imports torch.

A data worker, a pool or a helper process must not end because SIGTERM reaches all processes of a container: training
needs it to reach the next step, where it saves. It cannot simply ignore the signal: torch's data workers install a
handler of their own, in C and after all others, and the parent of a child must still be able to end it with
``terminate()``. Hence in such a child SIGTERM is *blocked*, and a thread waits for it and reads the sender's process id
(``sigwaitinfo``). From the parent, or once the parent is gone, it counts, and takes the effect that it would have had;
from anybody else it is forgotten.

This holds for every child of ``multiprocessing``, however it is started. Programs that are started with ``subprocess``
are left alone: they get the signal as under torchrun, also from those who started them. One that training cannot do
without is started within :func:`sigterm_blocked`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from multiprocessing import popen_fork, util
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SIGTERM = frozenset({signal.SIGTERM})
_NUDGE = signal.SIGRTMAX - 3
"""Interrupts a main thread that waits in the system, so that it runs the handlers which are due."""

_LOOK_SECONDS = 2.0
"""How often a child looks whether the process that has started it is still there."""

_WANTED = threading.local()
"""``depth``: in how many :func:`sigterm_blocked` blocks the thread is."""


def filter_sigterm_in_children() -> None:
    """Filter SIGTERM in all children of ``multiprocessing`` that this process and they will start."""
    _FILTER.arm()


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM on this thread, for good in every process that is started meanwhile.

    Such a program does not end by ``terminate()`` any more, but by ``kill()``, and with its round.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
    _WANTED.depth = getattr(_WANTED, "depth", 0) + 1
    try:
        yield
    finally:
        _WANTED.depth -= 1
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signal(*_: object) -> None:
    """Handle a signal by doing nothing, where SIG_IGN would be inherited by every program."""


class _SigtermFilter:
    """Carries the protection into the children: it is pickled with every process that is spawned."""

    def __init__(self) -> None:
        self._armed = False
        self._filtered_pid: int | None = None
        self._spares_programs = False

    def __reduce__(self) -> tuple[Callable[[int], _SigtermFilter], tuple[int]]:
        return _armed, (os.getpid(),)

    def arm(self) -> None:
        """Filter SIGTERM in every child of ``multiprocessing``, by whichever method it is started."""
        if self._armed:
            return
        self._armed = True
        util.register_after_fork(self, lambda sigterm_filter: sigterm_filter.on_start(os.getppid()))
        # Every spawned process inherits this mapping, and what is unpickled with it arms the filter there.
        getattr(multiprocessing.current_process(), "_config", {})["azureml_elastic_sigterm_filter"] = self
        # Until then a process keeps its signals back because of what it inherits from the thread that starts it.
        if hasattr(util, "spawnv_passfds"):
            util.spawnv_passfds = _within(sigterm_blocked, util.spawnv_passfds)
        if hasattr(popen_fork.Popen, "_launch"):
            plain = popen_fork.Popen._launch  # noqa: SLF001 - there is no public place to do so
            popen_fork.Popen._launch = _within(sigterm_blocked, plain)  # noqa: SLF001

    def on_start(self, starter: int) -> None:
        """Filter SIGTERM in this process, a child that is about to run its target; once.

        Args:
            starter: the process that has started this one; not its parent where a fork server stands between them.
        """
        if self._filtered_pid == os.getpid():
            return
        self._filtered_pid = os.getpid()
        _WANTED.depth = 0
        if signal.getsignal(signal.SIGTERM) is ignore_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
        if signal.getsignal(_NUDGE) is signal.SIG_DFL:
            signal.signal(_NUDGE, ignore_signal)
        self._spare_programs()
        threading.Thread(target=_heed, args=(starter, os.getppid()), name="sigterm", daemon=True).start()

    def _spare_programs(self) -> None:
        """Start programs without the block, which they would inherit, so that their callers can end them."""
        if not self._spares_programs and hasattr(subprocess.Popen, "_execute_child"):
            self._spares_programs = True
            plain = subprocess.Popen._execute_child  # type: ignore[attr-defined] # noqa: SLF001 - there is no public one
            subprocess.Popen._execute_child = _within(_sigterm_unblocked, plain)  # type: ignore[attr-defined] # noqa: SLF001


def _heed(starter: int, parent: int) -> None:
    """Take every SIGTERM that reaches this process, and let those count that are meant for it.

    A data worker whose starter is gone ends by itself.
    """
    while True:
        received = signal.sigtimedwait(_SIGTERM, _LOOK_SECONDS)
        orphaned = os.getppid() != parent or not _exists(starter)
        worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)
        reads_data = worker_info() is not None
        if orphaned and reads_data:
            os._exit(1)  # torch's own watch looks at the parent, which is the fork server and lives on
        if received is None or not (orphaned or received.si_pid in (starter, parent, os.getpid())):
            continue
        if reads_data:
            os._exit(0)  # as torch has its data workers do, so that their end is not taken for a crash
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # reaches this thread, the only one that takes it
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
        signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)


@contextlib.contextmanager
def _sigterm_unblocked() -> Iterator[None]:
    if getattr(_WANTED, "depth", 0):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _within(context: Callable[[], Any], function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            return function(*args, **kwargs)

    return wrapped


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _armed(starter: int) -> _SigtermFilter:
    """Filter SIGTERM in this process, which is being spawned, and in those that it will start."""
    _FILTER.arm()
    _FILTER.on_start(starter)
    return _FILTER


_FILTER = _SigtermFilter()
