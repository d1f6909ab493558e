"""Where the CPU time of one node goes until its first step: by process, and by imported package."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil
from startup_cluster import Cluster, started_nodes
from startup_systems import System

from azureml_elastic.local.azurite import Azurite

__all__ = ["import_times", "print_profile"]

_LINE = re.compile(r"^import time:\s+(\d+) \|\s+(\d+) \|(\s+)(\S+)$", re.MULTILINE)
_SHOWN = 12
_LIMIT_S = 60.0
_TRAINING = "import torch, torch.nn.parallel.distributed, azureml_elastic.train"


def print_profile(system: System, azurite: Azurite) -> None:
    """Start a run of one node, twice, and print what it spent.

    Args:
        system: this library, of any version.
        azurite: emulator of the table.
    """
    print(f"\n{system.name}")
    with started_nodes(system, (1, 1), 1, azurite) as (cluster, began):
        started = cluster.wait_for_steps(began, _LIMIT_S)
        if started.seconds is None:
            print(cluster.trees.logs())
            return
        total, parts = cluster.nodes[0].cpu_seconds(), _by_process(cluster)
        print(f"first step after {started.seconds:.2f} s, {started.cpu[0]:.2f} CPU s:")
        for name, seconds in parts.items():
            print(f"  {seconds:6.2f} CPU s  {name}")
        print(f"  {max(0.0, total - sum(parts.values())):6.2f} CPU s  processes that have ended")
    words = [system.python, "-X", "importtime", "-m", "azureml_elastic.node", "--help"]
    print("imports of the agent's first modules (wall ms, of the package's own modules):")
    _print_packages(_times_of(words, system))
    print(f"imports of a worker, which the preload server shares: {_TRAINING}")
    _print_packages(_times_of([system.python, "-X", "importtime", "-c", _TRAINING], system))


def import_times(text: str) -> dict[str, tuple[float, float]]:
    """Return own and cumulative milliseconds by module from what ``-X importtime`` has printed.

    Args:
        text: standard error of the interpreter.
    """
    return {match[4]: (int(match[1]) / 1000, int(match[2]) / 1000) for match in _LINE.finditer(text)}


def _by_process(cluster: Cluster) -> Mapping[str, float]:
    tree = cluster.nodes[0]
    alive = tree.pids()
    workers = {step.pid for step in cluster.steps_of(0)}
    found: dict[str, float] = {}
    for pid in sorted(alive):
        try:
            process = psutil.Process(pid)
            seconds, parent, words = sum(process.cpu_times()[:2]), process.ppid(), process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if pid in workers:
            role = "worker"
        elif pid == tree.pid:
            role = "agent"
        elif parent in workers:
            role = "child of a worker"
        elif any(psutil.Process(worker).ppid() == pid for worker in workers & alive):
            role = "preload server"
        else:
            role = "other"
        age = time.time() - process.create_time()
        found[f"{role} {pid}, {age:.2f} s old: {' '.join(words)[:60]}"] = seconds
    return found


def _times_of(words: Sequence[str], system: System) -> dict[str, tuple[float, float]]:
    """Return the fastest of three runs for each module, as other processes only slow one down."""
    runs = [
        import_times(subprocess.run(words, env=system.environment(), capture_output=True, text=True, check=True).stderr)
        for _ in range(3)
    ]
    return {
        name: (min(run[name][0] for run in runs if name in run), min(run[name][1] for run in runs if name in run))
        for name in runs[0]
    }


def _print_packages(times: Mapping[str, tuple[float, float]]) -> None:
    own: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for name, (milliseconds, _) in times.items():
        parts = name.split(".")
        package = ".".join(parts[:2]) if parts[0] in ("azure", "azureml_elastic", "torch") else parts[0]
        own[package] += milliseconds  # type: ignore[assignment]  # a Counter of floats sorts as well
        modules[package] += 1
    for package, milliseconds in own.most_common(_SHOWN):
        print(f"  {milliseconds:7.1f} ms  {package} ({modules[package]} modules)")
    print(f"  {sum(own.values()):7.1f} ms  all {sum(modules.values())} modules")
