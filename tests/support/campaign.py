"""One random fault, or two, of a run of real processes, and what an observer outside of the product saw of the run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from azureml_elastic.local.faults.model import TROUBLES

PROCESSES = ("worker", "agent", "preload server", "round store")
KINDS = (
    *(f"{process} {done}" for done in ("killed", "stopped") for process in PROCESSES),
    *("node killed", "node stopped", "notice", "short notice", "table", "disk", "cut", "one-way cut", "burst"),
)
AT = 25
"""The least step of the first fault."""


@dataclass(frozen=True)
class Trial:
    """What happens in the run of a seed.

    Args:
        kind: kind of the first fault.
        victim: whether it hits the node of rank 0, or another one.
        seconds: duration of a stop, a cut, a full disk or a short notice.
        schedule: faults that the launcher injects.
    """

    kind: str
    recovery: str
    victim: str
    step: int
    seconds: float
    schedule: str
    nodes: int = 3

    @property
    def process(self) -> str | None:
        """The process that is killed or stopped alone."""
        name = self.kind.rpartition(" ")[0]
        return name if name in PROCESSES else None

    @classmethod
    def draw(cls, seed: int) -> Trial:
        """Draw the faults of a seed; each kind comes with both recoveries in turn."""
        rng = random.Random(seed)
        turn, index = divmod(seed, len(KINDS))
        kind, recovery = KINDS[index], ("restart", "in_process")[(turn + index) % 2]
        victim, step, seconds = rng.choice(["rank0", "other"]), rng.randint(AT, AT + 15), float(rng.randint(2, 9))
        if kind == "short notice":  # the node is gone before it has left, often while it saves
            seconds = round(rng.uniform(0.25, 0.85), 2)
        target, when = "rank0" if victim == "rank0" else "any", f"step:{step}"
        faults = {
            "node killed": [f"kill={target}@{when}"],
            "node stopped": [f"freeze={target}@{when}/{seconds:g}s"],
            "notice": [f"preempt={target}@{when}/30s"],
            "short notice": [f"preempt={target}@{when}/{seconds:g}s"],
            "table": [f"table={rng.choice(TROUBLES)}@{when}/{seconds:g}s"],
            "burst": [f"kill={rng.choice(['rank0', 'any'])}@{when}"] * rng.randint(2, 4) + [f"add=2@step:{step + 9}"],
        }.get(kind, [])
        if kind not in ("burst", "cut", "one-way cut") and rng.random() < 1 / 2:
            faults.append(
                rng.choice(["add"] if "notice" in kind else ["kill=any", "add", "preempt=any"])
                + f"@step:{step + rng.randint(1, 20)}"
            )
        nodes = 6 if kind == "burst" else 3
        return cls(kind, recovery, victim, step, seconds, ",".join(faults), nodes)


class Line(NamedTuple):
    """One process has completed a step."""

    time: float
    round: int
    step: int
    node: str
    pid: int


def completed(folder: Path) -> list[Line]:
    """Return the steps that processes have completed, in order of time."""
    found = []
    for path in folder.glob("*.steps"):
        node, pid, _ = path.name.split(".")
        for line in path.read_text().splitlines():
            time, round_, step = line.split()
            found.append(Line(float(time), int(round_), int(step), node, int(pid)))
    return sorted(found)


def trained_again(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the steps that were trained again in a later round, each with one that had completed it first."""
    first: dict[int, Line] = {}
    again = {}
    for line in lines:
        before = first.setdefault(line.step, line)
        if line.round > before.round:
            again[line.step] = before
    return again


def lost_although_held(lines: Sequence[Line], dead: set[str | int]) -> set[int]:
    """Return the steps that were trained again although a process that lived had completed them before.

    Args:
        dead: nodes and processes that were killed.
    """
    again = trained_again(lines)
    newest = {step: max(line.round for line in lines if line.step == step) for step in again}
    held = [line for line in lines if line.step in again and line.round < newest[line.step]]
    return {line.step for line in held if not {line.node, line.pid} & dead}


def standstill_s(lines: Sequence[Line], since: float) -> float:
    """Return the longest time since a fault in which no step was completed that none had completed before."""
    reached, last, longest = 0, since, 0.0
    for line in lines:
        if line.step > reached:
            reached = line.step
            if line.time > since:
                longest, last = max(longest, line.time - last), line.time
    return longest


def seen(folder: Path) -> list[dict[float, int]]:
    """Return how many samples were trained how often, by the weights of each process that trained to the end."""
    found = []
    for path in folder.glob("*.weights"):
        counts = [round(count, 3) for count in json.loads(path.read_text())]
        found.append({count: counts.count(count) for count in set(counts)})
    return found


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what was measured by kind of fault and recovery."""
    lines = [f"{'fault':<24}{'recovery':<12}{'runs':>5}{'standstill median':>20}{'max':>8}{'steps again':>13}"]
    for kind, recovery in sorted({(row["kind"], row["recovery"]) for row in rows}):
        own = [row for row in rows if (row["kind"], row["recovery"]) == (kind, recovery)]
        gaps, again = [row["standstill_s"] for row in own], sum(row["again"] for row in own)
        lines.append(f"{kind:<24}{recovery:<12}{len(own):>5}{median(gaps):>18.1f} s{max(gaps):>6.1f} s{again:>13}")
    return "\n".join(lines)
