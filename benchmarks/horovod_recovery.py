"""Recovery of Horovod's elastic mode from the SIGKILL of a worker: this library beside ``horovodrun``.

``python benchmarks/horovod_recovery.py --runs 3`` prints, per run and as medians, the seconds from the SIGKILL of one
of three workers until the others train again. Needs Horovod; see docs/how-to/engines.md for building it.
"""

from __future__ import annotations

import argparse
import os
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
import os, sys, time
from pathlib import Path
import horovod.torch as hvd
import torch
if sys.argv[2] == "ours":
    from azureml_elastic.train.horovod import TorchState
else:
    from horovod.torch.elastic import TorchState

folder = Path(sys.argv[1])
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = TorchState(model=model, optimizer=optimizer, batch=0)

@hvd.elastic.run
def train(state):
    first = True
    while not (folder / "enough").exists():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
        if first:
            with (folder / "starts").open("a") as file:
                file.write(f"{hvd.size()} {os.getpid()} {os.environ['HOROVOD_HOSTNAME']} {time.time()}\\n")
            first = False
        time.sleep(0.01)
    os._exit(0)

train(state)
"""
HOSTS = "#!/bin/bash\necho localhost:2\necho 127.0.0.1:1\n"
TIMEOUT_SECONDS = 120


def await_starts(folder: Path, size: int) -> list[tuple[int, str, float]]:
    """Wait until so many workers train together; return process, host and time of each one's first batch."""
    path, until = folder / "starts", time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < until:
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        found = [(int(pid), host, float(at)) for count, pid, host, at in lines if int(count) == size]
        if len(found) == size:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {size} workers")


def kill(*processes: psutil.Process) -> float:
    """Kill processes, and return when."""
    killed = time.time()
    for process in processes:
        process.kill()
    return killed


def back(folder: Path, killed: float) -> float:
    """Return the seconds until the two others have trained a batch, and let them end."""
    last = max(at for _, _, at in await_starts(folder, 2))
    (folder / "enough").touch()
    return last - killed


def measure_horovodrun(folder: Path, program: Path) -> float:
    """Return the seconds that Horovod's own launcher needs."""
    hosts = folder / "hosts.sh"
    hosts.write_text(HOSTS)
    hosts.chmod(0o755)
    limits = ("-np", "3", "--min-np", "1", "--max-np", "3")
    local = ("--network-interfaces", "lo", "--host-discovery-script", str(hosts))
    run = Path(sys.executable).with_name("horovodrun")
    command = (str(run), "--gloo", *limits, *local, sys.executable, str(program), str(folder), "theirs")
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOROVOD_GLOO_IFACE": "lo"})
    try:
        victim = next(pid for pid, host, _ in await_starts(folder, 3) if host == "127.0.0.1")
        time.sleep(1)
        return back(folder, kill(psutil.Process(victim)))
    finally:
        (folder / "enough").touch()
        for process in [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]:
            process.kill()
        launcher.wait()


def measure_ours(folder: Path, program: Path) -> float:
    """Return the seconds that this library needs."""
    found: list[float] = []

    def lose() -> None:
        try:
            await_starts(folder, 3)
            time.sleep(1)
            events = read_events(folder / "run/events")
            rounds = [each for each in events if isinstance(each, RoundEntered)]
            node = max(rounds, key=lambda each: each.round).members[-1]
            agent = psutil.Process(next(e.pid for e in events if isinstance(e, NodeStarted) and e.node == node))
            found.append(back(folder, kill(agent, *agent.children(recursive=True))))
        finally:
            (folder / "enough").touch()

    losing = Thread(target=lose)
    losing.start()
    distribution = ElasticDistribution(framework="horovod", process_count_per_instance=1)
    report = LocalCluster((2, 3), run_dir=folder / "run", timeout=200, distribution=distribution).run(
        [str(program), str(folder), "ours"]
    )
    losing.join()
    assert report.outcome == "succeeded", report.message
    return found[0]


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.runs):
        seconds = []
        for measure in (measure_ours, measure_horovodrun):
            with tempfile.TemporaryDirectory() as name:
                program = Path(name) / "program.py"
                program.write_text(PROGRAM)
                seconds.append(measure(Path(name), program))
        found.append(tuple(seconds))
        print(f"this library {seconds[0]:6.2f} s, horovodrun {seconds[1]:6.2f} s", flush=True)
    ours, theirs = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"median: this library {ours:.2f} s, horovodrun {theirs:.2f} s, {theirs / ours:.0f} times as long")


if __name__ == "__main__":
    main()
