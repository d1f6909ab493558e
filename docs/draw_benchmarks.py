"""Draw ``assets/benchmarks.svg`` from ``benchmarks/results/latest.jsonl``: ``python docs/draw_benchmarks.py``."""

from __future__ import annotations

import json
from collections import defaultdict
from html import escape
from math import log10
from pathlib import Path
from statistics import median

from draw_demo import STYLE as DEMO_STYLE

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "latest.jsonl"
PICTURE = ROOT / "docs" / "assets" / "benchmarks.svg"

EVENTS = {
    "a worker is killed → next step": "a worker is killed",
    "a node is killed → next step of the others": "a node is killed",
    "rank 0's node is killed → next step of the others": "rank 0's node is killed",
    "a node is frozen → next step of the others": "a node is frozen",
    "a third node joins: training is paused": "a node joins: pause",
    "both nodes of the minimum are started at once → first step": "two nodes start",
}
SYSTEMS = {"azureml-elastic": "ours", "azureml-elastic, in process": "process", "torchrun, c10d": "peer"}
WIDTH, LEFT, RIGHT, TOP = 760, 190, 110, 72
BAR, GAP = 14, 14
LEAST, MOST = 0.1, 60.0

STYLE = f"""{DEMO_STYLE}
    .ours {{ fill: #0969da; }} .process {{ fill: #6cb6ff; }} .peer {{ fill: #8c959f; }}
    @media (prefers-color-scheme: dark) {{
      .ours {{ fill: #58a6ff; }} .process {{ fill: #255ab2; }} .peer {{ fill: #7d8590; }}
    }}
"""


def medians() -> dict[tuple[str, str], float | None]:
    """Return the median of each event and system; ``None`` where the limit was exceeded."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        if each.get("benchmark") in EVENTS:
            found[each["benchmark"], each["system"]].append(
                float("inf") if each["seconds"] is None else each["seconds"]
            )
    return {key: None if median(values) == float("inf") else median(values) for key, values in found.items()}


def across(seconds: float) -> float:
    """Return the place of a duration on the logarithmic axis."""
    share = log10(seconds / LEAST) / log10(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def main() -> None:
    """Write the picture."""
    values, parts, y = medians(), [], float(TOP)
    for event, label in EVENTS.items():
        parts.append(f'<text x="{LEFT - 10}" y="{y + 1.5 * BAR}" dy="4" text-anchor="end">{escape(label)}</text>')
        for system, name in SYSTEMS.items():
            seconds = values[event, system]
            end = across(MOST if seconds is None else seconds)
            text = f"> {MOST:.0f} s" if seconds is None else f"{seconds:.2f} s"
            parts += [
                f'<rect class="{name}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 2}" rx="2"/>',
                f'<text class="small" x="{end + 6:.1f}" y="{y + BAR / 2 - 1}" dy="4">{escape(text)}</text>',
            ]
            y += BAR
        y += GAP
    grid = [
        f'<line class="grid" x1="{across(at):.1f}" x2="{across(at):.1f}" y1="{TOP - 8}" y2="{y - GAP + 6}"/>'
        f'<text class="small" x="{across(at):.1f}" y="{y + 4}" text-anchor="middle">{at:g} s</text>'
        for at in (0.1, 1.0, 10.0, 60.0)
    ]
    legend, x = [], float(LEFT)
    for system, name in SYSTEMS.items():
        legend.append(f'<rect class="{name}" x="{x}" y="44" width="11" height="11" rx="2"/>')
        legend.append(f'<text class="small" x="{x + 16}" y="50" dy="4">{escape(system)}</text>')
        x += 34 + 6.6 * len(system)
    height = y + 20
    title = "Time until training goes on, medians on one machine (logarithmic)"
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>\n'
        f'<text class="title" x="20" y="26">{title}</text>\n' + "\n".join([*legend, *grid, *parts]) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
