"""Shared parts of the tests of whole runs: timings of the nodes, and evaluation of reports."""

from __future__ import annotations

from datetime import timedelta

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.ledger.summary import Report

__all__ = ["GATHERING", "after_gathering"]

GATHERING = TableRendezvous(timings=RendezvousTimings(settle_timeout=timedelta(minutes=1)))
"""The first round waits for all announced nodes, which start at very different speeds on a busy machine."""


def after_gathering(report: Report, full: int) -> tuple[int, ...]:
    """Return the world sizes from the first round with all nodes on; a late node joins after the first round."""
    return report.world_sizes[report.world_sizes.index(full) :]
