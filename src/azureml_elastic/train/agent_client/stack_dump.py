"""What a training process does so that its stacks can be had when it hangs.

A handler in C (:mod:`faulthandler`) writes the stacks of all threads into a file when a signal comes. It needs no GIL
and no Python code to run, so it works while the main thread is blocked in a collective and while it computes in C. The
signal is one of the real-time ones: user programs and their libraries take SIGUSR1 and SIGUSR2 for themselves, and a
process that has no handler dies of either. The agent therefore looks, before it sends anything, whether the process
still has this file open and catches this signal.

Processes that are forked from this one, such as the workers of a ``DataLoader``, inherit both and can be asked too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from pathlib import Path

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.stack_file import StackFile

_LOG = logging.getLogger(__name__)

_FIRST = 7
_LAST = 14
"""Offsets from SIGRTMIN: the lowest ones are taken by threading libraries, +3 and the highest by init systems."""

_registered: tuple[int, int] | None = None
"""The signal and the file descriptor of this process's registration, or of the one that it was forked from."""


def register_stack_dump(folder: str | Path, identity: WorkerIdentity) -> StackFile | None:
    """Have the stacks of this process written into a file in ``folder`` whenever a signal asks for them.

    Called again (in another round, or in a forked process) it replaces the registration before. Training never fails
    for want of it: what goes wrong is logged, and the agent falls back to what it can see from outside.

    Args:
        folder: folder on a local disk that the workers of the node share with their agent.

    Returns:
        What the file's first line says; ``None`` when stacks cannot be had this way.
    """
    unregister_stack_dump()
    number = _free_signal()
    if number is None:
        _LOG.info("No signal is free for dumps of stacks; should this process hang, they are had from outside, if so.")
        return None
    entry = StackFile(
        pid=os.getpid(),
        rank=identity.rank,
        local_rank=identity.local_rank,
        signal=number,
        main_thread=threading.main_thread().ident or 0,
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        # A bare descriptor: the handler writes to it at any time, so no object may close it when it is collected.
        descriptor = os.open(entry.path(Path(folder)), flags, 0o600)
    except OSError as error:
        _LOG.warning("Should this process hang, its stacks cannot be written: %s.", error)
        return None
    try:
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        os.write(descriptor, entry.to_line())  # last: a process that can read it may send the signal
    except (OSError, RuntimeError, ValueError) as error:
        faulthandler.unregister(number)
        os.close(descriptor)
        _LOG.warning("Should this process hang, its stacks cannot be written: %s.", error)
        return None
    global _registered  # noqa: PLW0603 - a process has one table of signal handlers, too
    _registered = number, descriptor
    return entry


def unregister_stack_dump() -> None:
    """Take the registration back; without one nothing happens."""
    global _registered  # noqa: PLW0603 - see above
    if _registered is None:
        return
    number, descriptor = _registered
    _registered = None
    faulthandler.unregister(number)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _free_signal() -> int | None:
    """Return the first signal of the range that nobody in this process handles, ignores or blocks."""
    if not hasattr(signal, "SIGRTMIN") or not hasattr(faulthandler, "register"):
        return None
    taken = 0
    try:
        # The interpreter knows only of handlers that were set through it.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in {"SigCgt", "SigIgn", "SigBlk"}:
            taken |= int(value, 16)
    candidates = range(signal.SIGRTMIN + _FIRST, signal.SIGRTMIN + _LAST + 1)
    return next((number for number in candidates if not taken >> (number - 1) & 1), None)
