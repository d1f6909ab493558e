"""Tells a thread that waits in a collective which can no longer end from one that computes.

When a connection breaks, gloo wakes whoever waits for it, but for the sends that it had queued because the socket took
no more (``Pair::signalException`` in its ``transport/tcp/pair.cc`` passes over the unbound buffers in ``tx_``; torch
2.13). Such a thread waits for torch's timeout of 30 minutes on a connection that is long gone, and nothing reaches it.
It shows in two ways at once: it stands still inside torch, and it uses no processor time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["is_stuck"]

_STILL_SECONDS = 1.0
"""How long a thread stands still until it is given up. A collective fails within milliseconds where gloo wakes it."""

_SAMPLE_SECONDS = 0.1

_IDLE_SHARE = 0.01
"""Of a processor, which a thread that waits may use."""

_TORCH = Path(torch.__file__).parent
_COLLECTIVES = tuple(str(_TORCH / part) for part in ("distributed", "nn/parallel", "autograd"))
"""Where Python stands while a collective is waited for: a backward pass waits for those of its gradients."""

Instant = tuple[int, int]


def is_stuck(thread: int, still_wanted: Callable[[], bool]) -> bool:
    """Watch a thread of this process; return true once it stands still in a collective.

    Blocks meanwhile. To be called when every collective of the process must fail at once.

    Args:
        thread: its identifier, see :func:`threading.get_ident`.
        still_wanted: asked all the time; false ends the watch, with false.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return False
    clock = time.pthread_getcpuclockid(thread)
    place, since, used = None, 0.0, 0.0
    while still_wanted():
        now, cpu, here = time.monotonic(), time.clock_gettime(clock), _collective(thread)
        if here is None or here != place or cpu - used > _IDLE_SHARE * max(now - since, _SAMPLE_SECONDS):
            place, since, used = here, now, cpu
        elif now - since >= _STILL_SECONDS:
            return True
        time.sleep(_SAMPLE_SECONDS)
    return False


def _collective(thread: int) -> Instant | None:
    """Return where the thread is, ``None`` unless that is inside a collective."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented; a frame must not be held on to
    if frame is None or not frame.f_code.co_filename.startswith(_COLLECTIVES):
        return None
    return id(frame), frame.f_lasti
