"""Measure what a trained step costs that a restarted loop with accelerate counts once more, beside training it.

Two nodes train, rank 0's is lost late, and the script of the other starts again: it goes through all steps before, of
which nothing is trained, and trains the rest. The peer is the same loop by accelerate alone, in one process: a step of
it is what a script pays that starts again without a state. Prints a table. Exit code 1 means that a repeated step takes
longer than the limit.

python benchmarks/repeated_steps.py [--steps N] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from azureml_elastic.environment import names as variables
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule

__all__ = ["LIMIT_MS", "measure", "table"]

SCRIPT = Path(__file__).with_name("repeated_script.py")
LIMIT_MS = 0.3
"""Largest time of a repeated step, for a script that does nothing else."""


def milliseconds(folder: Path, kind: str) -> float:
    """Return the time of a step of a kind, in the process that has most of them."""
    found = [json.loads(path.read_text()) for path in folder.glob("turns.*")]
    most: dict[str, Any] = max(found, key=lambda each: each[kind])
    return 1000 * float(most[f"{kind}_seconds"]) / (most[kind] - (2 if kind == "repeated" else 0))


def under_a_loss(steps: int) -> float:
    """Return the milliseconds of a step that is repeated after the loss of rank 0's node."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = LocalCluster(
            (1, 2),
            start="command",
            chaos=parse_schedule(f"kill=rank0@step:{steps * 9 // 10}"),
            run_dir=folder / "run",
            timeout=400,
        )
        report = cluster.run([sys.executable, str(SCRIPT), "--folder", name, "--steps", str(steps)])
        if report.exit_code != 0:
            raise RuntimeError(report.message)
        return milliseconds(folder, "repeated")


def alone(steps: int) -> float:
    """Return the milliseconds of a step by accelerate alone, in one process."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(SCRIPT), "--folder", name, "--steps", str(steps // 4)]
        environ = {key: value for key, value in os.environ.items() if key != variables.CHANNEL}
        subprocess.run(command, env={**environ, "ACCELERATE_USE_CPU": "true"}, check=True)
        return milliseconds(Path(name), "trained")


def measure(steps: int, runs: int) -> dict[str, list[float]]:
    """Return the milliseconds of each run, which are made in turn."""
    found: dict[str, list[float]] = {"repeated after a loss": [], "trained by accelerate alone": []}
    for run in range(runs):
        for times, call in zip(found.values(), (under_a_loss, alone), strict=True):
            times.append(call(steps))
        text = ", ".join(f"{name} {times[-1]:.3f} ms" for name, times in found.items())
        print(f"run {run + 1}: {text}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return found


def table(found: dict[str, list[float]]) -> str:
    """Return the medians as a table."""
    rows = [
        f"| {name} | {statistics.median(times):.2f} ms | {min(times):.2f} to {max(times):.2f} ms |"
        for name, times in found.items()
    ]
    return "\n".join(["| a step | median | range |", "|---|---|---|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    found = measure(arguments.steps, arguments.runs)
    print(table(found))
    return int(statistics.median(next(iter(found.values()))) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
