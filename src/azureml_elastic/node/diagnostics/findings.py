"""Findings about a node, and a check that gathers them on threads, so that nothing that hangs can hang the node."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Check", "CheckRunner", "DiagnosticReport", "Finding", "Status"]

_LOG = logging.getLogger(__name__)

Status = Literal["ok", "warn", "fail"]
"""``warn`` lets the node join, ``fail`` does not."""

_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")

_GRACE_SECONDS = 0.5
"""Beyond its limit, for a probe whose thread was kept from running, as by the import of a large package."""


@dataclass(frozen=True)
class Finding:
    """What one probe has found.

    Args:
        name: name of the check.
        status: what follows from it.
        value: what was found, with its unit.
        limit: what was wanted, with its unit.
        advice: the next step, where there is one to take.
    """

    name: str
    status: Status
    value: str
    limit: str = ""
    advice: str = ""

    def __str__(self) -> str:
        limit = f" (wanted: {self.limit})" if self.limit else ""
        return f"{self.name}: {self.value}{limit}" + (f". {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class DiagnosticReport:
    """All findings about a node.

    Args:
        findings: findings in the order of the checks.
        seconds: time until the last check had ended or timed out.
    """

    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        return max((finding.status for finding in self.findings), key=_ORDER.index, default="ok")

    @property
    def failed(self) -> bool:
        """Whether the node must not join."""
        return self.status == "fail"

    def lines(self, *statuses: Status) -> tuple[str, ...]:
        """Return one line for each finding of these statuses."""
        return tuple(str(finding) for finding in self.findings if finding.status in statuses)

    def table(self) -> str:
        """Return all findings as aligned columns."""
        rows = [("check", "status", "found", "wanted")]
        rows += [(finding.name, finding.status, finding.value, finding.limit) for finding in self.findings]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        advice = [f"{finding.name}: {finding.advice}" for finding in self.findings if finding.advice]
        return "\n".join([*lines, *advice, f"{self.status} after {self.seconds:.2f} s"])


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Args:
        name: name of the finding if the check does not return one.
        look: returns the findings; may hang or raise, and runs on a thread of its own.
        limit: seconds it may take.
        late: the finding when it takes longer. Its ``value`` is filled in.
    """

    name: str
    look: Callable[[], Finding | Sequence[Finding]]
    limit: float
    late: Finding


class CheckRunner:
    """Runs probes side by side from the moment it is made.

    A probe that hangs, as a system call on a dead mount does, is left behind on its daemon thread.

    Args:
        probes: what to look at.
    """

    def __init__(self, probes: Iterable[Check]) -> None:
        self._probes = tuple(probes)
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._found: dict[int, tuple[Finding, ...]] = {}
        self._finished = self._started
        for index, probe in enumerate(self._probes):
            threading.Thread(target=self._run, args=(index, probe), name=f"health {probe.name}", daemon=True).start()

    def wait(self) -> DiagnosticReport:
        """Return the findings once each probe has answered or its time is over. Never raises."""
        grace = time.monotonic() + _GRACE_SECONDS
        findings: list[Finding] = []
        with self._changed:
            for index, probe in enumerate(self._probes):
                until = max(self._started + probe.limit, grace)
                while index not in self._found and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                late = replace(probe.late, value=f"no answer within {probe.limit:g} s")
                if index not in self._found:
                    self._finished = time.monotonic()
                findings += self._found.get(index, (late,))
            return DiagnosticReport(tuple(findings), self._finished - self._started)

    def _run(self, index: int, probe: Check) -> None:
        try:
            found = probe.look()
        except Exception as error:  # noqa: BLE001 - a probe that is broken must not stop a node that may be well
            _LOG.debug("The probe %s has failed.", probe.name, exc_info=True)
            found = Finding(probe.name, "warn", f"not checked: {type(error).__name__}: {error}", probe.late.limit)
        with self._changed:
            self._found[index] = (found,) if isinstance(found, Finding) else tuple(found)
            self._finished = time.monotonic()
            self._changed.notify_all()
