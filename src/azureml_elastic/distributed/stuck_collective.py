"""Detection of a thread that is stuck in a collective whose connections are closed.

When a connection breaks, gloo fails the operations on it, except for queued sends that the socket had no room for
(``Pair::signalException`` in ``transport/tcp/pair.cc`` omits the unbound buffers in ``tx_``; torch 2.13). A thread that
waits for such a send stays blocked for torch's timeout of 30 minutes. It is recognised by two signs together: its
position in torch does not change, and it uses no processor time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from azureml_elastic.distributed import control_group

_STILL_SECONDS = 1.0
"""Time without progress after which a thread is stuck; other collectives fail within milliseconds."""

_SAMPLE_SECONDS = 0.1

_IDLE_SHARE = 0.01
"""Share of a processor that a blocked thread may use."""

_TORCH = Path(torch.__file__).parent
_COLLECTIVES = (*(str(_TORCH / part) for part in ("distributed", "nn/parallel", "autograd")), control_group.__file__)
"""Modules that wait for collectives; a backward pass waits for those of its gradients."""


def is_stuck(thread: int, still_wanted: Callable[[], bool]) -> bool:
    """Wait until a thread is stuck in a collective, after :meth:`ProcessGroups.abort`; return whether it is."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return False
    clock = time.pthread_getcpuclockid(thread)
    position, since, used = None, 0.0, 0.0
    while still_wanted():
        now, cpu, here = time.monotonic(), time.clock_gettime(clock), _collective(thread)
        if here is None or here != position or cpu - used > _IDLE_SHARE * max(now - since, _SAMPLE_SECONDS):
            position, since, used = here, now, cpu
        elif now - since >= _STILL_SECONDS:
            return True
        time.sleep(_SAMPLE_SECONDS)
    return False


def _collective(thread: int) -> tuple[int, int] | None:
    """Return the position of the thread, ``None`` unless it is inside a collective."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented; the frame must not be kept
    if frame is None or not frame.f_code.co_filename.startswith(_COLLECTIVES):
        return None
    return id(frame), frame.f_lasti
