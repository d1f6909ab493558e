"""Checks whether a process may be forked.

A fork copies one thread: locks held by other threads stay locked in the child. A process that has opened a GPU driver
leaves its children an unusable one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

from azureml_elastic.forks.optimizer_steps import open_paths
from azureml_elastic.plurals import counted

_PR_SET_PDEATHSIG = 1
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_SETTLE_SECONDS = 0.2
"""Time for which a joined thread may remain in ``/proc``."""


def end_with(parent: int) -> None:
    """Have the kernel end this process, a fork, when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def why_unsafe() -> str | None:
    """Return what the imports have done so that this process must not be forked, or ``None``.

    Native threads are checked after a fork, by :func:`leftover_threads`.
    """
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"started {counted(len(threads), 'thread')} ({', '.join(threads)})"
    if devices := open_devices(_DEVICES):
        return f"opened {', '.join(devices)}"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "initialised CUDA"
    return None


def leftover_threads() -> str | None:
    """Return, just after a fork, which threads the imports have started and are left, or ``None``.

    Thread pools with fork handlers, such as OpenBLAS's, stop before a fork and restart on demand.
    """
    until = time.monotonic() + _SETTLE_SECONDS
    while (threads := native_threads()) and time.monotonic() < until:
        time.sleep(0.002)
    if not threads:
        return None
    names = sorted({name for name in map(_thread_name, threads) if name})
    return f"started {counted(len(threads), 'native thread')} ({', '.join(names)})"


def trial_fork() -> str | None:
    """Fork a process that exits at once, and return what the imports have done that made it unsafe, or ``None``."""
    reason = why_unsafe()
    if reason is not None:
        return reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, which are counted below
        child = os.fork()
    if child == 0:
        os._exit(0)
    reason = leftover_threads()
    os.waitpid(child, 0)
    return reason


def open_devices(prefixes: tuple[str, ...]) -> list[str]:
    """Return the open paths of this process that begin with one of the prefixes."""
    return sorted({path for path in open_paths() if path.startswith(prefixes)})


def _thread_name(task: Path) -> str:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def native_threads() -> list[Path]:
    """Return the ``/proc`` folders of all threads that make a fork unsafe, if they do not end before it."""
    return [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
