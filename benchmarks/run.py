"""Measure this library beside its peers in one run; prints a table and writes ``docs/benchmarks.md``.

Exit code 1 means that this library was not ahead of both peers in everything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from string import Template

from joining import Storm, StormFailed, measure_storm
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
from systems import C10D, OURS, ROW, SYSTEMS

HERE = Path(__file__).parent
LINES = HERE / "results" / "latest.jsonl"
PAGE = HERE.parent / "docs" / "benchmarks.md"

# Whoever connects to a torch store looks up the name of its address, even that of 127.0.0.1. Where the name server is
# slow, each of these connections, of any system, would take 5 s now and then.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}


def storm_name(nodes: int) -> str:
    return f"{nodes} nodes come at once → all are in"


def measure(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Measure everything, the systems taking turns, so that a change of the machine's load meets all of them."""
    until = time.monotonic() + arguments.budget
    for run in range(1, arguments.runs + 1):
        if run > 1 and time.monotonic() > until:
            print(f"Out of time after {run - 1} of {arguments.runs} runs (--budget).", file=sys.stderr)
            return
        for system in _in_turn(run):
            if "membership" in arguments.only:
                for event, seconds in measure_membership(system, arguments.limit):
                    yield Measurement(EVENTS[event], system, run, seconds, arguments.limit, os.getloadavg()[0])
        for nodes in arguments.nodes if "storms" in arguments.only else ():
            for system in _in_turn(run):
                try:
                    storm = measure_storm(system, nodes, arguments.limit)
                except (StormFailed, subprocess.TimeoutExpired) as error:
                    print(error, file=sys.stderr)
                    storm = Storm(None, 0, 0, 0)
                yield Measurement(
                    storm_name(nodes),
                    system,
                    run,
                    storm.seconds,
                    arguments.limit,
                    os.getloadavg()[0],
                    storm.writes,
                    storm.conflicts,
                )


def write_page(summaries: dict[tuple[str, str], Summary], arguments: argparse.Namespace, load: float) -> None:
    """Fill the template with what was measured."""
    events = list(EVENTS.values())
    storms = [storm_name(nodes) for nodes in arguments.nodes]
    page = Template((HERE / "page.md").read_text("utf-8")).substitute(
        date=f"{datetime.now().astimezone():%Y-%m-%d}",
        machine=machine(),
        load=f"{load:.1f}",
        ours=OURS,
        c10d=C10D,
        row=ROW,
        runs=max(summary.count for (name, _), summary in summaries.items() if name == EVENTS["start"]),
        limit=f"{arguments.limit:g}",
        membership=markdown_table(summaries, events, list(SYSTEMS)),
        storms=markdown_table(summaries, storms, list(SYSTEMS)),
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of everything")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which one measurement is given up")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further run begins")
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 128], help="sizes of the storms")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["membership", "storms"],
        default=["membership", "storms"],
        help="measure and print a part; the page and the lines stay as they are",
    )
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
    console.print(terminal_table(summaries, list(SYSTEMS)))
    console.print(f"{machine()}; load {load:.1f} before")
    if len(arguments.only) > 1:
        write_lines(measurements, LINES)
        write_page(summaries, arguments, load)
    failures = behind(summaries, list(SYSTEMS))
    for failure in failures:
        console.print(f"Not ahead in: {failure}", style="bold red")
    return 1 if failures else 0


def _in_turn(run: int) -> list[str]:
    names = list(SYSTEMS)
    first = (run - 1) % len(names)
    return names[first:] + names[:first]


if __name__ == "__main__":
    sys.exit(main())
