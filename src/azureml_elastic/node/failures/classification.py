"""What went wrong in a worker: its kind, a signature that is the same everywhere, and the user's own traceback.

Which words make which kind is listed in ``docs/explanation/failures.md``.
"""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.config.exit_codes import AGENT_LOST
from azureml_elastic.node.failures.oom_kills import OomKillCounter
from azureml_elastic.node.failures.restart_policy import FailureKind, FailureRecord
from azureml_elastic.node.failures.tracebacks import ExceptionInfo, ParsedError, find_dump, find_error

__all__ = ["Failure", "hang_failure", "last_error", "root_cause", "signature_of"]

_READ_BYTES = 8 * 1024 * 1024
"""How far from its end a worker's standard error is searched: much may be printed after a traceback."""
_TAIL_LINES = 30
_LONGEST_MESSAGE = 16_000
"""Characters of a message; the round's row holds 30,000."""
_SIGNAL_BASE = 128
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
_HEAD = 70
_LONGEST_SIGNATURE = 120

_MEMORY_KILLS = OomKillCounter()
# Made with the agent, before any worker runs: the kernel's counter is only of use beside an earlier value.

_IMPORTS = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
_NOT_LOADED = re.compile(
    r"^\S+: (?:can't open file |can't find '__main__' module|No module named |Error while finding module spec)",
    re.MULTILINE,
)
_MEMORY = re.compile(
    r"\bout of memory\b|DefaultCPUAllocator: |Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED|out of shared memory"
)
_MEMORY_TYPES = {"OutOfMemoryError", "MemoryError", "RuntimeError", "AcceleratorError", "DistBackendError", "OSError"}
_LOST_PROCESS = re.compile(r"DataLoader worker .*(?:is killed by signal: Killed|exited unexpectedly)")
_BROKEN = re.compile(
    r"Connection (?:closed|reset|refused)|Read error|Broken pipe|[Tt]imed? ?out|Socket [Tt]imeout|connectFullMesh"
    r"|remote process exited|ncclRemoteError|unhandled system error|ncclSystemError|network error|NCCL communicator was"
    r"|No route to host|Network is unreachable|failed to pass monitoredBarrier"
)
_COLLECTIVE = re.compile(r"gloo|NCCL|nccl|c10d|ProcessGroup|Watchdog caught collective|monitoredBarrier|Socket Timeout")
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout|c10::Dist(?:Backend|Network|Store)?Error")

_VARYING = (
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b"), "#"),
    (re.compile(r"(?:/[^\s/'\":,;()]+)+/(?=[^\s/'\":,;()])"), ""),  # of a path only its last part
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)(?=[0-9]*[a-fA-F])[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"\d+(?:[.:]\d+)*"), "#"),
    (re.compile(r"\s+"), " "),
)
"""What differs from rank to rank, node to node and process to process in the message of one error."""


@dataclass(frozen=True)
class Failure:
    """A worker's end.

    Args:
        rank: global rank of the worker.
        exit_code: exit code as a shell reports it, 128 + n for a worker that signal n ended.
        message: the traceback that ended it, or its last lines.
        kind: what ended it.
        signature: the same for the same error on any rank, node or process.
        conclusive: whether two failures with this signature are surely the same error.
    """

    rank: int
    exit_code: int
    message: str
    kind: FailureKind = "user"
    signature: str = ""
    conclusive: bool = False

    def record(self, node: str, step: int | None) -> FailureRecord:
        """Return what the round's row keeps of it.

        Args:
            node: where the worker ran.
            step: the furthest step of the node's workers; ``None`` where they have no session.
        """
        return FailureRecord(self.signature, self.kind, step, node, self.rank, self.exit_code)


def root_cause(
    failures: Mapping[int, Any], stderrs: Mapping[int, str], memory_kills: OomKillCounter = _MEMORY_KILLS
) -> Failure:
    """Return the failure of this node that explains the others.

    A worker whose peer is gone, or that was stopped with its siblings, is no cause while another one is there. Of the
    causes the first one counts, and of several at once (torch's times are whole seconds) the one that says why.

    Args:
        failures: torch's ``ProcessFailure`` by global rank, at least one.
        stderrs: the file of each worker's standard error by local rank.
        memory_kills: tells whether the kernel has killed for want of memory since it was asked last.
    """
    killed = memory_kills.more()

    def order(rank: int) -> tuple[int, int, bool, int]:
        parsed, stopped = examined[rank], failures[rank].exitcode in (-signal.SIGTERM, AGENT_LOST)
        consequence = 2 if parsed.kind == "peer" else (1 if parsed.conclusive else 3) if stopped else 0
        return consequence, failures[rank].timestamp, parsed.kind == "exit" or not parsed.conclusive, rank

    examined = {
        rank: _examine(rank, failure, stderrs.get(failure.local_rank), memory_killed=killed)
        for rank, failure in failures.items()
    }
    return examined[min(examined, key=order)]


def hang_failure(rank: int, exit_code: int, message: str) -> Failure:
    """Return the failure of a worker that was stopped because it made no step for too long.

    Args:
        rank: global rank of the worker that was waited for.
        exit_code: exit code of the run if it is not restarted.
        message: where it hung: the stacks.
    """
    raised = ExceptionInfo("Hang", "no step for too long")
    return Failure(rank, exit_code, _shortened(message), "hang", signature_of(raised))


def last_error(path: Path) -> str:
    """Return the traceback in a file that ended its program, else the last lines, else nothing."""
    text = _read(path)
    parsed = find_error(text)
    return _shortened(parsed.text if parsed else _last_lines(text))


def signature_of(raised: ExceptionInfo) -> str:
    """Return a short hash of what stays the same when an error happens again elsewhere, and a readable head.

    That is the exception's type, the first line of its message without numbers, addresses, ids and folders, and the
    innermost line of the program's own code. At most 120 characters.
    """
    message = raised.message.strip().partition("\n")[0]
    for pattern, replacement in _VARYING:
        message = pattern.sub(replacement, message)
    where = raised.where
    place = f"{where.file.rpartition('/')[2]}:{where.line} {where.function}".strip() if where else ""
    digest = hashlib.sha256(f"{raised.type}\n{message}\n{place}".encode()).hexdigest()[:8]
    head = ": ".join(part for part in (raised.name, message[:_HEAD].strip()) if part)
    return f"{digest} {head}{f' ({place})' if place else ''}"[:_LONGEST_SIGNATURE]


def _examine(rank: int, failure: Any, stderr: str | None, *, memory_killed: bool) -> Failure:
    """Look at one worker's exit code, its error file and its standard error."""
    text = _read(Path(stderr)) if stderr else ""
    code = failure.exitcode if failure.exitcode > 0 else _SIGNAL_BASE - failure.exitcode
    name = _signal_name(failure.exitcode, text)
    parsed = _uncaught(failure) or find_error(text)
    stopped = bool(name) or failure.exitcode == AGENT_LOST
    if stopped and parsed is not None and not (parsed.uncaught or _ended_by(parsed, text, name)):
        parsed = None  # an error that was logged and survived
    if parsed is not None:
        chain = _without_consequences(parsed.chain)
        kind = _kind_of(chain)
        if kind == "user" and memory_killed and _LOST_PROCESS.search(parsed.chain[-1].message):
            kind = "out_of_memory"
        return Failure(rank, code, _shortened(parsed.text), kind, signature_of(chain[-1]), conclusive=kind != "peer")
    lines = _shortened(_last_lines(text))
    if name:
        return _ended_by_signal(rank, code, name, lines, text, memory_killed=memory_killed)
    if _NOT_LOADED.search(lines):
        raised = ExceptionInfo("NotLoaded", lines.rpartition("\n")[2].partition(": ")[2])
        return Failure(rank, code, lines, "import", signature_of(raised), conclusive=True)
    raised = ExceptionInfo(f"exit code {code}", lines.rpartition("\n")[2])
    message = lines or f"It ended with exit code {code} and wrote nothing to its standard error."
    return Failure(rank, code, message, "exit", signature_of(raised), conclusive=code != AGENT_LOST)


def _ended_by_signal(rank: int, code: int, name: str, lines: str, text: str, *, memory_killed: bool) -> Failure:
    dump = find_dump(text) if name in _CRASHES else None
    message = lines or f"It ended with {name}."
    if name not in _CRASHES:
        starved = name == "SIGKILL" and memory_killed
        if starved:
            message += "\nThe kernel killed it because the machine or the container ran out of memory."
        return Failure(rank, code, message, "out_of_memory" if starved else "killed", signature_of(ExceptionInfo(name)))
    if dump is None:
        # A signal by itself says too little: the next crash may be another one.
        return Failure(rank, code, message, "crashed", signature_of(ExceptionInfo(name)))
    raised = ExceptionInfo(name, dump.chain[-1].message, dump.chain[-1].frames)
    if _WATCHDOG.search(dump.text):
        return Failure(rank, code, _shortened(dump.text), "peer", signature_of(raised))
    if _MEMORY.search(raised.message):
        return Failure(rank, code, _shortened(dump.text), "out_of_memory", signature_of(raised), conclusive=True)
    return Failure(rank, code, _shortened(dump.text), "crashed", signature_of(raised), conclusive=True)


def _kind_of(chain: Sequence[ExceptionInfo]) -> FailureKind:
    """Return the kind of the last exception, or of what it was raised from if it does not say itself."""
    kind = _own_kind(chain[-1])
    for raised, before in zip(reversed(chain), reversed(chain[:-1]), strict=False):
        if kind != "user":
            break
        found = _own_kind(before)
        # Often an ImportError is only a fork in the way, while memory and peers do not come back by themselves.
        if found in ("out_of_memory", "peer") or (found == "import" and raised.caused):
            kind = found
    return kind


def _without_consequences(chain: Sequence[ExceptionInfo]) -> Sequence[ExceptionInfo]:
    """Leave off a broken connection that happened while another error was handled: cleaning up is often collective."""
    for at in range(len(chain) - 1, 0, -1):
        if _own_kind(chain[at]) != "peer":
            break
        if not chain[at].caused and _own_kind(chain[at - 1]) != "peer":
            return chain[:at]
    return chain


def _own_kind(raised: ExceptionInfo) -> FailureKind:
    if raised.name in _IMPORTS:
        return "import"
    if raised.name in ("OutOfMemoryError", "MemoryError"):
        return "out_of_memory"
    if raised.name in _MEMORY_TYPES and _MEMORY.search(raised.message):
        return "out_of_memory"
    if raised.name in ("DistNetworkError", "DistStoreError") or raised.type == "azureml_elastic.errors.Fenced":
        return "peer"
    collective = raised.name == "DistBackendError" or (
        raised.name == "RuntimeError" and _COLLECTIVE.search(raised.message)
    )
    return "peer" if collective and _BROKEN.search(raised.message) else "user"


def _signal_name(exitcode: int, text: str) -> str:
    """Return the signal that ended a worker; a shell between us and it says 128 + n, and says nothing else."""
    number = -exitcode if exitcode < 0 else exitcode - _SIGNAL_BASE
    if number <= 0 or (exitcode > 0 and find_error(text) is not None):
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "" if exitcode > 0 else f"signal {number}"


def _ended_by(parsed: ParsedError, text: str, name: str) -> bool:
    """Tell whether a process that a signal ended had died of this error before.

    An interpreter that ends by an exception may still be aborted while it takes its libraries down, and Ctrl-C is an
    exception too. Nothing but such words follows then.
    """
    if name == "SIGINT":
        return parsed.chain[-1].name == "KeyboardInterrupt"
    last = parsed.text.rpartition("\n")[2]
    rest = text.rpartition(last)[2].strip()
    return (
        name in _CRASHES and not parsed.harmless and (not rest or rest.startswith(("terminate called", "Fatal Python")))
    )


def _uncaught(failure: Any) -> ParsedError | None:
    """Return the error that torch's ``record`` decorator has written to the worker's error file."""
    data = getattr(failure, "error_file_data", {}).get("message")
    stack = data.get("extraInfo", {}).get("py_callstack") if isinstance(data, Mapping) else None
    return find_error(stack) if isinstance(stack, str) else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:]).strip()


def _shortened(text: str) -> str:
    """Leave out the middle of a text that is too long: both ends of a traceback tell more."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
