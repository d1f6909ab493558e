"""Draw ``assets/t5-loss.svg`` and ``assets/t5-nodes.svg`` from the folder of both jobs of the T5 sample.

python samples/t5_summarization --small --folder runs/t5
python docs/draw_t5.py runs/t5 13.46 2.69      # dollars per node and hour: base job, elastic job
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from draw_demo import STYLE as DEMO_STYLE

from azureml_elastic.ledger.summary import Report, load_report

WIDTH, LEFT, RIGHT = 720, 64, 24
TOP, CHART, UNIT, GAP = 72, 190, 30, 62

STYLE = f"""{DEMO_STYLE}
    .base {{ stroke: #8c959f; fill: none; }} .elastic {{ stroke: #0969da; fill: none; }}
    .change {{ stroke: #59636e; stroke-dasharray: 2 4; }}
    .base-area {{ fill: #afb8c1; }} .elastic-area {{ fill: #6cb6ff; }}
    @media (prefers-color-scheme: dark) {{
      .base {{ stroke: #7d8590; }} .elastic {{ stroke: #58a6ff; }} .change {{ stroke: #9198a1; }}
      .base-area {{ fill: #3d444d; }} .elastic-area {{ fill: #255ab2; }}
    }}
"""


@dataclass(frozen=True)
class Job:
    """A finished job.

    Args:
        name: ``base`` or ``elastic``.
        report: report of the run.
        losses: loss by optimizer step.
        price: dollars per node and hour.
    """

    name: str
    report: Report
    losses: dict[int, float]
    price: float

    @property
    def spans(self) -> list[tuple[float, float, int]]:
        """Start and end in seconds since the first round, and the number of nodes, of each round and its successor."""
        rounds = self.report.rounds
        zero = rounds[0].started
        ends = [each.started for each in rounds[1:]] + [rounds[-1].ended]
        return [(one.started - zero, end - zero, len(one.members)) for one, end in zip(rounds, ends, strict=True)]

    @property
    def facts(self) -> str:
        """Time, node seconds and cost."""
        node_seconds = sum((end - start) * nodes for start, end, nodes in self.spans)
        return (
            f"{self.name} job: {self.spans[-1][1]:.0f} s, {node_seconds:.0f} node seconds, "
            f"${node_seconds / 3600 * self.price:.3f} at ${self.price:.2f} per node and hour"
        )


def read(folder: Path, name: str, price: float) -> Job:
    """Read what a job has left in the folder."""
    log = json.loads((folder / name / "output" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = {each["step"]: each["loss"] for each in log if "loss" in each}
    return Job(name, load_report(folder / name / "run"), losses, price)


def draw_losses(base: Job, elastic: Job) -> str:
    """Return the picture of both losses over steps; dotted lines are changes of the elastic job's nodes."""
    steps = max(base.losses)
    high = max([*base.losses.values(), *elastic.losses.values()])
    bottom = TOP + CHART

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / steps, 1)

    def y(loss: float) -> float:
        return round(bottom - CHART * loss / high, 1)

    parts = []
    for loss in range(int(high) + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss)}" y2="{y(loss)}"/>')
        parts.append(f'<text class="small" x="{LEFT - 12}" y="{y(loss) + 4}" text-anchor="end">{loss}</text>')
    parts += [
        f'<text class="small" x="{x(number)}" y="{bottom + 18}" text-anchor="middle">{number}</text>'
        for number in range(0, steps + 1, 10)
    ]
    for before, after in pairwise(elastic.report.rounds):
        at = x(after.restored_step or 0)
        parts.append(f'<line class="change" x1="{at}" x2="{at}" y1="{TOP - 8}" y2="{bottom}"/>')
        change = f"{before.world_size} → {after.world_size} nodes"
        parts.append(f'<text class="small" x="{at + 5}" y="{TOP + 2}">{change}</text>')
    for job, width in ((base, 6), (elastic, 2)):
        points = " ".join(f"{x(step)},{y(loss)}" for step, loss in sorted(job.losses.items()))
        parts.append(f'<polyline class="{job.name}" stroke-width="{width}" points="{points}"/>')
    legend = bottom + 44
    for at, job, width in ((LEFT, base, 6), (LEFT + 190, elastic, 2)):
        mean = sum(job.losses.values()) / len(job.losses)
        parts.append(f'<path class="{job.name}" stroke-width="{width}" d="M{at} {legend - 4}h24"/>')
        parts.append(f'<text class="small" x="{at + 32}" y="{legend}">{job.name} job, mean {mean:.4f}</text>')
    title = "T5 summarization: loss over optimizer steps"
    return _picture(title, legend + 24, parts)


def draw_nodes(*jobs: Job) -> str:
    """Return the picture of the nodes of each job over time; the areas are the node seconds."""
    seconds = max(job.spans[-1][1] for job in jobs)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    parts, base = [], TOP - GAP + 14
    for job in jobs:
        most = max(nodes for _, _, nodes in job.spans)
        parts.append(f'<text x="{LEFT}" y="{base + GAP - 22}">{escape(job.facts)}</text>')
        base += GAP - 10 + most * UNIT
        for start, end, nodes in job.spans:
            parts.append(
                f'<rect class="{job.name}-area" x="{LEFT + start * scale:.1f}" y="{base - nodes * UNIT}" '
                f'width="{(end - start) * scale:.1f}" height="{nodes * UNIT}"/>'
            )
        for nodes in range(most + 1):
            y = base - nodes * UNIT
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="small" x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{nodes}</text>')
    for second in range(0, int(seconds) + 1, 5):
        at = round(LEFT + second * scale, 1)
        parts.append(f'<text class="small" x="{at}" y="{base + 18}" text-anchor="middle">{second} s</text>')
    return _picture("T5 summarization: nodes over time", base + 38, parts)


def _picture(title: str, height: float, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    heading = f'<text class="title" x="24" y="34">{escape(title)}</text>'
    return "\n".join([head, f"<style>{STYLE}</style>", card, heading, *parts, "</svg>", ""])


if __name__ == "__main__":
    folder, prices = Path(sys.argv[1]), [float(price) for price in sys.argv[2:4]]
    both = [read(folder, name, price) for name, price in zip(("base", "elastic"), prices, strict=True)]
    assets = Path(__file__).parent / "assets"
    (assets / "t5-loss.svg").write_text(draw_losses(*both), encoding="utf-8")
    (assets / "t5-nodes.svg").write_text(draw_nodes(*both), encoding="utf-8")
