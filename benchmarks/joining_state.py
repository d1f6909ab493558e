"""A third node joins a run with a large state: how long the others stand still, beside torchft, in turns.

The state is the digits network with frozen weights of so many MiB, as in fine-tuning; all of it is sent, and none is
taken to be unchanged. The *standstill* is the longest time between two steps of a node that was there before, from the
start of the new node's process until a step after the first one of all three. torchft's nodes go on while the new one
receives the state, but wait at the end of a step where that takes longer. Prints a table and writes
``benchmarks/results/joining.md``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from string import Template

from measurements import machine
from startup_cluster import Cluster, started_nodes
from startup_systems import OURS, TORCHFT, System, checkout

from azureml_elastic.local.azurite import Azurite

IN_PROCESS = f"{OURS}, in process"
BEFORE = "before"
HERE = Path(__file__).parent
PAGE = HERE / "results" / "joining.md"


@dataclass(frozen=True)
class Join:
    """One arrival, in seconds."""

    system: str
    standstill: float
    until_step: float


def measure(system: System, limit_s: float, azurite: Azurite) -> Join | None:
    with started_nodes(system, (2, 3), 2, azurite) as (cluster, began):
        if cluster.wait_for_steps(began, limit_s).seconds is None:
            print(cluster.trees.logs(), file=sys.stderr)
            return None
        cluster.settle()
        started = cluster.add()
        joined = cluster.wait_for_steps(started, limit_s)
        if joined.seconds is None:
            print(cluster.trees.logs(), file=sys.stderr)
            return None
        return Join(system.name, max(_standstill(cluster, number, started) for number in (0, 1)), joined.seconds)


def _standstill(cluster: Cluster, number: int, started: float) -> float:
    """Return the longest time between two of a node's steps, from the arrival on."""
    times = [step.time for step in cluster.steps_of(number)]
    return max(after - before for before, after in itertools.pairwise(times) if after > started)


def table(joins: Sequence[Join]) -> str:
    rows = [["", "standstill", "until it takes part", "of torchft's"], ["---"] * 4]
    found = {
        name: [each for each in joins if each.system == name] for name in dict.fromkeys(each.system for each in joins)
    }
    medians = {
        name: (statistics.median(e.standstill for e in each), statistics.median(e.until_step for e in each))
        for name, each in found.items()
    }
    for name, (standstill, until_step) in medians.items():
        ratio = ""
        if TORCHFT in medians:
            peer = medians[TORCHFT]
            ratio = f"{standstill / peer[0]:.2f}, {until_step / peer[1]:.2f}"
        stands = [each.standstill for each in found[name]]
        rows.append(
            [name, f"**{standstill:.2f} s** ({min(stands):.2f} to {max(stands):.2f})", f"{until_step:.2f} s", ratio]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of state")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a run is given up")
    parser.add_argument("--before", help="another version of this library to measure as well: a commit or a checkout")
    parser.add_argument("--peers-in", type=Path, metavar="FOLDER", help="with the folder torchft of packages")
    parser.add_argument("--dry", action="store_true", help="print, but leave the page as it is")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    size = {"BENCH_STATE_MIB": str(arguments.mib)}
    systems = [
        System(OURS, "azurite", variables=size),
        System(IN_PROCESS, "azurite", recovery="in_process", variables=size),
    ]
    if arguments.peers_in is not None:
        systems.append(System(TORCHFT, "torchft", path=arguments.peers_in / "torchft", variables=size))
    joins = []
    with Azurite() as azurite, checkout(arguments.before or ".") as (path, python):
        if arguments.before:
            systems.append(System(BEFORE, "azurite", python, path, variables=size))
        for run in range(arguments.runs):
            for system in (*systems[run % len(systems) :], *systems[: run % len(systems)]):
                join = measure(system, arguments.limit, azurite)
                print(join or f"{system.name}: more than {arguments.limit:g} s", flush=True)
                joins += [] if join is None else [join]
    print(table(joins))
    if not arguments.dry:
        page = Template((HERE / "joining_state_page.md").read_text("utf-8")).substitute(
            date=f"{datetime.now().astimezone():%Y-%m-%d}",
            machine=machine(),
            load=f"{load:.1f}",
            caution="" if load <= (os.cpu_count() or 1) else ", of other programs on the same cores",
            mib=arguments.mib,
            runs=arguments.runs,
            table=table(joins),
        )
        PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
