"""The demo: training on real digits on three local nodes, one of which is lost and replaced, with an audit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.model import Add, AtStep, Kill, Schedule
from azureml_elastic.local.view import View

PROGRAM = ("python", "-m", "azureml_elastic.local.demo_train")
_NODES = 3
_EPOCHS = 6
_STEP_DELAY_S = 0.1
_CHECKPOINT_STEPS = 10
_TIMEOUT = timedelta(hours=1)
"""Limit for a run that stands still: a busy laptop must not reach it."""

_LEAST_ACCURACY = 0.85

SCHEDULE = Schedule((Kill("rank0", AtStep(35, least=_NODES)), Add(AtStep(60, most=_NODES - 1))))
"""Rank 0's node is killed in the second epoch between two checkpoints; a new node is started in the third.

On a busy machine both come later, once the nodes train that were started first, and once the others go on.
"""


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Args:
        accuracy: accuracy on the held-out images; ``None`` if the run did not get that far.
        doubts: expectations that were not met; empty if all were.
    """

    report: Report
    accuracy: float | None
    doubts: tuple[str, ...]


def run_demo(run_dir: Path | None, view: View) -> DemoResult:
    """Run the demo.

    Args:
        run_dir: new folder for the run's files; ``None`` creates one below ``./runs``.
    """
    cluster = LocalCluster(
        (1, _NODES),
        chaos=SCHEDULE,
        run_dir=run_dir,
        checkpoint=CheckpointPolicy(every_steps=_CHECKPOINT_STEPS),
        audit=True,
        timeout=_TIMEOUT,
        view=view,
    )
    report = cluster.run([*PROGRAM, "--epochs", str(_EPOCHS), "--step-delay", str(_STEP_DELAY_S), "--regain"])
    return judge(report, _accuracy(report.paths.run_dir / "result.json"))


def judge(report: Report, accuracy: float | None) -> DemoResult:
    """Compare the report with the expected course of the demo."""
    if report.outcome != "succeeded":
        return DemoResult(report, accuracy, (f"The run failed: {report.message}",))
    doubts: list[str] = []
    if not report.faults or not any("kill" in fault.fault and fault.nodes for fault in report.faults):
        doubts.append("Rank 0's node was not killed: the run ended before the fault.")
    if not _lost_and_regained(report.world_sizes):
        sizes = ", ".join(map(str, report.world_sizes)) or "none"
        doubts.append(f"The world sizes were {sizes}; they should fall after the loss and rise after the arrival.")
    if report.audit is None or not report.audit.complete:
        doubts.append("Not every sample of every epoch was seen exactly once.")
    if accuracy is None:
        doubts.append("No accuracy was measured.")
    elif accuracy < _LEAST_ACCURACY:
        doubts.append(f"The accuracy is {accuracy:.1%}, below {_LEAST_ACCURACY:.0%}.")
    return DemoResult(report, accuracy, tuple(doubts))


def _lost_and_regained(sizes: Sequence[int]) -> bool:
    """Return whether the world size fell and later rose again."""
    falls = [index for index in range(1, len(sizes)) if sizes[index] < sizes[index - 1]]
    return bool(falls) and any(sizes[index] > sizes[index - 1] for index in range(falls[0] + 1, len(sizes)))


def _accuracy(path: Path) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["accuracy"])
    except (OSError, ValueError, KeyError):
        return None
