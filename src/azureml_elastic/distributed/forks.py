"""Forked processes do not collect the garbage of their parent.

An unused process group is part of a reference cycle with its model or session. If a forked data worker collects it,
gloo joins threads that exist in the parent only: a segmentation fault. Hence no garbage is collected during a fork, and
inherited objects never are in the child (``gc.freeze``), which also keeps their memory shared. New objects of the child
are collected as usual.
"""

from __future__ import annotations

import functools
import gc
import os
import threading

__all__ = ["freeze_inherited_garbage"]


class _Forks:
    """State of the garbage collector around forks, which may overlap on several threads."""

    def __init__(self) -> None:
        self._lock, self._depth, self._enabled = threading.RLock(), 0, False
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
        self._lock, self._depth = threading.RLock(), 0  # another thread of the parent may hold the old lock
        gc.freeze()
        if self._enabled:
            gc.enable()


@functools.cache
def freeze_inherited_garbage() -> None:
    """Exclude inherited objects from garbage collection in all children forked from now on. Idempotent."""
    _Forks()  # referenced by its callbacks
