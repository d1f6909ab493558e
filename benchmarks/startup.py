"""Measure what a node costs until its first step, beside peers; writes benchmarks/results/startup.md.

The systems take turns, so that a change of the machine's load meets all of them. Exit code 1 means that this library
was not ahead of the best peer in everything that both can do.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from string import Template

from measurements import machine, write_lines
from process_trees import Memory, Trees, accounting, memory_of
from startup_cluster import Cluster, measure_local, started_nodes
from startup_growth import Growth, growth_table, measure_growth
from startup_profile import print_profile
from startup_systems import C10D, NVRX, OURS, OURS_SQLITE, TORCHFT, System, checkout

from azureml_elastic.local.azurite import Azurite

HERE = Path(__file__).parent
LINES = HERE / "results" / "startup.jsonl"
PAGE = HERE / "results" / "startup.md"
PARTS = ["two", "three", "local", "growth"]
KINDS = {OURS: "azurite", OURS_SQLITE: "sqlite", C10D: "torchrun", TORCHFT: "torchft", NVRX: "nvrx"}
FOLDERS = {TORCHFT: "torchft", NVRX: "nvrx"}
"""Folders below --peers-in whose packages these systems need and the others must not have."""

BEFORE = "before"
LOCAL_NODES = (1, 3, 8)

START_TWO = "both nodes of the minimum are started → first step of all"
JOIN = "a third node is started → first step with it"
START_THREE = "three nodes are started → first step of all"
CPU_TWO = "CPU of a node until its first step, of two"
CPU_THREE = "CPU of a node until its first step, of three"
BESIDE = "private memory beside the worker"
TOTAL = "memory of the whole node, shared pages divided (PSS)"
AGENT = "the agent's resident memory (RSS)"
OWN = "agent and preload server, private, beyond one import of torch"
TORCH_CPU = "one import of torch: CPU"
TORCH_MEMORY = "one import of torch: private memory"

GOALS = {START_TWO: 2.6, JOIN: 2.6, CPU_TWO: 4.0, AGENT: 60.0, OWN: 150.0}
WALL, CPU, MEMORY = [START_TWO, JOIN, START_THREE], [CPU_TWO, CPU_THREE], [BESIDE, TOTAL, AGENT, OWN]


def local_name(nodes: int) -> str:
    return f"azureml-elastic local, {nodes} node{'s' if nodes > 1 else ''} → first step of all"


def local_cpu_name(nodes: int) -> str:
    return f"azureml-elastic local, {nodes} node{'s' if nodes > 1 else ''}: CPU of all until then"


GOALS[local_name(8)] = 7.0


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Args:
        benchmark: what was measured.
        system: measured system.
        run: number of the run, from 1.
        value: measured value, ``None`` when the limit was exceeded.
        unit: ``s`` of wall time, ``CPU s`` or ``MB``.
        load: load average of the machine over one minute.
    """

    benchmark: str
    system: str
    run: int
    value: float | None
    unit: str
    load: float


Medians = Mapping[tuple[str, str], list[Figure]]


def measure(systems: Sequence[System], arguments: argparse.Namespace, azurite: Azurite) -> Iterator[Figure]:
    """Measure everything but growth."""
    until = time.monotonic() + arguments.budget
    for run in range(1, arguments.runs + 1):
        if run > 1 and time.monotonic() > until:
            print(f"Out of time after {run - 1} of {arguments.runs} runs (--budget).", file=sys.stderr)
            return

        def figure(name: str, system: str, value: float | None, unit: str, run: int = run) -> Figure:
            return Figure(name, system, run, value, unit, os.getloadavg()[0])

        first = (run - 1) % len(systems)
        for system in (*systems[first:], *systems[:first]):
            if "two" in arguments.only:
                for name, value, unit in _two(system, arguments.limit, azurite):
                    yield figure(name, system.name, value, unit)
            if "three" in arguments.only:
                for name, value, unit in _three(system, arguments.limit, azurite):
                    yield figure(name, system.name, value, unit)
            # `local` chooses its own table.
            if "local" in arguments.only and system.kind == "azurite":
                for count in arguments.local_nodes:
                    started = measure_local(system, count, arguments.limit)
                    yield figure(local_name(count), system.name, started.seconds, "s")
                    yield figure(local_cpu_name(count), system.name, started.cpu.get(0), "CPU s")


def _two(system: System, limit_s: float, azurite: Azurite) -> Iterator[tuple[str, float | None, str]]:
    """Start the minimum of two nodes, look at their memory, and add a third one."""
    with started_nodes(system, (2, 3 if system.grows else 2), 2, azurite) as (cluster, began):
        started = cluster.wait_for_steps(began, limit_s)
        yield START_TWO, started.seconds, "s"
        if started.seconds is None:
            print(cluster.trees.logs(), file=sys.stderr)
            return
        yield CPU_TWO, statistics.fmean(started.cpu.values()), "CPU s"
        yield from _memory(system, cluster)
        if system.grows:
            joined = cluster.wait_for_steps(cluster.add(), limit_s)
            yield JOIN, joined.seconds, "s"
            if joined.seconds is None:
                print(cluster.trees.logs(), file=sys.stderr)


def _three(system: System, limit_s: float, azurite: Azurite) -> Iterator[tuple[str, float | None, str]]:
    with started_nodes(system, (3, 3), 3, azurite) as (cluster, began):
        started = cluster.wait_for_steps(began, limit_s)
        yield START_THREE, started.seconds, "s"
        if started.seconds is None:
            print(cluster.trees.logs(), file=sys.stderr)
        else:
            yield CPU_THREE, statistics.fmean(started.cpu.values()), "CPU s"


def _memory(system: System, cluster: Cluster) -> Iterator[tuple[str, float, str]]:
    """Look at the memory of nodes at rest."""
    cluster.settle()
    nodes = [cluster.memory(number) for number in cluster.nodes]
    yield BESIDE, statistics.fmean(node.beside for node in nodes), "MB"
    yield TOTAL, statistics.fmean(node.total for node in nodes), "MB"
    agents = [node.agent.rss for node in nodes if node.agent is not None]
    if agents:
        yield AGENT, statistics.fmean(agents), "MB"
    if system.ours:
        # Beside the nodes, so that the libraries of torch are shared as theirs are.
        cpu, memory = _one_import(system, cluster.trees)
        yield TORCH_CPU, cpu, "CPU s"
        yield TORCH_MEMORY, memory.uss, "MB"
        yield OWN, statistics.fmean(node.own for node in nodes) - memory.uss, "MB"


def _one_import(system: System, trees: Trees) -> tuple[float, Memory]:
    """Return CPU seconds and memory of a process that has only imported torch."""
    words = [system.python, "-c", "import torch, time; print('imported', flush=True); time.sleep(600)"]
    tree = trees.start("import", words, system.environment())
    while "imported" not in tree.log.read_text("utf-8"):
        if tree.root.poll() is not None:
            raise RuntimeError(f"torch cannot be imported: {tree.log.read_text('utf-8')}")
        time.sleep(0.02)
    cpu, memory = tree.cpu_seconds(), memory_of(tree.pid)
    tree.kill()
    assert memory is not None
    return cpu, memory


def grouped(figures: Sequence[Figure]) -> dict[tuple[str, str], list[Figure]]:
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.benchmark, figure.system), []).append(figure)
    return groups


def median(figures: Sequence[Figure]) -> float:
    """Return the median; infinite if half of the runs exceeded the limit."""
    values = [math.inf if each.value is None else each.value for each in figures]
    high = statistics.median_high(values)
    return statistics.median(values) if math.isfinite(high) else high


def best_peer(groups: Medians, benchmark: str, systems: Sequence[System]) -> tuple[float, str] | None:
    """Return the lowest median of the peers, and whose it is."""
    peers = [system.name for system in systems if not system.ours and (benchmark, system.name) in groups]
    return min(((median(groups[benchmark, name]), name) for name in peers), default=None)


def table(groups: Medians, benchmarks: Sequence[str], systems: Sequence[System]) -> str:
    """Return the medians with their ranges, ours by the best peer's, and the goals."""
    shown = [system.name for system in systems if any((name, system.name) in groups for name in benchmarks)]
    rows = [["", *shown, "ours / best peer", "goal"]]
    rows.append(["---"] * len(rows[0]))
    for benchmark in (name for name in benchmarks if any((name, system) in groups for system in shown)):
        cells = [_cell(groups.get((benchmark, name))) for name in shown]
        ours, best = groups.get((benchmark, OURS)), best_peer(groups, benchmark, systems)
        ratio = "" if ours is None or best is None else f"**{median(ours) / best[0]:.2f}** ({best[1]})"
        rows.append([benchmark, *cells, ratio, _goal(benchmark, ours)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(figures: Sequence[Figure] | None) -> str:
    if not figures:
        return "not measured"
    values, unit = [each.value for each in figures if each.value is not None], figures[0].unit
    middle = median(figures)
    if not math.isfinite(middle):
        return f"over the limit in {len(figures) - len(values)} of {len(figures)}"
    digits = 0 if unit == "MB" else 2
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"**{middle:.{digits}f} {unit}**{spread}"


def _goal(benchmark: str, ours: Sequence[Figure] | None) -> str:
    if benchmark not in GOALS:
        return ""
    if ours is None:
        return f"≤ {GOALS[benchmark]:g}"
    return f"≤ {GOALS[benchmark]:g}: {'met' if median(ours) <= GOALS[benchmark] else 'missed'}"


def behind(groups: Medians, systems: Sequence[System]) -> list[str]:
    """Return the benchmarks in which we are not ahead of the best peer."""
    found = []
    for benchmark in dict.fromkeys(name for name, _ in groups):
        best, ours = best_peer(groups, benchmark, systems), groups.get((benchmark, OURS))
        if best is not None and ours is not None and median(ours) >= best[0]:
            found.append(f"{benchmark}: {median(ours):.2f}, {best[1]} {best[0]:.2f} {ours[0].unit}")
    return found


def sections(groups: Medians, systems: Sequence[System], arguments: argparse.Namespace) -> dict[str, str]:
    """Return the tables by the names in the page's template."""
    counts = arguments.local_nodes
    local = [name(count) for name in (local_name, local_cpu_name) for count in counts]
    return {
        "wall": table(groups, WALL, systems),
        "cpu": table(groups, CPU, systems),
        "memory": table(groups, MEMORY, systems),
        "local": table(groups, local, [system for system in systems if system.kind == "azurite"]),
        "torch": table(groups, [TORCH_CPU, TORCH_MEMORY], [system for system in systems if system.ours]),
    }


def caution(load: float, runs: int) -> str:
    """Return a warning for the page if its times say little."""
    if load <= (os.cpu_count() or 1) and runs >= 3:
        return ""
    return (
        f"\n**Not to be relied on**: {runs} run(s) with a load average of {load:.1f}. "
        "Neither the times nor the CPU times nor their ratios hold; only memory does.\n"
    )


def write_page(
    tables: Mapping[str, str],
    growths: Sequence[Growth],
    skipped: Mapping[str, str],
    arguments: argparse.Namespace,
    load: float,
) -> None:
    page = Template((HERE / "startup_page.md").read_text("utf-8")).substitute(
        tables,
        date=f"{datetime.now().astimezone():%Y-%m-%d}",
        machine=machine(),
        load=f"{load:.1f}",
        runs=arguments.runs,
        limit=f"{arguments.limit:g}",
        accounting=accounting(),
        growth=growth_table(growths),
        caution=caution(load, arguments.runs),
        skipped="".join(f"\nNot measured: {name}, {reason}.\n" for name, reason in skipped.items()),
    )
    PAGE.write_text(page, "utf-8")


@contextlib.contextmanager
def chosen_systems(arguments: argparse.Namespace) -> Iterator[tuple[list[System], dict[str, str]]]:
    """Yield the systems that can be measured here, and why the others cannot."""
    with contextlib.ExitStack() as stack:
        path, python = stack.enter_context(checkout(arguments.ours)) if arguments.ours else (None, sys.executable)
        wanted = []
        for name in arguments.systems:
            kind = KINDS[name]
            if kind in ("azurite", "sqlite"):
                wanted.append(System(name, kind, python, path))
            else:
                folder = arguments.peers_in / FOLDERS[name] if arguments.peers_in and name in FOLDERS else None
                wanted.append(System(name, kind, path=folder))
        for where in arguments.before:
            path, python = stack.enter_context(checkout(where))
            # One before is simply that; of several, each by its name.
            label = BEFORE if len(arguments.before) == 1 else f"{BEFORE}, {Path(where).name}"
            wanted.append(System(label, "azurite", python, path))
        problems = {system.name: problem for system in wanted if (problem := system.problem()) is not None}
        for name, problem in problems.items():
            print(f"{name} is skipped: {problem}", file=sys.stderr)
        yield [system for system in wanted if system.name not in problems], problems


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of everything but growth")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which one start is given up")
    parser.add_argument("--budget", type=float, default=2400.0, help="seconds after which no further run begins")
    parser.add_argument("--rounds", type=int, default=50, help="of growth, each with the loss of a worker")
    parser.add_argument("--local-nodes", type=int, nargs="+", default=list(LOCAL_NODES))
    parser.add_argument("--systems", nargs="+", choices=list(KINDS), default=list(KINDS), help="to measure")
    parser.add_argument(
        "--before",
        nargs="+",
        default=[],
        metavar="REF|PATH",
        help="other versions of this library to measure as well: a commit, a checkout, or an environment's interpreter",
    )
    parser.add_argument("--ours", metavar="REF|PATH", help="measure that version instead of the installed one")
    parser.add_argument("--peers-in", type=Path, metavar="FOLDER", help="with the folders torchft and nvrx of packages")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="measure and print a part; the page and the lines stay as they are",
    )
    parser.add_argument("--dry", action="store_true", help="print, but leave the page and the lines as they are")
    parser.add_argument("--profile", action="store_true", help="only print where a node's CPU time goes")
    return parser.parse_args(argv)


def main() -> int:
    arguments = arguments_of()
    load, begun = os.getloadavg()[0], time.monotonic()
    figures: list[Figure] = []
    with Azurite() as azurite, chosen_systems(arguments) as (systems, skipped):
        if arguments.profile:
            for system in systems:
                if system.ours:
                    print_profile(system, azurite)
            return 0
        for figure in measure(systems, arguments, azurite):
            figures.append(figure)
            value = "over the limit" if figure.value is None else f"{figure.value:.2f} {figure.unit}"
            passed = time.monotonic() - begun
            print(f"{passed:4.0f} s  run {figure.run}  {figure.system:24} {figure.benchmark}: {value}", flush=True)
        growing = [each for each in systems if each.kind == "azurite"] if "growth" in arguments.only else []
        growths = [measure_growth(system, arguments.rounds, azurite) for system in growing]
    groups = grouped(figures)
    tables = sections(groups, systems, arguments)
    print("\n\n".join(tables.values()))
    if growths:
        print(growth_table(growths))
    print(f"{machine()}; load {load:.1f} before; CPU time by {accounting()}")
    if set(arguments.only) == set(PARTS) and not arguments.dry:
        write_lines([*figures, *growths], LINES)
        write_page(tables, growths, skipped, arguments, load)
    failures = behind(groups, systems)
    for failure in failures:
        print(f"Not ahead in: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
