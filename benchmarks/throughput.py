"""What session and agent cost while nothing happens: the time of a step that waits 10 ms, beside torchrun."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from membership import Cluster
from systems import MINIMUM, SYSTEMS

from azureml_elastic.local.azurite import Azurite
from azureml_elastic.local.processes import NodeProcesses

__all__ = ["NAME", "measure_step"]

NAME = "a step that waits 10 ms"
STEP_SECONDS = 0.010
_SETTLE_SECONDS = 10.0
"""Imports that follow the first steps are over then."""
_WATCH_SECONDS = 8.0


def measure_step(system: str, limit_s: float) -> float | None:
    """Return the mean seconds of a step of two nodes in a steady state, ``None`` when they did not get there.

    Args:
        system: its name.
        limit_s: time limit of the start in seconds.
    """
    with contextlib.ExitStack() as stack:
        azurite = stack.enter_context(Azurite())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        (folder / "steps").mkdir()
        processes = stack.enter_context(NodeProcesses(folder / "logs"))
        nodes = stack.enter_context(SYSTEMS[system](folder, azurite))
        cluster = Cluster(nodes, processes, folder / "steps", {"BENCH_STEP_SECONDS": str(STEP_SECONDS)})
        begun = cluster.add()
        for _ in range(1, MINIMUM):
            cluster.add()
        if cluster.wait_for_step(begun, limit_s, together=True) is None:
            return None
        time.sleep(_SETTLE_SECONDS)
        first = time.time()
        time.sleep(_WATCH_SECONDS)
        times = [step.time for step in cluster.steps_of("node-0") if step.time >= first]
        # The median would hide what comes only now and then, as beats do; a few of the largest are the machine's.
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        return statistics.fmean(gaps[: max(1, int(len(gaps) * 0.99))])
