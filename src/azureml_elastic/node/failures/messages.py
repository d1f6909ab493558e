"""What CUDA, NCCL, gloo, torch and the driver print, as regular expressions by what it says about a failure."""

from __future__ import annotations

import re


def _any(*texts: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile("|".join(texts), flags)


OUT_OF_MEMORY = _any(
    *(r"\bout of memory\b", "DefaultCPUAllocator: ", "Cannot allocate memory", "out of shared memory"),
    "CUBLAS_STATUS_ALLOC_FAILED",
)
KILLED_LOADER = _any(r"DataLoader worker .*(?:is killed by signal: Killed|exited unexpectedly)")
"""A process of a ``DataLoader`` was killed, perhaps by the kernel for want of memory."""

COLLECTIVE = _any("gloo|NCCL|nccl|c10d|ProcessGroup|monitoredBarrier|Watchdog caught collective|Socket Timeout")
BROKEN_CONNECTION = _any(
    *(r"Connection (?:closed|reset|refused)", "Read error", "Broken pipe", "[Tt]imed? ?out", "Socket [Tt]imeout"),
    *("connectFullMesh", "remote process exited", "ncclRemoteError", "unhandled system error", "ncclSystemError"),
    *("network error", "NCCL communicator was", "No route to host", "Network is unreachable"),
    "failed to pass monitoredBarrier",
)
TIMEOUT = _any(
    *(r"Timed out waiting \d+ms for (?:recv|send) operation", "Watchdog caught collective operation timeout"),
    "failed to pass monitoredBarrier",
)
"""A collective has waited for other ranks for its whole timeout, while their connections were there."""
WATCHDOG = _any("Watchdog caught collective operation timeout", r"c10::Dist(?:Backend|Network|Store)?Error")
"""The process was aborted because of a collective."""

HARDWARE_FAULT = _any(
    *(r"uncorrectable[ _](?:ecc|memory|nvlink)", r"ecc[ _]uncorrectable", "double.?bit ecc", "nvrm: xid"),
    *("fallen off the bus", "gpu is lost", "unable to determine the device handle"),
    flags=re.IGNORECASE,
)
"""Faults that no program can cause."""
NO_HARDWARE_FAULT = _any(
    *("out of memory", "device-side assert", "no kernel image", "insufficient driver", "driver version", "timed out"),
    *("ncclRemoteError", "remote process exited", r"connection (?:closed|reset) by", "connection refused"),
    "broken pipe",
    flags=re.IGNORECASE,
)
"""Errors of the program, a peer or the network; they rule out a likely hardware fault."""
LIKELY_HARDWARE_FAULT = _any(
    r"cuda error: (?:unspecified launch failure|an illegal (?:memory access|instruction)|misaligned address"
    r"|unknown error|hardware stack error|invalid program counter|initialization error|mapping of buffer"
    r"|no cuda-capable device|cuda-capable device\(s\) is/are busy|system not yet initialized)",
    r"cublas_status_(?:execution_failed|internal_error|mapping_error)",
    *(r"cudnn_status_(?:execution_failed|mapping_error)", "ncclUnhandledCudaError", "unhandled cuda error"),
    flags=re.IGNORECASE,
)
"""Likely hardware faults. A rare programming error causes the same messages; its strike decays."""
