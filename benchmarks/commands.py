"""Measure the CPU seconds of short commands: of help and templates, of `status` and `logs` of a run on this machine.

Each command is a new process, from warm files, and the commands take turns. Its seconds are those of the processor, in
user and system mode, of the process and its children. Beside them is what any command pays, the interpreter, and what
these commands do without, the import of azure-ai-ml. Prints medians. Exit code 1 means that one is above its limit.

python benchmarks/commands.py [--runs N]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from azureml_elastic import ElasticCommandJob, ElasticResources
from azureml_elastic.local.cluster import LocalCluster
from azureml_elastic.testing import LocalWorkspace

SAMPLES = Path(__file__).parents[1] / "samples"
COMMAND = (sys.executable, "-c", "from azureml_elastic.cli import main; main()")
SHORT, OF_A_RUN = 0.6, 1.5
"""Largest numbers of CPU seconds."""


def cpu_seconds(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> float:
    """Return the CPU seconds of a process, in user and system mode."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], runs: int) -> dict[str, float]:
    """Return the median of each command's seconds, after one run that makes its files warm."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs + 1):
            for name, command in commands.items():
                place = Path(folder, f"{run}-{name.replace('/', '-')}")  # `init` writes no file over another
                place.mkdir()
                seconds = cpu_seconds(command, place, environ)
                found[name] += [seconds] if run else []
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def train_here(folder: Path) -> Path:
    """Train on one node of this machine, and return the run's folder."""
    cluster = LocalCluster((1, 1), start="command", run_dir=folder / "run")
    report = cluster.run([sys.executable, str(SAMPLES / "digits.py"), "--epochs", "1"])
    assert report.exit_code == 0, report.message
    return report.paths.run_dir


def submit(workspace: LocalWorkspace, folder: Path) -> str:
    """Submit a job of one node, wait for its end, and return its name."""
    code = folder / "src"
    code.mkdir()
    (code / "train.py").write_text("print('done')")
    job = ElasticCommandJob(
        code=code,
        command="python train.py",
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(max_instance_count=1),
    )
    name: str = workspace.ml_client.jobs.create_or_update(job).name
    workspace.wait(name, 300)
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    peers = {
        "`python -c pass`": (sys.executable, "-c", "pass"),
        "`import azure.ai.ml`": (sys.executable, "-W", "ignore", "-c", "import azure.ai.ml"),
    }
    with tempfile.TemporaryDirectory() as folder, LocalWorkspace() as workspace:
        here, name = str(train_here(Path(folder))), submit(workspace, Path(folder))
        limited = {
            "`--help`": (SHORT, ("--help",)),
            "`submit --help`": (SHORT, ("submit", "--help")),
            "`init`": (SHORT, ("init", "starter")),
            "`schema`": (SHORT, ("schema",)),
            "`status` of a run on this machine": (OF_A_RUN, ("status", here)),
            "`logs` of it": (OF_A_RUN, ("logs", here)),
            "`status` of a submitted run": (OF_A_RUN, ("status", name)),
            "`logs` of that": (OF_A_RUN, ("logs", name)),
        }
        commands = {**peers, **{each: (*COMMAND, *words) for each, (_, words) in limited.items()}}
        found = medians(commands, {**os.environ, **workspace.variables}, arguments.runs)
    print(f"Medians of {arguments.runs}, load {os.getloadavg()[0]:.1f}\n")
    print("| command | CPU seconds | limit |\n|---|---|---|")
    for each, seconds in found.items():
        print(f"| {each} | {seconds:.2f} | {limited[each][0] if each in limited else ''} |")
    return int(any(found[each] > limit for each, (limit, _) in limited.items()))


if __name__ == "__main__":
    sys.exit(main())
