"""Admission of a node to the rendezvous, once its health checks pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from azureml_elastic.config import HealthPolicy
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.core.round import Round
from azureml_elastic.node.diagnostics.findings import Check, CheckRunner, DiagnosticReport
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.table import Table

_LOG = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
"""Time between two checks of a node that has failed."""

_GIVE_UP_SECONDS = 300.0  # after which a node that keeps failing exits

_STRIKE_AFTER = 2
"""Consecutive failed checks after which the host gets a strike; a single one may be a mount that was not ready yet."""


class CheckedNode(Protocol):
    """The node that is checked."""

    def record_health(self, report: DiagnosticReport) -> None:
        """Record a report whose statuses differ from those of the one before."""

    def stay_away(self, reason: str) -> None:
        """Say that this node does not join now, after its first failed check."""

    def pause(self, seconds: float) -> None:
        """Wait before the next check; an exception ends the wait for admission."""


@dataclass
class Admission:
    """Health checks of a node before it joins; the first starts at construction, on threads.

    Args:
        strikes: writer of strikes; the host gets at most one from this agent.
        stay: whether the node keeps checking until the run ends, because its exit would end the job for all nodes.
    """

    policy: HealthPolicy
    checks: Sequence[Check]
    table: Table
    strikes: HostStrikes
    incarnation: str
    node: CheckedNode
    stay: bool = False
    report: DiagnosticReport = field(default_factory=DiagnosticReport, init=False)

    def __post_init__(self) -> None:
        # At once: the checks take seconds, in which the preload server makes its imports.
        self._runner = CheckRunner(self.checks) if self.policy.check else None

    def wait(self) -> bool:
        """Return whether this node may join; otherwise it must exit with ``UNHEALTHY``.

        A node may also join a run that has ended, which reports the outcome.
        """
        if self._runner is None:
            return True
        since: float | None = None
        failures = 0
        while True:
            self._publish(self._runner.wait())
            if not self.report.failed:
                return True
            failures += 1
            since = time.monotonic() if since is None else since
            reason = f"failed its health check: {self.report.lines('fail')[0]}"
            if failures == 1:
                self.node.stay_away(reason)
            if failures == _STRIKE_AFTER:
                self.strikes.strike(self.strikes.host, reason, f"health.{self.incarnation}")
            if self._run_closed():
                return True
            left = since + _GIVE_UP_SECONDS - time.monotonic()
            if left <= 0 and not self.stay:
                return False
            self.node.pause(_RETRY_SECONDS if self.stay else min(_RETRY_SECONDS, left))
            self._runner = CheckRunner(self.checks)

    def _publish(self, report: DiagnosticReport) -> None:
        """Store a report; log and record it if its statuses have changed."""
        before, self.report = self.report, report
        known, new = ({(each.name, each.status) for each in found.findings} for found in (before, report))
        if new == known:
            return
        for line in report.lines("warn"):
            _LOG.warning("Health: %s", line)
        for line in report.lines("fail"):
            _LOG.error("Health: %s", line)
        if report.failed:
            _LOG.error("This node does not join until its health check passes.")
        self.node.record_health(report)

    def _run_closed(self) -> bool:
        try:
            row = self.table.get(ROUND_KEY)
            return row is not None and Round.from_value(row.value).closed
        except (ElasticError, ValueError):
            return False
