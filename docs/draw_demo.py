"""Draw ``assets/demo.svg`` from the folder of a demo run.

azureml-elastic demo --run-dir runs/picture
python docs/draw_demo.py runs/picture
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

from azureml_elastic.ledger.summary import Report, load_report
from azureml_elastic.ledger.timeline import RoundSpan

WIDTH, LEFT, RIGHT = 920, 96, 28
CHART_TOP, UNIT = 84, 26
ROW, ROW_GAP = 18, 10

STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .title { font-size: 16px; font-weight: 600; }
    .small { font-size: 11.5px; fill: #59636e; }
    .on { fill: #ffffff; font-size: 11.5px; }
    .grid { stroke: #d0d7de; stroke-width: 1; }
    .area { fill: #ddf4ff; } .line { stroke: #0969da; stroke-width: 2; fill: none; }
    .rank0 { fill: #0969da; } .member { fill: #6cb6ff; }
    .lost { stroke: #cf222e; stroke-width: 3; } .joined { fill: #1a7f37; }
    .good { fill: #1a7f37; font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d; } text { fill: #e6edf3; } .small { fill: #9198a1; }
      .on { fill: #ffffff; } .grid { stroke: #3d444d; } .area { fill: #0c2d6b; } .line { stroke: #4493f8; }
      .rank0 { fill: #1f6feb; } .member { fill: #255ab2; } .good, .joined { fill: #3fb950; } .lost { stroke: #f85149; }
    }
"""


def draw(report: Report, accuracy: float | None) -> str:
    """Return the picture."""
    rounds = [round_ for round_ in report.rounds if round_.ran]
    start, end = rounds[0].started, max(round_.ended for round_ in rounds)
    scale = (WIDTH - LEFT - RIGHT) / (end - start)

    def x(time: float) -> float:
        return round(LEFT + (min(max(time, start), end) - start) * scale, 1)

    largest = max(round_.world_size for round_ in rounds)
    base = CHART_TOP + largest * UNIT
    rows = {node.name: base + 58 + index * (ROW + ROW_GAP) for index, node in enumerate(report.nodes)}
    bottom = max(rows.values()) + ROW
    height = bottom + 74
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="A demo run over time">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '<text class="title" x="24" y="34">azureml-elastic demo: three nodes, one is killed, one joins</text>',
        f'<text class="small" x="24" y="{CHART_TOP - 18}">workers that train</text>',
        *_sizes(rounds, x, base, largest),
        f'<text class="small" x="24" y="{base + 44}">nodes (dark: rank 0)</text>',
    ]
    for name, y in rows.items():
        parts.append(f'<text x="24" y="{y + 13}">{escape(name)}</text>')
        for round_ in rounds:
            if name in round_.members:
                kind = "rank0" if round_.members[0] == name else "member"
                wide = max(x(round_.ended) - x(round_.started) - 1.5, 1)
                parts.append(
                    f'<rect class="{kind}" x="{x(round_.started)}" y="{y}" width="{wide:.1f}" height="{ROW}" rx="2"/>'
                )
    parts += _faults(report, x, rows)
    parts += _facts(report, accuracy, bottom)
    return "\n".join([*parts, "</svg>", ""])


def _sizes(rounds: list[RoundSpan], x, base: float, largest: int) -> list[str]:
    parts = []
    for size in range(largest + 1):
        y = base - size * UNIT
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="small" x="{LEFT - 16}" y="{y + 4}">{size}</text>')
    for round_ in rounds:
        top, left, right = base - round_.world_size * UNIT, x(round_.started), x(round_.ended)
        parts.append(f'<rect class="area" x="{left}" y="{top}" width="{right - left:.1f}" height="{base - top}"/>')
        parts.append(f'<path class="line" d="M{left} {top}H{right}"/>')
        first = (round_.restored_step or 0) + 1
        parts.append(
            f'<text class="small" x="{left + 6}" y="{base - 8}">round {round_.number}: steps {first} to '
            f"{round_.last_step}</text>"
        )
    seconds = rounds[-1].ended - rounds[0].started
    parts.append(f'<text class="small" x="{LEFT}" y="{base + 18}">0 s</text>')
    parts.append(f'<text class="small" x="{WIDTH - RIGHT}" y="{base + 18}" text-anchor="end">{seconds:.0f} s</text>')
    return parts


def _faults(report: Report, x, rows: dict[str, float]) -> list[str]:
    parts = []
    for fault in report.faults:
        for node in fault.nodes:
            at, y = x(fault.time), rows[node] + ROW / 2
            if fault.fault.startswith("add"):
                parts.append(f'<path class="joined" d="M{at - 5} {y - 6}L{at + 6} {y}L{at - 5} {y + 6}Z"/>')
                parts.append(f'<text class="small" x="{at - 10}" y="{y + 4}" text-anchor="end">started</text>')
            else:
                parts.append(
                    f'<path class="lost" d="M{at - 6} {y - 6}L{at + 6} {y + 6}M{at - 6} {y + 6}L{at + 6} {y - 6}"/>'
                )
                parts.append(f'<text class="small" x="{at + 14}" y="{y + 4}">killed at step {fault.step}</text>')
    return parts


def _facts(report: Report, accuracy: float | None, bottom: float) -> list[str]:
    lines = []
    if report.audit is not None and report.audit.complete:
        audit = report.audit
        lines.append(
            f"exactly once: {audit.seen:,} samples of {audit.epochs} epochs, none missed, none repeated; "
            f"{audit.rolled_back_steps} steps were rolled back and trained again"
        )
    measured = [
        f"training resumed {one.seconds:.1f} s after the loss of {', '.join(one.lost)}" for one in report.recoveries
    ]
    if accuracy is not None:
        measured.append(f"accuracy on held-out digits {accuracy:.1%}")
    lines.append(" · ".join(measured))
    return [
        f'<text class="{"good" if index == 0 and len(lines) > 1 else "small"}" x="24" y="{bottom + 32 + 22 * index}">'
        f"{escape(line)}</text>"
        for index, line in enumerate(lines)
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = folder / "result.json"
    reached = json.loads(result.read_text(encoding="utf-8"))["accuracy"] if result.exists() else None
    target = Path(__file__).parent / "assets" / "demo.svg"
    target.write_text(draw(load_report(folder), reached), encoding="utf-8")
