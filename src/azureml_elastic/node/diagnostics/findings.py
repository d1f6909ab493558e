"""Findings about a machine, and a runner that performs checks on threads with time limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

_LOG = logging.getLogger(__name__)

Status = Literal["ok", "warn", "fail"]
"""``warn`` lets the node join, ``fail`` does not."""

_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")

_GRACE_SECONDS = 0.5
"""Additional time for a check whose thread was delayed, for instance by the import of a large package."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        value: measured value, with its unit.
        limit: required value, with its unit.
        advice: what to do unless the status is ``ok``.
    """

    name: str
    status: Status
    value: str
    limit: str = ""
    advice: str = ""

    @property
    def found(self) -> str:
        """The value and, if there is one, the limit."""
        return f"{self.value} (wanted: {self.limit})" if self.limit else self.value

    def __str__(self) -> str:
        return f"{self.name}: {self.found}" + (f". {self.advice}" if self.advice and self.status != "ok" else "")


@dataclass(frozen=True)
class DiagnosticReport:
    """All findings about a machine.

    Args:
        seconds: time until the last check had ended or timed out.
    """

    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The worst status of the findings."""
        return max((finding.status for finding in self.findings), key=_ORDER.index, default="ok")

    @property
    def failed(self) -> bool:
        """Whether a check failed, so that the node must not join."""
        return self.status == "fail"

    def lines(self, *statuses: Status) -> tuple[str, ...]:
        """Return one line for each finding of these statuses."""
        return tuple(str(finding) for finding in self.findings if finding.status in statuses)

    def text(self) -> str:
        """Return the findings as aligned lines, with advice below those that are not ``ok``."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.name.ljust(width)}  {finding.status.ljust(4)}  {finding.found}")
            if finding.advice and finding.status != "ok":
                lines.append(" " * (width + 8) + finding.advice)  # in one line, so that commands can be copied
        return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """Check of one subject.

    Args:
        look: function that returns the findings; may hang or raise.
        late: finding after the time limit, without its ``value``.
    """

    name: str
    look: Callable[[], Finding | Sequence[Finding]]
    limit: float
    late: Finding


class CheckRunner:
    """Runner of concurrent checks, which start at construction.

    A check that hangs, for instance in a system call on a dead mount, is abandoned on its daemon thread.
    """

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks = tuple(checks)
        self._started = self._finished = time.monotonic()
        self._changed = threading.Condition()
        self._found: dict[int, tuple[Finding, ...]] = {}
        for index, check in enumerate(self._checks):
            threading.Thread(target=self._run, args=(index, check), name=f"health {check.name}", daemon=True).start()

    def wait(self) -> DiagnosticReport:
        """Return the findings once each check has ended or timed out. Never raises."""
        grace = time.monotonic() + _GRACE_SECONDS
        findings: list[Finding] = []
        with self._changed:
            for index, check in enumerate(self._checks):
                # Counted from the start of the checks, which was long before this call: they run while other parts of
                # the node are made.
                until = max(self._started + check.limit, grace)
                while index not in self._found and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                if index not in self._found:
                    self._finished = time.monotonic()
                late = replace(check.late, value=f"no answer within {check.limit:g} s")
                findings += self._found.get(index, (late,))
            return DiagnosticReport(tuple(findings), self._finished - self._started)

    def _run(self, index: int, check: Check) -> None:
        try:
            found = check.look()
        except Exception as error:  # noqa: BLE001 - a defective check must not keep a healthy node from joining
            _LOG.debug("The check %s failed.", check.name, exc_info=True)
            found = Finding(check.name, "warn", f"not checked: {type(error).__name__}: {error}", check.late.limit)
        with self._changed:
            self._found[index] = (found,) if isinstance(found, Finding) else tuple(found)
            self._finished = time.monotonic()
            self._changed.notify_all()
