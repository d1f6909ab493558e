"""What this library costs a step of training, beside torchrun and the same script or the same loop with torch alone.

Both jobs are there at once and train in turn, each a few steps, so that a change of the machine's load meets both.
Prints tables and writes ``benchmarks/results/steps.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from string import Template

from measurements import machine

from azureml_elastic.config import CheckpointPolicy, Plan
from azureml_elastic.ledger.summary import Paths
from azureml_elastic.local.azurite import TableChoice
from azureml_elastic.local.cluster import LocalCluster

HERE = Path(__file__).resolve().parent
PAGE = HERE / "results" / "steps.md"
SCRIPTS = HERE / "training_steps"
RANKS = 2
TORCHRUN, OURS = 0, 1
CHECKPOINT_STEPS, SNAPSHOT_STEPS = 60, 20
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Case:
    """A comparison of two jobs.

    Args:
        script: script of both
        session: whether the script with this library differs from the plain one by its session
        needs: package that must be installed
        block: steps of a turn
        least: throughput relative to torchrun's that is aimed at
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    session: bool = False
    needs: str = "torch"
    block: int = 5
    least: float = 0.99


CASES = (
    Case("GPT-2 small's shape, DDP", "gpt2.py", session=True),
    Case("GPT-2 small's shape, FSDP2", "gpt2.py", ("--shards",), session=True),
    Case("the same, DDP, many saves", "gpt2.py", ("--often",), session=True),
    Case("the same, FSDP2, many saves", "gpt2.py", ("--shards", "--often"), session=True),
    Case("transformers' Trainer", "trainer.py", needs="transformers", block=15, least=0.98),
    Case("Lightning's Trainer", "lightning_fit.py", needs="lightning", block=40, least=0.98),
)


@dataclass(frozen=True)
class Outcome:
    """Medians over the blocks of a comparison.

    Args:
        torchrun: seconds of a step
        ours: the same with this library
        throughput: ours relative to torchrun's, from the wall times of neighbouring blocks
        cpu: CPU time of our processes relative to those of torchrun
    """

    torchrun: float
    ours: float
    throughput: float
    cpu: float


class Cluster(LocalCluster):
    """A local cluster whose checkpoints are as rare as those of a submitted job."""

    def plan(self, table: TableChoice, paths: Paths) -> Plan:
        plan = super().plan(table, paths)
        rarer = plan.checkpoint.model_copy(update={"every": CheckpointPolicy().every})
        return plan.model_copy(update={"checkpoint": rarer})


def compare(case: Case, blocks: int) -> Outcome:
    """Run both jobs of a comparison."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shared = {
            "BENCH_FOLDER": folder,
            "BENCH_BLOCKS": str(blocks),
            "BENCH_BLOCK": str(case.block),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])),
        }
        os.environ.update(shared)
        script = [str(SCRIPTS / case.script), *case.arguments]
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "0"]
        words = [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *script]
        plain = subprocess.Popen(words, env={**os.environ, "BENCH_SIDE": str(TORCHRUN)})
        watchdog = threading.Timer(LIMIT_SECONDS, plain.kill)
        watchdog.start()
        try:
            os.environ["BENCH_SIDE"] = str(OURS)
            cluster = Cluster((RANKS, RANKS), start="command", run_dir=Path(folder, "run"), timeout=LIMIT_SECONDS)
            report = cluster.run([sys.executable, *script, *(["--session"] if case.session else [])])
            if report.exit_code != 0 or plain.wait() != 0:
                raise RuntimeError(f"{case.name}: {report.message}; torchrun ended with {plain.returncode}")
        finally:
            watchdog.cancel()
            plain.kill()
        return outcome(case, Path(folder))


def outcome(case: Case, folder: Path) -> Outcome:
    """Return what the jobs have measured."""
    wall, cpu = {}, {}
    for side in (TORCHRUN, OURS):
        ranks = [json.loads((folder / f"blocks.{side}.{rank}.json").read_text("ascii")) for rank in range(RANKS)]
        wall[side] = [max(walls) for walls in zip(*([each[0] for each in rank] for rank in ranks), strict=True)]
        cpu[side] = sum(each[1] for rank in ranks for each in rank)
    return Outcome(
        torchrun=statistics.median(wall[TORCHRUN]) / case.block,
        ours=statistics.median(wall[OURS]) / case.block,
        throughput=statistics.median(theirs / ours for theirs, ours in zip(wall[TORCHRUN], wall[OURS], strict=True)),
        cpu=cpu[OURS] / cpu[TORCHRUN],
    )


def table(found: dict[str, list[Outcome]]) -> str:
    rows = ["| | torchrun | azureml-elastic | throughput | range | CPU time | aim |", "|---|---|---|---|---|---|---|"]
    for case in CASES:
        if case.name not in found:
            continue
        outcomes = found[case.name]
        ratios = [each.throughput for each in outcomes]
        cells = [
            case.name,
            f"{statistics.median(each.torchrun for each in outcomes) * 1000:.1f} ms",
            f"{statistics.median(each.ours for each in outcomes) * 1000:.1f} ms",
            f"**{statistics.median(ratios):.3f}**",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            f"{statistics.median(each.cpu for each in outcomes):.3f}",
            f"≥ {case.least:g}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    names = [case.script.partition(".")[0] for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=12, help="turns of each job")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(set(names)), help="print these, and leave the page as it is"
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    found: dict[str, list[Outcome]] = {}
    for run in range(arguments.runs):
        for case, name in zip(CASES, names, strict=True):
            if find_spec(case.needs) is None or (arguments.only and name not in arguments.only):
                continue
            found.setdefault(case.name, []).append(compare(case, arguments.blocks))
            print(f"run {run + 1}: {case.name}: {found[case.name][-1]}", file=sys.stderr)
    print(table(found))
    if len(found) == len(CASES) and not arguments.only:
        page = Template((HERE / "steps_page.md").read_text("utf-8")).substitute(
            date=f"{datetime.now().astimezone():%Y-%m-%d}",
            machine=machine(),
            load=f"{load:.1f}",
            runs=arguments.runs,
            blocks=arguments.blocks,
            checkpoint_steps=CHECKPOINT_STEPS,
            snapshot_steps=SNAPSHOT_STEPS,
            table=table(found),
        )
        PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
