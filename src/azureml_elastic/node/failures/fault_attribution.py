"""Attribution of faults to hosts: which events count as a strike. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from typing import Literal

from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["FaultKind", "faulty_members", "incident_id", "strike_reason"]

FaultKind = Literal["silent", "lost", "worker", "health", "hang", "preempted", "left"]
"""What happened to a node: it beat no longer, its connection broke, its worker failed, it failed its health check, a
hang was located on it; it was preempted or left by itself."""

_SIGNAL_BASE = 128

_CRASHES = (signal.SIGSEGV, signal.SIGBUS)
"""Signals with which a process ends that a defect of memory or disk may have hit. SIGKILL is mostly the kernel out of
memory, SIGABRT an assertion, SIGILL a build for another processor: none of them is the host's fault."""

_CERTAIN = re.compile(
    r"uncorrectable[ _](?:ecc|memory|nvlink)|ecc[ _]uncorrectable|double.?bit ecc|nvrm: xid"
    r"|fallen off the bus|gpu is lost|unable to determine the device handle",
    re.IGNORECASE,
)
"""Messages of hardware faults that no program can cause."""

_SOFTWARE = re.compile(
    r"out of memory|device-side assert|no kernel image|insufficient driver|driver version"
    # A lost connection to a peer is a fault of the peer or of the network.
    r"|ncclRemoteError|remote process exited|connection (?:closed|reset) by|connection refused|broken pipe|timed out",
    re.IGNORECASE,
)
"""Messages of software or network errors; they rule out a likely hardware fault."""

_LIKELY = re.compile(
    r"cuda error: (?:unspecified launch failure|an illegal (?:memory access|instruction)|misaligned address"
    r"|unknown error|hardware stack error|invalid program counter|initialization error"
    r"|mapping of buffer|no cuda-capable device|cuda-capable device\(s\) is/are busy|system not yet initialized)"
    r"|cublas_status_(?:execution_failed|internal_error|mapping_error)"
    r"|cudnn_status_(?:execution_failed|mapping_error)"
    r"|ncclUnhandledCudaError|unhandled cuda error",
    re.IGNORECASE,
)
"""Messages of likely hardware faults. A rare programming error looks the same; its strike decays."""


def strike_reason(kind: FaultKind, exit_code: int | None = None, message: str = "") -> str | None:
    """Return why the host gets a strike, ``None`` when it gets none.

    Args:
        kind: kind of the fault.
        exit_code: exit code of the failed worker, as a shell (128 + n) or Python (-n) reports it.
        message: message of the failed worker or check.
    """
    if kind == "silent":
        return "went silent"
    if kind == "lost":
        return "lost its connection"
    if kind == "hang":
        return f"a hang was located here{': ' + _line(message) if message else ''}"
    if kind == "health":
        return f"failed its health check{': ' + _line(message) if message else ''}"
    if kind == "worker":
        return _worker_reason(exit_code, message)
    return None


def faulty_members(round_: Round, lost: Collection[str], leaving: Collection[str] = ()) -> list[Member]:
    """Return the lost members whose hosts get a strike.

    When more than half of the members are lost at once, a switch has failed or the reporting node itself is cut off, so
    that no host gets a strike.

    Args:
        round_: sealed round.
        lost: names of the lost members.
        leaving: names of the members that were preempted or left on their own.
    """
    gone = [member for member in round_.members if member.node in lost]
    if 2 * len(gone) > len(round_.members):
        return []
    return [member for member in gone if member.node not in leaving]


def incident_id(round_: Round) -> str:
    """Return the key of the incident that ended a round, the same on every node that reports it."""
    return f"round.{round_.number:06d}"


def _worker_reason(exit_code: int | None, message: str) -> str | None:
    number = -exit_code if exit_code is not None and exit_code < 0 else (exit_code or 0) - _SIGNAL_BASE
    if number in _CRASHES:
        return f"a worker ended with {signal.Signals(number).name}"
    found = _CERTAIN.search(message)
    if found is None and not _SOFTWARE.search(message):
        found = _LIKELY.search(message)
    if found is None:
        return None
    return f"a worker failed: {_line(message[message.rfind(chr(10), 0, found.start()) + 1 :])}"


def _line(text: str) -> str:
    """Return the first line of a text, of bearable length."""
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else ""
