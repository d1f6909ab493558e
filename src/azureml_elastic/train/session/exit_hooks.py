"""The end of the interpreter, seen from a session that nobody has finished."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["ExitHooks", "leave_quickly"]


class ExitHooks:
    """Finishes a session when the script has run to its end, and only then.

    A script that ends with an uncaught exception is not finished: its state may be that of half a step. It ends with 1
    as it would by itself, but without taking the interpreter apart: threads of a process group that nobody has left can
    abort the process there, and the agent would judge it by that. A failure to finish ends the process with 1, too,
    where the interpreter would print it and report success.

    Args:
        finish: called at the end of a script that has not failed.
        close: called at the end of every script.
        failing: called with an uncaught exception before it is printed; may end the process instead.

    Attributes:
        failed: whether the script has failed.
    """

    def __init__(
        self, finish: Callable[[], None], close: Callable[[], None], failing: Callable[[BaseException], None]
    ) -> None:
        self.failed = False
        self._finish = finish
        self._close = close
        self._failing = failing
        self._process = os.getpid()
        self._hook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._on_exit)

    def cancel(self) -> None:
        """Do nothing more about the session; the exception of a block that has failed is still to come."""
        atexit.unregister(self._on_exit)
        if self.failed:
            self._finish = self._close = _nothing
            self._failing = _nothing
        elif sys.excepthook == self._on_uncaught:
            sys.excepthook = self._hook

    def _on_uncaught(self, *details: Any) -> None:
        self.failed = True
        if os.getpid() == self._process:
            self._failing(details[1])
        self._hook(*details)
        interrupted = isinstance(details[1], KeyboardInterrupt)  # the interpreter ends itself by the signal then
        if os.getpid() == self._process and not interrupted and not hasattr(sys, "ps1"):
            leave_quickly(1)

    def _on_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a fork that the script made; the session is its parent's
        try:
            if not self.failed:
                self._finish()
        except BaseException:  # noqa: BLE001 - see above
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._close()


def _nothing(*_: object) -> None:
    """The session is over."""


def leave_quickly(code: int) -> None:
    """Have the interpreter end at once after the script's ``finally`` clauses and what is registered with ``atexit``.

    It would take most of a second to take all objects of torch apart, page by page in a forked process, and the next
    worker starts when this process is gone.

    Args:
        code: with which the process exits.
    """

    def leave() -> None:
        if os.getpid() != process:
            return
        atexit.unregister(leave)
        atexit._run_exitfuncs()  # noqa: SLF001 - all others, as they would be called after this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    process = os.getpid()
    atexit.register(leave)
