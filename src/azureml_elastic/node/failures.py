"""What went wrong in a worker, told in the user's own traceback."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.spec.exit_codes import AGENT_LOST

__all__ = ["Failure", "first_failure", "last_error"]

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 30
_SIGNAL_BASE = 128


@dataclass(frozen=True)
class Failure:
    """A worker's end.

    Args:
        rank: global rank of the worker.
        exit_code: as a shell would report it: 128 + n for a worker that signal n ended.
        message: the last traceback of its standard error, or its last lines.
    """

    rank: int
    exit_code: int
    message: str


def first_failure(failures: Mapping[int, Any], stderrs: Mapping[int, str]) -> Failure:
    """Return the failure that came first, by the clock of this one node.

    Args:
        failures: torch's ``ProcessFailure`` by global rank, at least one.
        stderrs: the file of each worker's standard error by local rank.
    """

    def order(global_rank: int) -> tuple[bool, int, bool, int]:
        # The siblings of a failed worker are ended with it, and torch's time stamps are whole seconds.
        failure = failures[global_rank]
        told = "Traceback" in last_error(Path(stderrs.get(failure.local_rank, "")))
        return failure.exitcode in (-signal.SIGTERM, AGENT_LOST), failure.timestamp, not told, global_rank

    rank = min(failures, key=order)
    failure = failures[rank]
    code = failure.exitcode
    path = stderrs.get(failure.local_rank)
    message = last_error(Path(path)) if path else ""
    return Failure(
        rank, code if code > 0 else _SIGNAL_BASE - code, message or f"It ended with {failure.signal_name()}."
    )


def last_error(path: Path) -> str:
    """Return the last traceback in a file, else its last lines, else nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    start = text.rfind("Traceback (most recent call last)")
    if start >= 0:
        return text[start:].strip()
    return "\n".join(text.splitlines()[-_TAIL_LINES:]).strip()
