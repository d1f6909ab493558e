"""The end of the interpreter while a session is open."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.05


class ExitHooks:
    """Hooks that finish a session when the script has run to its end without an error.

    A script that ends with an uncaught exception is not finished: its state may be that of half a step. It exits with 1
    as it would by itself, but without the interpreter's teardown, in which threads of an open process group can abort
    the process. A failure to finish exits with 1, too; the interpreter would print it and exit with 0.

    Args:
        finish: function called at the end of a script that has not failed
        close: function called at the end of every script
        failing: function called with an uncaught exception before it is printed; it may end the process instead

    Attributes:
        failed: whether the script has failed
    """

    def __init__(
        self, finish: Callable[[], None], close: Callable[[], None], failing: Callable[[BaseException], None]
    ) -> None:
        self.failed = False
        self._finish, self._close, self._failing = finish, close, failing
        self._process = os.getpid()
        self._hook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._on_exit)

    def cancel(self) -> None:
        """Remove the hooks; after a failure that of uncaught exceptions stays, because one is about to arrive."""
        atexit.unregister(self._on_exit)
        if self.failed:
            self._finish = self._close = lambda: None
            self._failing = lambda _: None
        elif sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook

    def _on_uncaught(self, *details: Any) -> None:
        self.failed = True
        if os.getpid() == self._process:
            self._failing(details[1])
        self._hook(*details)
        interrupted = isinstance(details[1], KeyboardInterrupt)  # the interpreter ends itself by the signal then
        # An interactive interpreter goes on after an exception.
        if os.getpid() == self._process and not interrupted and not hasattr(sys, "ps1"):
            leave_quickly(1)

    def _on_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a process that the script has forked; the session belongs to its parent
        try:
            if not self.failed:
                self._finish()
        except BaseException:  # noqa: BLE001 - the interpreter would print it and exit with 0
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._close()


def all_arrive(key: str, world_size: int, timeout: float) -> bool:
    """Return whether all ranks of the default process group call this with the same key within a time in seconds."""
    if world_size == 1:
        return True
    until = time.monotonic() + timeout
    try:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - a collective would wait without limit
        arrived = store.add(key, 1)
        while arrived < world_size and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            arrived = store.add(key, 0)
        if arrived < world_size:  # ranks that arrive from now on must not count this one
            arrived = store.add(key, -1) + 1
            if arrived >= world_size:  # the last one came in between, and counts on this one
                store.add(key, 1)
    except (RuntimeError, ValueError):  # the process group or its store is closed
        return False
    return arrived >= world_size


def leave_quickly(code: int) -> None:
    """Make the interpreter exit at once after the script's ``finally`` clauses and ``atexit`` functions.

    Its teardown of torch's objects would take most of a second in a forked process, and the next worker starts only
    when this process has exited.
    """

    def leave() -> None:
        if os.getpid() != process:
            return
        atexit.unregister(leave)
        atexit._run_exitfuncs()  # noqa: SLF001 - those registered before; they would be called after this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    process = os.getpid()
    atexit.register(leave)
