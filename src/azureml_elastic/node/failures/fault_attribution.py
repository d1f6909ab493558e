"""Attribution of faults to hosts: which events count as a strike. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection

from azureml_elastic.node.rendezvous.state.round import Member, Round

__all__ = ["faulty_members", "incident_id", "worker_fault"]

_SIGNAL_BASE = 128
_LONGEST_LINE = 200

_CRASHES = (signal.SIGSEGV, signal.SIGBUS)
"""Signals that defective memory or disks may cause. SIGKILL mostly means exhausted memory, SIGABRT a failed assertion,
SIGILL a build for another processor."""

_CERTAIN = re.compile(
    r"uncorrectable[ _](?:ecc|memory|nvlink)|ecc[ _]uncorrectable|double.?bit ecc|nvrm: xid"
    r"|fallen off the bus|gpu is lost|unable to determine the device handle",
    re.IGNORECASE,
)
"""Messages of hardware faults that no program can cause."""

_SOFTWARE = re.compile(
    r"out of memory|device-side assert|no kernel image|insufficient driver|driver version"
    r"|ncclRemoteError|remote process exited|connection (?:closed|reset) by|connection refused|broken pipe|timed out",
    re.IGNORECASE,
)
"""Messages of errors of the program, a peer or the network; they rule out a likely hardware fault."""

_LIKELY = re.compile(
    r"cuda error: (?:unspecified launch failure|an illegal (?:memory access|instruction)|misaligned address"
    r"|unknown error|hardware stack error|invalid program counter|initialization error"
    r"|mapping of buffer|no cuda-capable device|cuda-capable device\(s\) is/are busy|system not yet initialized)"
    r"|cublas_status_(?:execution_failed|internal_error|mapping_error)"
    r"|cudnn_status_(?:execution_failed|mapping_error)"
    r"|ncclUnhandledCudaError|unhandled cuda error",
    re.IGNORECASE,
)
"""Messages of likely hardware faults. A rare programming error causes the same messages; its strike decays."""


def worker_fault(exit_code: int, message: str) -> str | None:
    """Return the reason for a strike against the host of a failed worker, ``None`` if the host is not at fault.

    Args:
        exit_code: exit code of the worker, as a shell (128 + n) or Python (-n) reports it.
        message: message of the failure.
    """
    number = -exit_code if exit_code < 0 else exit_code - _SIGNAL_BASE
    if number in _CRASHES:
        return f"a worker ended with {signal.Signals(number).name}"
    found = _CERTAIN.search(message) or (None if _SOFTWARE.search(message) else _LIKELY.search(message))
    if found is None:
        return None
    line = message[message.rfind("\n", 0, found.start()) + 1 :].strip().partition("\n")[0]
    return f"a worker failed: {line[:_LONGEST_LINE]}"


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
    """Return the key of the incident that ended a round, equal on all nodes that report it."""
    return f"round.{round_.number:06d}"
