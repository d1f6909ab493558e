"""What tests of whole runs share: how patient their nodes are, and how their reports are read."""

from __future__ import annotations

from datetime import timedelta

from azureml_elastic.config import RendezvousTimings, TableRendezvous
from azureml_elastic.ledger.summary import Report

__all__ = ["GATHERING", "after_gathering"]

GATHERING = TableRendezvous(timings=RendezvousTimings(settle_timeout=timedelta(minutes=1)))
"""The first round waits for whoever has announced itself: on a busy machine nodes start at very different speeds."""


def after_gathering(report: Report, full: int) -> tuple[int, ...]:
    """Return the world sizes since there was one of all nodes: one that starts late comes after the first round."""
    return report.world_sizes[report.world_sizes.index(full) :]
