"""Measure how long training stands still after the loss of rank 0's node, for a session and for each training stack.

All scripts train the same small model on the same machine, in turns, so that a change of its load meets all of them.
Prints a table and writes ``benchmarks/results/stacks.md``. Exit code 1 means that a stack's median is more than
twice the session's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from string import Template

from measurements import machine

from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.local.faults.schedule import parse_schedule

HERE = Path(__file__).parent
PAGE = HERE / "results" / "stacks.md"
SCRIPTS = HERE.parent / "tests" / "stacks"
SESSION = "session"
SYSTEMS = {
    SESSION: HERE / "stacks_session.py",
    "transformers": SCRIPTS / "trainer_script.py",
    "accelerate": SCRIPTS / "accelerate_script.py",
    "lightning": SCRIPTS / "lightning_script.py",
    "deepspeed": SCRIPTS / "deepspeed_script.py",
}
NODES = 3
STEP = 100
"""Step of the loss: by then the preload servers have imported what the stacks import after their start."""
MOST = 2.0
"""Largest ratio to the session's gap."""


def measure(script: Path) -> float:
    """Return the seconds from the loss of rank 0's node to the next completed step."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(
            (1, NODES),
            start="command",
            chaos=parse_schedule(f"kill=rank0@step:{STEP}"),
            run_dir=Path(folder, "run"),
            checkpoint=CheckpointPolicy(snapshot_every_steps=1),  # DeepSpeed's state is sharded
            timeout=240,
        )
        report = cluster.run([sys.executable, str(script), "--folder", folder, "--pause", "0.05"])
        if report.exit_code != 0:
            raise RuntimeError(f"{script.name}: {report.message}")
        (recovery,) = report.recoveries
        assert recovery.seconds is not None
        return recovery.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=[each for each in SYSTEMS if is_installed(each)])
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    gaps: dict[str, list[float]] = {system: [] for system in arguments.only}
    for run in range(arguments.runs):
        for system in arguments.only[run % len(gaps) :] + arguments.only[: run % len(gaps)]:
            gaps[system].append(measure(SYSTEMS[system]))
            print(f"run {run + 1}: {system} {gaps[system][-1]:.2f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    medians = {system: statistics.median(seconds) for system, seconds in gaps.items()}
    base = medians.get(SESSION)
    rows = [
        f"| {system} | {median:.2f} s | {min(gaps[system]):.2f} to {max(gaps[system]):.2f} s |"
        + (f" {median / base:.2f} |" if base else " |")
        for system, median in medians.items()
    ]
    table = "\n".join(["| script | median | range | ratio |", "|---|---|---|---|", *rows])
    print(table)
    if set(arguments.only) == set(SYSTEMS):
        page = Template((HERE / "stacks_page.md").read_text("utf-8")).substitute(
            date=f"{datetime.now().astimezone():%Y-%m-%d}",
            machine=machine(),
            load=f"{os.getloadavg()[0]:.1f}",
            runs=arguments.runs,
            nodes=NODES,
            step=STEP,
            most=f"{MOST:g}",
            table=table,
        )
        PAGE.write_text(page, "utf-8")
    return int(base is not None and any(median > MOST * base for median in medians.values()))


def is_installed(system: str) -> bool:
    return system == SESSION or find_spec(system) is not None


if __name__ == "__main__":
    sys.exit(main())
