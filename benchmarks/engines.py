"""Recovery of a Dask run whose scheduler's node is killed, beside Dask's own start on the same machine.

``python benchmarks/engines.py --runs 5`` prints, per run and as medians, the seconds from the SIGKILL of the first node
to the first result of the program that was started again, and from the start of a scheduler, a worker and the same
program by hand to its first result.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

import psutil

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.ledger.events import NodeStarted, RoundEntered
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.local.cluster import LocalCluster

PROGRAM = """
import sys, time
from pathlib import Path
from distributed import Client
folder = Path(sys.argv[1])
with Client() as client:
    assert client.submit(sum, [1, 2]).result() == 3
    number = len(list(folder.glob("result-*")))
    (folder / f"result-{number}").write_text(str(time.time()))
    while number == 0 and not (folder / "enough").exists():
        time.sleep(0.05)
"""


def await_result(folder: Path, number: int) -> float:
    """Return the time of a start's first result."""
    path = folder / f"result-{number}"
    until = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"no result {number}"
        time.sleep(0.01)
    return float(path.read_text())


def measure_recovery(folder: Path) -> float:
    """Return the seconds from the loss of the first node to the next result."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    killed: list[float] = []

    def kill() -> None:
        await_result(folder, 0)
        time.sleep(2)  # all nodes have their workers
        events = read_events(folder / "run/events")
        first = max((each for each in events if isinstance(each, RoundEntered)), key=lambda each: each.round).members[0]
        pid = next(each.pid for each in events if isinstance(each, NodeStarted) and each.node == first)
        agent = psutil.Process(pid)
        killed.append(time.time())
        for process in (agent, *agent.children(recursive=True)):
            process.kill()

    injecting = Thread(target=kill)
    injecting.start()
    distribution = ElasticDistribution(framework="dask")
    report = LocalCluster((2, 3), run_dir=folder / "run", timeout_s=120, distribution=distribution).run(
        [str(program), str(folder)]
    )
    injecting.join()
    assert report.outcome == "succeeded", report.message
    return await_result(folder, 1) - killed[0]


def measure_own_start(folder: Path) -> float:
    """Return the seconds from the start of scheduler, worker and program to the first result."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    (folder / "enough").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    module = [sys.executable, "-m"]
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    began = time.time()
    commands = [
        [*module, "distributed.cli.dask_scheduler", *local, "--port", str(port)],
        [*module, "distributed.cli.dask_worker", address, *local, "--local-directory", str(folder)],
        [sys.executable, str(program), str(folder)],
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "DASK_SCHEDULER_ADDRESS": address}
    processes = [subprocess.Popen(command, env=environment, **quiet) for command in commands]
    try:
        return await_result(folder, 0) - began
    finally:
        for process in processes[::-1]:
            process.terminate()
            process.wait()


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as name:
            own = measure_own_start(Path(name))
        with tempfile.TemporaryDirectory() as name:
            recovery = measure_recovery(Path(name))
        found.append((recovery, own))
        print(f"back {recovery:5.2f} s after the loss; Dask's own start {own:5.2f} s", flush=True)
    recovery, own = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"median: {recovery:.2f} s and {own:.2f} s: {recovery - own:+.2f} s beyond Dask's own start")


if __name__ == "__main__":
    main()
