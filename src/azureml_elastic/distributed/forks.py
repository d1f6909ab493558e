"""What a forked child does with the garbage of its parent: nothing.

A process group that nobody uses any more is part of a reference cycle with the model or session that did. Where a
forked data worker collects it, gloo joins threads that only the parent has, which is a segmentation fault. Hence no
garbage is collected while a process forks, and what the child has inherited is never collected there (``gc.freeze``);
its memory stays shared with the parent, too. What a child makes itself is collected as ever.
"""

from __future__ import annotations

import gc
import os
import threading

__all__ = ["freeze_inherited_garbage"]


class _Forks:
    """The collector's state around forks, of which several threads may be in the middle."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._enabled = False
        self._armed = False

    def arm(self) -> None:
        if not self._armed:
            self._armed = True
            os.register_at_fork(before=self.before, after_in_parent=self.in_parent, after_in_child=self.in_child)

    def before(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def in_parent(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._enabled:
                gc.enable()

    def in_child(self) -> None:
        self._lock, self._depth = threading.RLock(), 0  # another thread of the parent may have held it
        gc.freeze()
        if self._enabled:
            gc.enable()


_FORKS = _Forks()


def freeze_inherited_garbage() -> None:
    """Have every child that this process forks from now on leave alone what it inherits. Again does nothing."""
    _FORKS.arm()
