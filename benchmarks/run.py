"""Measure this library beside its peers in one run; prints a table and writes ``benchmarks/results/recovery.md``.

Exit code 1 means that this library was not ahead of the peers in everything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from string import Template

from joining import (
    SCENARIOS,
    USD_PER_CALL,
    SimulatedStorm,
    Steady,
    Storm,
    StormFailed,
    measure_steady,
    measure_storm,
    simulate,
)
from measurements import (
    Measurement,
    Summary,
    behind,
    machine,
    markdown_table,
    summarise,
    terminal_table,
    write_lines,
)
from membership import EVENTS, measure_membership
from rich.console import Console
from systems import C10D, IN_PROCESS, OURS, ROW
from throughput import NAME as STEP
from throughput import measure_step

HERE = Path(__file__).parent
LINES = HERE / "results" / "latest.jsonl"
PAGE = HERE / "results" / "recovery.md"
PARTS = ["membership", "steps", "storms", "simulations", "steady"]

STORM_LIMIT = 30.0
"""Seconds, the same for all."""

# A client of a torch store looks up the name of its address, even of 127.0.0.1. With a slow name server each of these
# connections, of any system, can take 5 s.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}


def storm_name(nodes: int) -> str:
    return f"{nodes} nodes come at once → all are in"


def measure(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Measure everything, the systems taking turns, so that a change of the machine's load meets all of them."""
    until = time.monotonic() + arguments.budget
    limit = arguments.limit

    def measured(
        name: str, system: str, seconds: float | None, *, limit_s: float = limit, **more: int | None
    ) -> Measurement:
        return Measurement(name, system, run, seconds, limit_s, os.getloadavg()[0], **more)

    for run in range(1, arguments.runs + 1):
        if run > 1 and time.monotonic() > until:
            print(f"Out of time after {run - 1} of {arguments.runs} runs (--budget).", file=sys.stderr)
            return
        if "membership" in arguments.only:
            for system in _in_turn(run, [OURS, IN_PROCESS, *arguments.peers]):
                for event, seconds, lost in measure_membership(system, limit):
                    yield measured(EVENTS[event], system, seconds, lost_steps=lost)
        if "steps" in arguments.only:
            for system in _in_turn(run, [OURS, C10D]):
                yield measured(STEP, system, measure_step(system, limit))
        for nodes in arguments.nodes if "storms" in arguments.only else ():
            for system in _in_turn(run, [OURS, *arguments.peers]):
                try:
                    storm = measure_storm(system, nodes, STORM_LIMIT)
                except (StormFailed, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr)
                    storm = Storm(None, 0, 0, 0, 0)
                yield measured(
                    storm_name(nodes),
                    system,
                    storm.seconds,
                    limit_s=STORM_LIMIT,
                    writes=storm.writes,
                    conflicts=storm.conflicts,
                )


def simulations_table(simulated: Sequence[SimulatedStorm]) -> str:
    rows = [
        f"| {SCENARIOS[each.scenario]} | **{each.seconds:.1f} s** | {each.rounds} | {each.writes} | {each.conflicts} "
        f"| {each.calls:,} |"
        for each in simulated
    ]
    head = ["", "until all are in", "rounds", "writes of a node", "writes in vain", "calls"]
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *rows])


def steady_table(steady: Sequence[Steady]) -> str:
    """Return what was counted, and what it means for more nodes: only rank 0's node calls, whatever their number."""
    rows = [f"| {each.nodes} | {each.calls / each.seconds:.2f} | {each.per_node_and_second:.3f} |" for each in steady]
    head = ["nodes", "calls a second", "calls a second and node"]
    table = "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *rows])
    rate = max(each.calls / each.seconds for each in steady)
    prices = ", ".join(f"{nodes} nodes {rate * 86_400 * USD_PER_CALL:.4f}" for nodes in (8, 64, 512))
    return f"{table}\n\nIn USD a day: {prices}; at {USD_PER_CALL * 10_000:g} for 10,000 calls."


def write_page(
    summaries: dict[tuple[str, str], Summary],
    simulated: Sequence[SimulatedStorm],
    steady: Sequence[Steady],
    arguments: argparse.Namespace,
    load: float,
) -> None:
    """Fill the template with what was measured."""
    storms = [storm_name(nodes) for nodes in arguments.nodes]
    ours, theirs = summaries[STEP, OURS].median, summaries[STEP, C10D].median
    page = Template((HERE / "page.md").read_text("utf-8")).substitute(
        date=f"{datetime.now().astimezone():%Y-%m-%d}",
        machine=machine(),
        load=f"{load:.1f}",
        ours=OURS,
        in_process=IN_PROCESS,
        c10d=C10D,
        runs=max(summary.count for (name, _), summary in summaries.items() if name == EVENTS["start"]),
        limit=f"{arguments.limit:g}",
        storm_limit=f"{STORM_LIMIT:g}",
        membership=markdown_table(summaries, list(EVENTS.values()), [OURS, IN_PROCESS, *arguments.peers]),
        storms=markdown_table(summaries, storms, [OURS, *arguments.peers]),
        simulations=simulations_table(simulated),
        steady=steady_table(steady),
        step_ours=f"{ours * 1000:.2f}",
        step_c10d=f"{theirs * 1000:.2f}",
        throughput=f"{theirs / ours:.3f}",
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of everything")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which one measurement is given up")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds after which no further run begins")
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 256], help="sizes of the storms")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="measure and print a part; the page and the lines stay as they are",
    )
    parser.add_argument("--peers", nargs="*", choices=[C10D, ROW], default=[C10D], help="to measure beside")
    arguments = parser.parse_args()
    os.environ.update(NO_NAME_SERVER)  # for all processes that are started from here
    load, begun = os.getloadavg()[0], time.monotonic()
    console = Console()
    measurements: list[Measurement] = []
    for each in measure(arguments):
        measurements.append(each)
        seconds = f"> {each.limit_s:g} s" if each.seconds is None else f"{each.seconds:.2f} s"
        passed = time.monotonic() - begun
        console.print(f"{passed:4.0f} s  run {each.run}  {each.system:24} {each.benchmark}: {seconds}", soft_wrap=True)
    summaries = summarise(measurements)
    console.print(terminal_table(summaries, [OURS, IN_PROCESS, *arguments.peers]))
    simulated = [simulate(scenario) for scenario in SCENARIOS] if "simulations" in arguments.only else []
    steady = [measure_steady(nodes) for nodes in (3, 8)] if "steady" in arguments.only else []
    for each in [*simulated, *steady]:
        console.print(each)
    console.print(f"{machine()}; load {load:.1f} before")
    if set(arguments.only) == set(PARTS):
        write_lines([*measurements, *simulated, *steady], LINES)
        write_page(summaries, simulated, steady, arguments, load)
    compared = {key: value for key, value in summaries.items() if key[0] != STEP and key[1] != IN_PROCESS}
    failures = behind(compared, [OURS, *arguments.peers])
    for failure in failures:
        console.print(f"Not ahead in: {failure}", style="bold red")
    return 1 if failures else 0


def _in_turn(run: int, names: list[str]) -> list[str]:
    first = (run - 1) % len(names)
    return names[first:] + names[:first]


if __name__ == "__main__":
    sys.exit(main())
