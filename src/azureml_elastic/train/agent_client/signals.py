"""What SIGTERM means to a training process that has an agent, and what a process that ends at once leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path

from azureml_elastic.sigterm_filter import filter_sigterm_in_children, ignore_signal, sigterm_blocked

__all__ = ["end_group", "leave_sigterm_to_the_agent", "sigterm_blocked"]

_ROUNDS = 3

_SHARED_MEMORY_MANAGER = "torch_shm_manager"[:15]  # as the kernel shortens names


def leave_sigterm_to_the_agent() -> None:
    """Ignore SIGTERM here, unless the script handles it itself, and filter it in children of ``multiprocessing``.

    One that reaches all processes of a container has reached the agent too, which knows when to leave. To be called on
    the main thread; on another one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, ignore_signal)
    filter_sigterm_in_children()


def end_group() -> None:
    """SIGKILL all other processes of the group that this process leads, as each worker of an agent does.

    For a worker that ends at once: whatever it leaves behind would hold memory and ports that the next round needs.
    """
    own = os.getpid()
    if os.getpgrp() != own or sys.platform != "linux":
        return
    # It ends by itself after the others, and takes their shared memory with it, as torch's manager does.
    janitor = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    for _ in range(_ROUNDS):  # they may fork meanwhile
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:  # noqa: PTH208 - names, not paths
            with contextlib.suppress(OSError):
                if pid not in (own, janitor) and os.getpgid(pid) == own and not _removes_shared_memory(pid):
                    os.kill(pid, signal.SIGKILL)


def _removes_shared_memory(pid: int) -> bool:
    """Return whether a process is the one that removes tensors shared by torch's ``file_system`` strategy."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() == _SHARED_MEMORY_MANAGER
