"""Who may ask for a place: a node that is well, and nobody else, however long that takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from azureml_elastic.config import HealthPolicy
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.diagnostics.findings import CheckRunner, DiagnosticReport
from azureml_elastic.node.failures.host_strikes import HostStrikes
from azureml_elastic.node.rendezvous.state.round import Round
from azureml_elastic.node.rendezvous.state.row_keys import ROUND_KEY
from azureml_elastic.node.table import Table

__all__ = ["Admission"]

_LOG = logging.getLogger(__name__)

_CONVICTED_AFTER = 2
"""Failed checks in a row after which the host is struck: one alone may be a mount that was waking up."""


class Admission:
    """Checks this node, the first time at once on threads, and again until it is well.

    Args:
        policy: limits and time limits of the checks.
        check: starts a check.
        table: table of the run.
        strikes: strikes of the run.
        incarnation: incarnation of this agent, which strikes its host at most once.
        record: function called with each report that differs from the previous one.
        away: function called with the reason when the first check has failed, so that others do not wait.
        pause: waits for some seconds; may raise to end the wait.
        stay: whether the node must not exit by itself, because its exit would end the job for the others too.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        check: Callable[[], CheckRunner],
        *,
        table: Table,
        strikes: HostStrikes,
        incarnation: str,
        record: Callable[[DiagnosticReport], None],
        away: Callable[[str], None],
        pause: Callable[[float], object],
        stay: bool = False,
    ) -> None:
        self._policy = policy
        self._make = check
        self._table = table
        self._strikes = strikes
        self._incarnation = incarnation
        self._record = record
        self._away = away
        self._pause = pause
        self._stay = stay
        self._check = check() if policy.check else None
        self.report = DiagnosticReport()
        """The newest report."""

    def wait(self) -> bool:
        """Return whether this node may join; otherwise it must exit with ``UNHEALTHY``.

        A node is also let through once the run has ended: joining tells it how.
        """
        if self._check is None:
            return True
        since: float | None = None
        failures = 0
        while True:
            report = self._check.wait()
            self._tell(report)
            if not report.failed:
                return True
            failures += 1
            since = time.monotonic() if since is None else since
            first_reason = report.lines("fail")[0]
            if failures == 1:
                self._away(f"failed its health check: {first_reason}")
            if failures == _CONVICTED_AFTER:
                reason = f"failed its health check: {first_reason}"
                self._strikes.strike(self._strikes.host, reason, f"health.{self._incarnation}")
            if self._closed():
                return True
            left = since + self._policy.retry_for.total_seconds() - time.monotonic()
            if left <= 0 and not self._stay:
                return False
            interval = self._policy.retry_interval.total_seconds()
            self._pause(interval if self._stay else min(interval, left))
            self._check = self._make()

    def _tell(self, report: DiagnosticReport) -> None:
        before, self.report = self.report, report
        known = {(finding.name, finding.status) for finding in before.findings}
        if {(finding.name, finding.status) for finding in report.findings} == known:
            return
        for line in report.lines("warn"):
            _LOG.warning("Health: %s", line)
        for line in report.lines("fail"):
            _LOG.error("Health: %s", line)
        if report.failed:
            _LOG.error("This node does not ask for a place until its check passes.")
        self._record(report)

    def _closed(self) -> bool:
        try:
            row = self._table.get(ROUND_KEY)
        except ElasticError:
            return False
        return row is not None and Round.from_value(row.value).closed
