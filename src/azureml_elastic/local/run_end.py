"""How a local run ends: by its nodes, or by a signal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from typing_extensions import Self

from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.ledger.events import RunEnded, WorkerFailed
from azureml_elastic.ledger.summary import NodeEnding, Report

PREEMPTED = 143
"""Exit code of a node that saved and left after SIGTERM."""

TIMED_OUT = 124
"""Exit code of a run that exceeded its time limit."""

FAULTS_MISSED = 125
"""Exit code of the command for a run that succeeded without some faults of its schedule."""

NO_NODES_LEFT = 1
"""Exit code of a run that lost all its nodes."""

Phase = Literal["going", "ending", "over"]


@dataclass(frozen=True)
class NodeStatus:
    """State of one node.

    Args:
        ending: ``running``, or the reason why the node no longer runs; ``frozen`` for a permanently frozen node.
    """

    name: str
    ending: NodeEnding = "running"
    exit_code: int | None = None
    log: Path | None = None
    last_line: str = ""

    @property
    def failed(self) -> bool:
        """Whether the node exited by itself with an error."""
        return self.ending == "exited" and self.exit_code not in (0, PREEMPTED, None)


@dataclass(frozen=True)
class RunEnd:
    """Outcome of a run as the launcher sees it."""

    outcome: Literal["succeeded", "failed", "interrupted"]
    exit_code: int
    message: str = ""


def phase(nodes: Collection[NodeStatus], ended: RunEnded | None, *, more_to_come: bool) -> Phase:
    """Return whether the run goes on, is ending (some nodes have yet to exit) or is over.

    Args:
        more_to_come: whether nodes will be added even if none is left.
    """
    # A node that is frozen for good is none: the run would never end.
    running = any(node.ending == "running" for node in nodes)
    closed = ended is not None or any(node.exit_code == 0 for node in nodes)
    if running:
        return "ending" if closed else "going"
    return "over" if closed or not more_to_come or any(node.failed for node in nodes) else "going"


def outcome_of(nodes: Collection[NodeStatus], ended: RunEnded | None, failure: WorkerFailed | None) -> RunEnd:
    """Return the outcome of a run that is over."""
    # One node that has finished is enough: the others may have been lost while the run ended.
    if any(node.exit_code == 0 for node in nodes) or (ended is not None and ended.succeeded):
        return RunEnd("succeeded", 0)
    failed = [node for node in nodes if node.failed]
    if ended is not None and ended.message:
        message = ended.message
    elif failure is not None and (ended is not None or failed):
        what = failure.process[:1].upper() + failure.process[1:]
        message = f"{what} on {failure.node} exited with {failure.exit_code}: {failure.message}"
    elif failed:
        first = failed[0]
        after = f" after {first.last_line!r}" if first.last_line else ""
        message = f"{first.name} exited with {first.exit_code}{after}; its output is in {first.log}"
    else:
        ends = ", ".join(f"{node.name} {node.ending}" for node in nodes)
        message = (
            f"All nodes have ended ({ends}) and the fault schedule adds none, so the run cannot go on. "
            "Add a node before the last one ends, for example with add@20s."
        )
    code = failed[0].exit_code if failed else None
    if code is None:
        return RunEnd("failed", NO_NODES_LEFT, message)
    return RunEnd("failed", code if code > 0 else 128 - code, message)  # after a signal as in a shell: 128 + its number


def command_exit_code(report: Report) -> int:
    """Return the exit code of ``azureml-elastic local``: that of the run, unless it succeeded and a check did not.

    It is 1 if the audit found missed or repeated samples, otherwise :data:`FAULTS_MISSED` if a fault did not happen.
    """
    if report.exit_code:
        return report.exit_code
    if report.audit is not None and report.audit.refuted:
        return FAILED
    return FAULTS_MISSED if report.missed_faults else 0


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Collector of the signals that stop a run, a context manager that installs and removes their handlers.

    Signals raise ``KeyboardInterrupt`` or ``SystemExit`` until :meth:`hold` is called or one has been received. From
    then on they are only collected, so that they cut off neither the end of the nodes nor the report. Only Python's
    default handlers are replaced: what the program ignores (``nohup``) or handles itself stays as it is, and a thread
    other than the main one has no handlers.
    """

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._raises = True
        self._replaced: list[tuple[signal.Signals, signal._HANDLER]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                handler = signal.getsignal(signum)
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._replaced.append((signum, handler))
                    signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._replaced:
            signal.signal(signum, handler)

    def hold(self) -> None:
        """Collect signals from now on, without an exception."""
        self._raises = False

    @property
    def first(self) -> signal.Signals | None:
        """The first received signal; ``None`` before."""
        return self._received[0] if self._received else None

    @property
    def hurried(self) -> bool:
        """Whether more than one signal was received."""
        return len(self._received) > 1

    def raise_received(self) -> None:
        """Raise ``KeyboardInterrupt`` after SIGINT, and ``SystemExit`` with 128 + its number after another signal.

        Without a received signal nothing is raised.
        """
        if self.first == signal.SIGINT:
            raise KeyboardInterrupt
        if self.first is not None:
            sys.exit(128 + self.first)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as Python calls it
        self._received.append(signal.Signals(signum))
        if self._raises:
            self.hold()
            self.raise_received()
