"""Draw ``assets/demo.svg`` from the folder of a demo run: world size, loss and nodes over the same time.

azureml-elastic demo --run-dir runs/picture
python docs/draw_demo.py runs/picture
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent / "assets" / "demo.svg"
WIDTH, LEFT, RIGHT = 920, 96, 28
CHART_TOP, UNIT = 84, 26
LOSS_HEIGHT = 110
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


def losses(folder: Path) -> list[tuple[float, float]]:
    """Return time and loss of the steps that the run's nodes have logged, in order of the steps."""
    found = {}
    for file in sorted((folder / "events").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["kind"] == "metrics" and "loss" in event["values"]:
                found[event["step"]] = (event["time"], event["values"]["loss"])
    return [found[step] for step in sorted(found)]


def draw(report: dict, logged: list[tuple[float, float]], accuracy: float | None) -> str:
    """Return the picture."""
    rounds = [each for each in report["rounds"] if each["ran"]]
    start, end = rounds[0]["started"], max(each["ended"] for each in rounds)
    scale = (WIDTH - LEFT - RIGHT) / (end - start)

    def x(time: float) -> float:
        return round(LEFT + (min(max(time, start), end) - start) * scale, 1)

    largest = max(each["world_size"] for each in rounds)
    base = CHART_TOP + largest * UNIT
    loss_base = base + 44 + LOSS_HEIGHT
    first_row = loss_base + 58
    rows = {node["name"]: first_row + index * (ROW + ROW_GAP) for index, node in enumerate(report["nodes"])}
    bottom = max(rows.values()) + ROW
    height = bottom + 74
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="A demo run over time: world size, loss and nodes">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '<text class="title" x="24" y="34">azureml-elastic demo: three nodes, one is killed, one joins</text>',
        f'<text class="small" x="24" y="{CHART_TOP - 18}">world size: workers that train</text>',
        *draw_sizes(rounds, x, base, largest),
        f'<text class="small" x="24" y="{base + 30}">loss, of the samples on rank 0</text>',
        *draw_losses(rounds, logged, x, loss_base),
        f'<text class="small" x="{LEFT}" y="{loss_base + 18}">0 s</text>',
        f'<text class="small" x="{WIDTH - RIGHT}" y="{loss_base + 18}" text-anchor="end">{end - start:.0f} s</text>',
        f'<text class="small" x="24" y="{loss_base + 44}">nodes (dark: rank 0)</text>',
    ]
    for name, y in rows.items():
        parts.append(f'<text x="24" y="{y + 13}">{escape(name)}</text>')
        for each in rounds:
            if name in each["members"]:
                kind = "rank0" if each["members"][0] == name else "member"
                left = x(each["started"])
                wide = max(x(each["ended"]) - left - 1.5, 1)
                parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{wide:.1f}" height="{ROW}" rx="2"/>')
    parts += draw_faults(report["faults"], x, rows)
    parts += draw_facts(report, accuracy, bottom)
    return "\n".join([*parts, "</svg>", ""])


def draw_sizes(rounds: list[dict], x, base: float, largest: int) -> list[str]:
    parts = []
    for size in range(largest + 1):
        y = base - size * UNIT
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="small" x="{LEFT - 16}" y="{y + 4}">{size}</text>')
    for each in rounds:
        top, left, right = base - each["world_size"] * UNIT, x(each["started"]), x(each["ended"])
        parts.append(f'<rect class="area" x="{left}" y="{top}" width="{right - left:.1f}" height="{base - top}"/>')
        parts.append(f'<path class="line" d="M{left} {top}H{right}"/>')
        steps = f"steps {(each['restored_step'] or 0) + 1} to {each['last_step']}"
        parts.append(f'<text class="small" x="{left + 6}" y="{base - 8}">round {each["number"]}: {steps}</text>')
    return parts


def draw_losses(rounds: list[dict], logged: list[tuple[float, float]], x, base: float) -> list[str]:
    most = max(value for _, value in logged)
    parts = []
    for share in (0, 0.5, 1):
        y = base - share * LOSS_HEIGHT
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{share * most:.1f}</text>')
    for each in rounds:  # a line for each round: nothing is trained between them
        points = [
            f"{x(time)} {base - value / most * LOSS_HEIGHT:.1f}"
            for time, value in logged
            if each["started"] <= time <= each["ended"]
        ]
        parts.append(f'<path class="line" d="M{"L".join(points)}"/>')
    return parts


def draw_faults(faults: list[dict], x, rows: dict[str, float]) -> list[str]:
    parts = []
    for fault in faults:
        for node in fault["nodes"]:
            at, y = x(fault["time"]), rows[node] + ROW / 2
            if fault["fault"].startswith("add"):
                parts.append(f'<path class="joined" d="M{at - 5} {y - 6}L{at + 6} {y}L{at - 5} {y + 6}Z"/>')
                parts.append(f'<text class="small" x="{at - 10}" y="{y + 4}" text-anchor="end">started</text>')
            else:
                cross = f"M{at - 6} {y - 6}L{at + 6} {y + 6}M{at - 6} {y + 6}L{at + 6} {y - 6}"
                parts.append(f'<path class="lost" d="{cross}"/>')
                text = f"killed at step {fault['step']}"
                parts.append(f'<text class="small" x="{at + 14}" y="{y + 4}">{text}</text>')
    return parts


def draw_facts(report: dict, accuracy: float | None, bottom: float) -> list[str]:
    lines = []
    audit = report["audit"]
    if audit and not audit["missing"] and not audit["repeated"] and not audit["unfinished"]:
        lines.append(
            f"exactly once: {audit['seen']:,} samples of {audit['epochs']} epochs, none missed, none repeated; "
            f"{report['lost_steps']} steps were trained again"
        )
    measured = [
        f"training resumed {each['seconds']:.1f} s after the loss of {', '.join(each['lost'])}"
        for each in report["recoveries"]
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
    reported = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    PICTURE.write_text(draw(reported, losses(folder), reached), encoding="utf-8")
