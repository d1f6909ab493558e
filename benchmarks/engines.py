"""Recovery of a Dask or Ray run whose first node is killed, beside the framework's own start on the same machine.

``python benchmarks/engines.py --framework dask --runs 5`` prints, per run and as medians, the seconds from the SIGKILL
of the first node to the first result of the program that was started again, and from the start of the framework's head,
the head's node and the same program, without agents, to its first result.

Ray puts the machine's own address in the place of 127.0.0.1. In a network that has nothing else it cannot:
``unshare --net bash -c 'ip link set lo up; python benchmarks/engines.py --framework ray'``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import psutil

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.engines.cluster import Cluster
from azureml_elastic.ledger.events import NodeStarted, RoundEntered
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster

PROGRAM = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
{result}
number = len(list(folder.glob("result-*")))
(folder / f"result-{{number}}").write_text(str(time.time()))
while number == 0 and not (folder / "enough").exists():
    time.sleep(0.05)
"""
TIMEOUT_SECONDS = 120


class Framework(NamedTuple):
    """A framework: code that computes a result, and its cluster for a folder."""

    code: str
    cluster: Callable[[str], Cluster]


def dask(folder: str) -> Cluster:
    """Return one node's part in a Dask cluster."""
    from azureml_elastic.engines.dask import Dask

    return Dask("127.0.0.1", 1, 2, folder, None)


def ray(folder: str) -> Cluster:
    """Return one node's part in a Ray cluster."""
    from azureml_elastic.engines.ray import Ray

    return Ray("127.0.0.1", 1, folder)


FRAMEWORKS = {
    "dask": Framework("from distributed import Client\nassert Client().submit(sum, [1, 2]).result() == 3", dask),
    "ray": Framework("import ray\nray.init()\nassert ray.get(ray.remote(lambda: 3).remote()) == 3", ray),
}


def await_result(folder: Path, number: int) -> float:
    """Return the time of a start's first result."""
    path = folder / f"result-{number}"
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"no result {number}"
        time.sleep(0.01)
    return float(path.read_text())


def measure_recovery(framework: str, folder: Path, program: Path) -> float:
    """Return the seconds from the loss of the first node to the next result."""
    killed: list[float] = []

    def kill() -> None:
        await_result(folder, 0)
        time.sleep(3)  # all nodes are members
        events = read_events(folder / "run/events")
        first = max((each for each in events if isinstance(each, RoundEntered)), key=lambda each: each.round).members[0]
        pid = next(each.pid for each in events if isinstance(each, NodeStarted) and each.node == first)
        agent = psutil.Process(pid)
        processes = (agent, *agent.children(recursive=True))
        killed.append(time.time())
        for process in processes:
            process.kill()

    injecting = Thread(target=kill)
    injecting.start()
    distribution = ElasticDistribution(framework=framework, process_count_per_instance=1)
    report = LocalCluster((1, 2), run_dir=folder / "run", timeout=200, distribution=distribution).run(
        [str(program), str(folder)]
    )
    injecting.join()
    assert report.outcome == "succeeded", report.message
    return await_result(folder, 1) - killed[0]


def measure_own_start(framework: str, folder: Path, program: Path) -> float:
    """Return the seconds from the start of the framework and the program to the first result."""
    (folder / "enough").touch()
    cluster = FRAMEWORKS[framework].cluster(str(folder))
    cluster.use_key(b"k" * 32)
    began = time.time()
    try:
        address = cluster.start_head()
        member = cluster.start_member(address)
        environment = {**os.environ, **cluster.variables(address)}
        subprocess.run([sys.executable, str(program), str(folder)], env=environment, check=True)
        if member is not None:
            member.stop(0)
        return await_result(folder, 0) - began
    finally:
        cluster.stop_head()


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="dask")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.runs):
        seconds = []
        for measure in (measure_own_start, measure_recovery):
            with tempfile.TemporaryDirectory(prefix="e") as name:
                program = Path(name) / "program.py"
                program.write_text(PROGRAM.format(result=FRAMEWORKS[arguments.framework].code))
                seconds.append(measure(arguments.framework, Path(name), program))
        own, recovery = seconds
        found.append((recovery, own))
        print(f"back {recovery:5.2f} s after the loss; {arguments.framework}'s own start {own:5.2f} s", flush=True)
    recovery, own = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"median: {recovery:.2f} s and {own:.2f} s: {recovery - own:+.2f} s beyond {arguments.framework}'s own start")


if __name__ == "__main__":
    main()
