"""Random schedules of faults: kills, freezes, cut and blocked connections, notices, failures, outages, lost rows.

The pure machines of all nodes are driven without threads. Each seed is a schedule, most of them of one or two faults,
so that it is known what must follow; one that fails is shown by ``python -m tests.support.schedules SEED``.
``SCHEDULES`` is the number of seeds; ``nox -s attack`` takes 10,000.
"""

from __future__ import annotations

import os

import pytest

from tests.support.schedules.fence import check_fence
from tests.support.schedules.schedule import Schedule

SEEDS = int(os.environ.get("SCHEDULES", "375"))
BLOCK = 125


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_what_must_hold_holds_whatever_happens(first):
    for seed in range(first, min(SEEDS, first + BLOCK)):
        Schedule(seed).run()
        check_fence(seed)
