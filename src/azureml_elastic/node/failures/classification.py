"""Classification of worker failures: kind, signature and message.

``docs/explanation/failures.md`` describes the kinds. Pure functions, but for the files that they read.

The exception that ended a worker is in its error file (see :mod:`azureml_elastic.forks.uncaught_error`). Of a
worker without one, which a signal or a program of another kind has ended, standard error is parsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.free_space import is_full
from azureml_elastic.ledger.sentences import headline
from azureml_elastic.memory import OomKillCounter
from azureml_elastic.node.core.failures import Failure, FailureKind
from azureml_elastic.node.failures import messages
from azureml_elastic.node.failures.tracebacks import ExceptionInfo, Frame, ParsedError, find_dump, find_error, frame_in

_READ_BYTES = 8 * 1024 * 1024
"""Size of the searched end of a worker's standard error; a traceback may be followed by much other output."""
_TAIL_LINES = 30
_LONGEST_MESSAGE = 16_000
"""Characters of a message; a round's row holds 30,000."""
_LONGEST_HEAD = 70
_LONGEST_SIGNATURE = 120
_SIGNAL_BASE = 128
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")

_OOM_KILLS = OomKillCounter()  # created with the agent: only kills after its construction are reported

_IMPORTS = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
_NOT_LOADED = re.compile(
    r"^\S+: (?:can't open file |can't find '__main__' module|No module named |Error while finding module spec)",
    re.MULTILINE,
)
_MEMORY_TYPES = {"OutOfMemoryError", "MemoryError", "RuntimeError", "AcceleratorError", "DistBackendError", "OSError"}
# In this order: identifiers, addresses and folders before the numbers in them.
_VARYING = (
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b"), "#"),
    (re.compile(r"(?:/[^\s/'\":,;()]+)+/(?=[^\s/'\":,;()])"), ""),  # the folders of a path
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)(?=[0-9]*[a-fA-F])[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"\d+(?:[.:]\d+)*"), "#"),
    (re.compile(r"\s+"), " "),
)
"""Parts of a message that differ between ranks, nodes and processes, and their replacements in the signature."""


_FULL = "The disk of {} is full, so what the worker printed last may be missing. Free space on it."


@dataclass(frozen=True)
class FailedWorker:
    """A worker process that did not end well.

    Args:
        exitcode: its exit code, negative for a signal.
        timestamp: time of the failure in seconds since 1970, as recorded by the worker, else when it was noticed.
        stderr: file of its standard error.
        error: the exception in its error file, ``None`` without one.
    """

    exitcode: int
    timestamp: int
    stderr: Path
    error: ParsedError | None = None

    @classmethod
    def read(cls, exitcode: int, error_file: Path, stderr: Path) -> FailedWorker:
        """Return the failure with the content of the worker's error file, which may be missing or torn."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(error_file.read_text(encoding="utf-8"))
            details = data["message"]["extraInfo"]
            return cls(exitcode, int(details["timestamp"]), stderr, _recorded_error(data, details["py_callstack"]))
        return cls(exitcode, int(time.time()), stderr)


def _recorded_error(data: Mapping[str, Any], text: str) -> ParsedError | None:
    """Return the error in an error file: that of the worker's own hook, else that of torch's ``record`` decorator."""
    if not data.get("chain"):
        # The decorator writes what gets past the function that it decorates. The program may have gone on all the same.
        return find_error(_encodable(text))
    chain = []
    for each in data["chain"]:
        message = _encodable(each["message"])
        frames = [Frame(_encodable(file), line, function) for file, line, function in each["frames"]]
        # Of another process's traceback, which DataLoader includes in the message.
        frames += [frame for line in message.splitlines() if (frame := frame_in(line))]
        chain.append(ExceptionInfo(each["type"], message, tuple(frames), each["caused"]))
    # torch puts the traceback of a process that it has started into the message of an exception of its own kind.
    inner = find_error(chain[-1].message)
    return ParsedError(_encodable(text), inner.chain if inner else tuple(chain), uncaught=True)


def _encodable(text: str) -> str:
    """Escape half surrogate pairs, as standard error does: JSON holds them, and neither hashes nor tables take them."""
    return text.encode("utf-8", "backslashreplace").decode()


def root_cause(failures: Mapping[int, FailedWorker], oom_kills: OomKillCounter = _OOM_KILLS) -> Failure:
    """Return the failure of this node that caused the others.

    A worker that lost a peer or was terminated with its siblings is only chosen if there is no other failure. Of the
    others the earliest is chosen; of several in the same second (the resolution of torch's times), a conclusive one.

    Args:
        failures: failed workers by global rank, at least one.
    """
    oom_killed = oom_kills.more()
    examined = {rank: _examine(rank, failure, oom_killed=oom_killed) for rank, failure in failures.items()}

    # A worker that lost a peer, or has waited for one, comes after all that failed by themselves. One that was stopped
    # and has an error of its own had failed before and hung at its exit; without an error it is no cause.
    def order(rank: int) -> tuple[int, int, bool, int]:
        found, stopped = examined[rank], failures[rank].exitcode == -signal.SIGTERM
        waited = {"timeout": 2, "peer": 3}.get(found.kind)
        consequence = waited or ((1 if found.conclusive else 4) if stopped else 0)
        return consequence, failures[rank].timestamp, found.kind == "exit" or not found.conclusive, rank

    return examined[min(examined, key=order)]


def describe_ending(failure: Failure) -> str:
    """Return a failure's exit code, and the exception in one line where there is one."""
    raised = f": {headline(failure.message)}" if find_error(failure.message) else ""
    return f"exit code {failure.exit_code}{raised}"


def hang_failure(rank: int, exit_code: int, message: str) -> Failure:
    """Return the failure of a worker that was stopped because it hung; the message contains the stacks."""
    raised = ExceptionInfo("Hang", "no step for too long")
    return Failure(rank, exit_code, _shortened(message), "hang", signature_of(raised))


def store_failure(rank: int, exit_code: int | None, error: str) -> Failure:
    """Return the failure of the process that serves a round's store.

    Args:
        rank: rank of the node's first worker.
        exit_code: its exit code, negative for a signal; ``None`` where it has ended with the preload server.
        error: the traceback that it has reported, empty without one.
    """
    code = 1 if exit_code is None else exit_code if exit_code >= 0 else _SIGNAL_BASE - exit_code
    parsed = find_error(error)
    if parsed is not None:
        text = _shortened(parsed.text)
        return Failure(rank, code, text, "store", signature_of(parsed.chain[-1]), conclusive=True)
    ending = "with the preload server, of which it is a fork"
    if exit_code is not None:
        ending = f"with {_signal_name(exit_code, '') or f'exit code {exit_code}'}"
    raised = ExceptionInfo("StoreEnded", ending)
    return Failure(rank, code, f"The process of the round's store ended {ending}.", "store", signature_of(raised))


def signature_of(raised: ExceptionInfo) -> str:
    """Return a hash of the parts of an error that do not vary between processes, followed by a readable summary.

    These are the exception's type, the first line of its message without numbers, addresses, ids and folders, and the
    innermost line of the program's own code. The result has at most 120 characters.
    """
    message = raised.message.strip().partition("\n")[0]
    for pattern, replacement in _VARYING:
        message = pattern.sub(replacement, message)
    where = raised.where
    location = f"{where.file.rpartition('/')[2]}:{where.line} {where.function}".strip() if where else ""
    digest = hashlib.sha256(f"{raised.type}\n{message}\n{location}".encode()).hexdigest()[:8]
    head = ": ".join(part for part in (raised.name, message[:_LONGEST_HEAD].strip()) if part)
    return f"{digest} {head}{f' ({location})' if location else ''}"[:_LONGEST_SIGNATURE]


def _examine(rank: int, failure: FailedWorker, *, oom_killed: bool) -> Failure:
    """Classify a worker by its exit code, its error file and its standard error."""
    # Where the worker's own hook has recorded it, nothing that is printed counts: it may be another process's, and the
    # hook of the script may print the exception in any form.
    recorded = failure.error is not None and failure.error.uncaught
    text = "" if recorded else _read(failure.stderr)
    code = failure.exitcode if failure.exitcode > 0 else _SIGNAL_BASE - failure.exitcode
    name = _signal_name(failure.exitcode, text)
    parsed = failure.error or find_error(text)
    if parsed is not None and (not name or parsed.uncaught or _was_fatal(parsed, text, name)):
        chain = _without_cleanup_errors(parsed.chain)
        kind = _kind_of(chain)
        if kind == "user" and oom_killed and messages.KILLED_LOADER.search(parsed.chain[-1].message):
            kind = "out_of_memory"
        conclusive = kind not in ("peer", "timeout")
        return Failure(rank, code, _shortened(parsed.text), kind, signature_of(chain[-1]), conclusive=conclusive)
    lines = _shortened("\n".join(text.splitlines()[-_TAIL_LINES:]).strip())
    if is_full(failure.stderr):
        lines = f"{lines}\n{_FULL.format(failure.stderr.parent)}".strip()
    if name:
        return _ended_by_signal(rank, code, name, lines, text, oom_killed=oom_killed)
    last_line = lines.rpartition("\n")[2]
    if _NOT_LOADED.search(lines):
        raised = ExceptionInfo("NotLoaded", last_line.partition(": ")[2])
        return Failure(rank, code, lines, "import", signature_of(raised), conclusive=True)
    message = lines or f"It ended with exit code {code} and wrote nothing to its standard error."
    signature = signature_of(ExceptionInfo(f"exit code {code}", last_line))
    return Failure(rank, code, message, "exit", signature, conclusive=True)


def _ended_by_signal(rank: int, code: int, name: str, lines: str, text: str, *, oom_killed: bool) -> Failure:
    dump = find_dump(text) if name in _CRASHES else None
    if dump is None:
        # Not conclusive: the next crash with the same signal may have another cause.
        kind: FailureKind = "crashed" if name in _CRASHES else "killed"
        message = lines or f"It ended with {name}."
        if name == "SIGKILL" and oom_killed:
            kind = "out_of_memory"
            message += "\nThe kernel killed it because the machine or the container ran out of memory."
        return Failure(rank, code, message, kind, signature_of(ExceptionInfo(name)))
    raised = ExceptionInfo(name, dump.chain[-1].message, dump.chain[-1].frames)
    if messages.WATCHDOG.search(dump.text):
        kind = "timeout" if messages.TIMEOUT.search(dump.text) else "peer"
        return Failure(rank, code, _shortened(dump.text), kind, signature_of(raised))
    kind = "out_of_memory" if messages.OUT_OF_MEMORY.search(raised.message) else "crashed"
    return Failure(rank, code, _shortened(dump.text), kind, signature_of(raised), conclusive=True)


def _kind_of(chain: Sequence[ExceptionInfo]) -> FailureKind:
    """Return the kind of the last exception, or that of an earlier one of the chain if it is an ordinary exception."""
    kind = _own_kind(chain[-1])
    for raised, before in zip(reversed(chain), reversed(chain[:-1]), strict=False):
        if kind != "user":
            break
        found = _own_kind(before)
        # A handled ImportError is often deliberate (an optional package); exhausted memory or a lost peer never is.
        if found in ("out_of_memory", "peer", "timeout") or (found == "import" and raised.caused):
            kind = found
    return kind


def _without_cleanup_errors(chain: Sequence[ExceptionInfo]) -> Sequence[ExceptionInfo]:
    """Drop broken connections that were raised while another error was handled: cleanup is often collective."""
    for at in range(len(chain) - 1, 0, -1):
        if _own_kind(chain[at]) not in ("peer", "timeout"):
            break
        if not chain[at].caused and _own_kind(chain[at - 1]) not in ("peer", "timeout"):
            return chain[:at]
    return chain


def _own_kind(raised: ExceptionInfo) -> FailureKind:
    """Return the kind of one exception, regardless of its chain."""
    if raised.name in _IMPORTS:
        return "import"
    if raised.type == "azureml_elastic.errors.NonFiniteError":
        return "nonfinite"
    if raised.name in ("OutOfMemoryError", "MemoryError"):
        return "out_of_memory"
    if raised.name in _MEMORY_TYPES and messages.OUT_OF_MEMORY.search(raised.message):
        return "out_of_memory"
    # A worker that is fenced off belongs to a round that others have ended: it has lost them, not failed.
    if raised.name in ("DistNetworkError", "DistStoreError") or raised.type == "azureml_elastic.errors.Fenced":
        return "peer"
    collective = raised.name == "DistBackendError" or (
        raised.name == "RuntimeError" and messages.COLLECTIVE.search(raised.message)
    )
    if not collective or not messages.BROKEN_CONNECTION.search(raised.message):
        return "user"
    return "timeout" if messages.TIMEOUT.search(raised.message) else "peer"


def _signal_name(exitcode: int, text: str) -> str:
    """Return the signal that ended a worker, directly or behind a shell (exit code 128 + n and no traceback)."""
    number = -exitcode if exitcode < 0 else exitcode - _SIGNAL_BASE
    if number <= 0 or (exitcode > 0 and find_error(text) is not None):
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "" if exitcode > 0 else f"signal {number}"


def _was_fatal(parsed: ParsedError, text: str, name: str) -> bool:
    """Return whether this error ended a process that a signal finished, rather than being logged and survived.

    An interpreter that exits after an exception may be aborted while its libraries shut down; only the abort's own
    messages follow the traceback then. Ctrl-C is an exception, too.
    """
    if name == "SIGINT":
        return parsed.chain[-1].name == "KeyboardInterrupt"
    rest = text.rpartition(parsed.text.rpartition("\n")[2])[2].strip()
    return (
        name in _CRASHES and not parsed.harmless and (not rest or rest.startswith(("terminate called", "Fatal Python")))
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _shortened(text: str) -> str:
    """Replace the middle of a long text; both ends of a traceback are more informative."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
