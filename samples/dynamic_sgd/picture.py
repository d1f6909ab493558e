"""Draws the loss around changes of the world size as SVG, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from study import AFTER, BEFORE, Change

WIDTH, HEIGHT = 920, 430
LEFT, RIGHT, GAP = 56, 24, 44
TOP, BOTTOM = 112, 48

STYLE = """
    .card { fill: #ffffff; stroke: #d0d7de; }
    text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .title { font-size: 16px; font-weight: 600; }
    .small { font-size: 11.5px; fill: #59636e; }
    .grid { stroke: #d0d7de; stroke-width: 1; } .change { stroke: #59636e; stroke-dasharray: 3 3; }
    .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
    .c0 { stroke: #6e7781; } .c1 { stroke: #cf222e; } .c2 { stroke: #0969da; } .c3 { stroke: #bc6c00; }
    .c4 { stroke: #1a7f37; } .c5 { stroke: #8250df; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d; } text { fill: #e6edf3; } .small { fill: #9198a1; }
      .grid { stroke: #3d444d; } .change { stroke: #9198a1; }
      .c0 { stroke: #9198a1; } .c1 { stroke: #f85149; } .c2 { stroke: #4493f8; } .c3 { stroke: #e3973b; }
      .c4 { stroke: #3fb950; } .c5 { stroke: #ab7df8; }
    }
"""


@dataclass(frozen=True)
class Panel:
    """One change under several policies.

    Args:
        title: title of the picture.
        changes: loss around each change by policy name.
    """

    title: str
    changes: Mapping[str, Change]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the picture: the mean over seeds, over samples since the change; a policy has one colour in all panels."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.changes))
    means = [mean for panel in panels for each in panel.changes.values() for _, mean in _points(each)]
    lowest, highest = math.floor(min(means) * 10) / 10, math.ceil(max(means) * 10) / 10
    wide = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)

    def y(loss: float) -> float:
        return TOP + (highest - loss) / (highest - lowest) * (HEIGHT - TOP - BOTTOM)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="{escape(title)}">'
        ),
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<text class="title" x="24" y="34">{escape(title)}</text>',
        *_legend(names),
    ]
    ticks = range(round(lowest * 10), round(highest * 10) + 1, 1 if highest - lowest < 1 else 2)
    for number, panel in enumerate(panels):
        left = LEFT + number * (wide + GAP)

        def x(samples: float, left: float = left) -> float:
            return left + (samples + BEFORE) / (BEFORE + AFTER) * wide

        parts.append(f'<text x="{left}" y="{TOP - 14}">{escape(panel.title)}</text>')
        for tick in ticks:
            at = f"{y(tick / 10):.1f}"
            parts.append(f'<line class="grid" x1="{left}" x2="{left + wide}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text class="small" x="{left - 8}" y="{at}" dy="4" text-anchor="end">{tick / 10:.1f}</text>')
        parts += [
            f'<text class="small" x="{x(since):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{since:,}</text>'
            for since in range(0, AFTER + 1, 10_000)
        ]
        parts.append(f'<path class="change" d="M{x(0):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        for name, change in panel.changes.items():
            line = "L".join(f"{x(seen):.1f} {y(mean):.1f}" for seen, mean in _points(change))
            parts.append(f'<path class="curve c{names.index(name)}" d="M{line}"/>')
    parts.append(
        f'<text class="small" x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">'
        "mean loss of all seeds over samples since the change</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _points(change: Change) -> list[tuple[int, float]]:
    return [
        (seen - change.at, mean)
        for seen, mean in zip(map(int, change.seen), map(float, change.losses.mean(1)), strict=True)
        if math.isfinite(mean)
    ]


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    at = 24.0
    for number, name in enumerate(names):
        parts.append(f'<path class="curve c{number}" d="M{at:.0f} 60h22"/>')
        parts.append(f'<text x="{at + 28:.0f}" y="64">{escape(name)}</text>')
        at += 28 + 7.2 * len(name) + 18
    return parts
