"""Failures of workers that are those of their host: a strike against it."""

from __future__ import annotations

import signal

from azureml_elastic.node.failures.messages import HARDWARE_FAULT, LIKELY_HARDWARE_FAULT, NO_HARDWARE_FAULT

_SIGNAL_BASE = 128
_LONGEST_LINE = 200

_CRASHES = (signal.SIGSEGV, signal.SIGBUS)
"""Signals that defective memory or disks may cause. SIGKILL mostly means exhausted memory, SIGABRT a failed assertion,
SIGILL a build for another processor."""


def worker_fault(exit_code: int, message: str) -> str | None:
    """Return the reason for a strike against the host of a failed worker, ``None`` if the host is not at fault.

    Args:
        exit_code: exit code of the worker, as a shell (128 + n) or Python (-n) reports it.
    """
    number = -exit_code if exit_code < 0 else exit_code - _SIGNAL_BASE
    if number in _CRASHES:
        return f"a worker ended with {signal.Signals(number).name}"
    found = HARDWARE_FAULT.search(message)
    if found is None and not NO_HARDWARE_FAULT.search(message):
        found = LIKELY_HARDWARE_FAULT.search(message)
    if found is None:
        return None
    line = message[message.rfind("\n", 0, found.start()) + 1 :].strip().partition("\n")[0]
    return f"a worker failed: {line[:_LONGEST_LINE]}"
