"""Charts over steps, of sums and over the time of a run: what ``charts.html`` draws, with a table of the same data.

Horizontal positions are percentages of the width, vertical ones pixels. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from azureml_elastic.ledger.timeline import RoundSpan
from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import activity_text, duration_text, nice_ticks, number_text, tick_text, time_ticks
from azureml_elastic.report.node_timelines import NodeTimeline
from azureml_elastic.report.page_content import PageContent, Rescale, WaterfallBar
from azureml_elastic.report.series import Series

ROW = 28
"""Height of a node's row in pixels."""

BAR = 16
"""Height of a bar in it."""

AXIS = 26
"""Height of a horizontal axis with its texts."""

TOP = 14
"""Upper end of the plot of a quantity in pixels; labels of rescales are above it."""

_SERIES_HEIGHT = 150
_CLOSEST_LABELS = 11.0
"""Least distance of two labels of rescales in percent of the width."""

_MOST_LINES, _MOST_STROKES = 24, 160
_MOST_CROSSES = 100

_SIZE_HEIGHT = 96
_MOST_OUTLINED = 60
"""Most rounds whose sizes have an outline, which would hide the area of more."""

_ACTIVITIES = ("starting", "waiting", "training", "saving", "recovering", "lost work", "unknown", "idle")
_MARKS = {
    "checkpoint": "checkpoint",
    "fault": "injected fault",
    "loss": "loss",
    "failure": "failure or hang",
    "added": "added node",
}


@dataclass(frozen=True)
class Scale:
    """A linear scale from ``low`` to ``high``, which are at ``start`` and ``end``."""

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0

    def __call__(self, value: float) -> float:
        """Return the position of a value; those outside of the scale are at its ends."""
        # Halves, as the difference of two numbers may be too large for a number.
        span = self.high / 2 - self.low / 2
        share = (value / 2 - self.low / 2) / span if span > 0 else 0.0
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def percent(value: float) -> str:
    """Return a horizontal position."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def pixels(value: float) -> str:
    """Return a vertical position."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class DataRow:
    """A row of a chart's table.

    Args:
        left: left edge of the same data in the image, in percent.
        right: its right edge.
        line: index of the node, where each has a line of its own.
    """

    cells: tuple[str, ...]
    left: float
    right: float
    line: int | None = None


class RescaleLine(NamedTuple):
    """A vertical line where the world size changed; its label may be empty."""

    at: float
    title: str
    label: str = ""
    anchor: str = ""


class Bar(NamedTuple):
    """A bar of the waterfall."""

    name: str
    activity: str
    left: float
    width: float
    share: str
    duration: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """An image and its data.

    Args:
        height: height of the image in pixels, without its axis.
        layout: class of the margins around the image.
        is_labelled: whether the image has all values as texts, so that it needs no cursor.
        grid: heights of horizontal lines, and texts.
        axis: positions on the horizontal axis, and texts; ``None`` for no axis.
        axis_is_grid: whether the axis has lines over the whole height.
        shapes: class and path of each line and area.
        is_dense: whether areas have no outline and are drawn darker.
        is_crowded: whether the rescales are short strokes, because there are too many for lines.
        crosses: positions of values that are NaN or infinite.
        symbols: kinds of marks that occur in them, with their names.
    """

    name: str
    title: str
    heading: str
    description: str
    height: int
    headings: tuple[str, ...]
    rows: tuple[DataRow, ...]
    note: str = ""
    layout: str = "narrow"
    is_labelled: bool = False
    grid: Sequence[tuple[float, str]] = ()
    axis: Sequence[tuple[float, str]] | None = None
    axis_is_grid: bool = True
    shapes: Sequence[tuple[str, str]] = ()
    is_dense: bool = False
    rescales: Sequence[RescaleLine] = ()
    is_crowded: bool = False
    crosses: Sequence[float] = ()
    bars: Sequence[Bar] = ()
    x: Scale | None = None
    nodes: Sequence[NodeTimeline] = ()
    activities: Sequence[str] = ()
    symbols: Sequence[tuple[str, str]] = ()


def series_chart(content: PageContent, series: Series, name: str, title: str, *, is_rate: bool = False) -> Chart:
    """Return the chart of a quantity over the steps.

    Args:
        is_rate: whether only the means count, from zero.
    """
    buckets = series.buckets
    first, last = buckets[0].first, buckets[-1].last
    x = Scale(first, max(last, first + 1))
    shown = [b for b in buckets if b.mean is not None]
    lows = [b.mean if is_rate else b.low for b in shown]
    highs = [b.mean if is_rate else b.high for b in shown]
    low = min((each for each in lows if each is not None), default=0.0)
    high = max((each for each in highs if each is not None), default=1.0)
    ticks = nice_ticks(min(low, 0.0) if is_rate else low, high, 4)
    y = Scale(ticks[0], ticks[-1], _SERIES_HEIGHT, TOP)
    line = [(x(b.middle), y(b.mean)) for b in shown if b.mean is not None]
    upper = [(x(b.middle), y(b.high)) for b in shown if b.high is not None]
    lower = [(x(b.middle), y(b.low)) for b in reversed(shown) if b.low is not None]
    spread = not is_rate and any(b.low != b.high for b in shown)
    if len(line) == 1:  # a line of one point would be invisible
        line = [(max(0.0, line[0][0] - 0.5), line[0][1]), (line[0][0] + 0.5, line[0][1])]
    end = next((b.mean for b in reversed(buckets) if b.mean is not None), None)
    values = f"between {number_text(low)} and {number_text(high)}, "
    rescales = [each for each in content.rescales if x.low <= each.step <= x.high]
    headings = ("steps", series.name) if is_rate else ("steps", "mean", "least", "greatest")
    if not is_rate and not spread:
        headings = ("step", "value")
    rows = []
    for b in buckets:
        mean = "none" if b.mean is None else number_text(b.mean)
        if b.not_finite:
            mean += f" ({b.not_finite} NaN or infinite)"
        ends = ("", "") if b.low is None or b.high is None else (number_text(b.low), number_text(b.high))
        rows.append(DataRow((b.steps, mean, *ends)[: len(headings)], x(b.middle), x(b.middle)))
    return Chart(
        name=name,
        title=title,
        heading=f"{title} over the steps",
        description=f"{title} of steps {first:,} to {last:,}: {values}"
        + ("without a finite value." if end is None else f"{number_text(end)} at the end."),
        height=_SERIES_HEIGHT,
        headings=headings,
        rows=tuple(rows),
        grid=[(y(tick), tick_text(tick)) for tick in ticks],
        axis=[
            (x(tick), tick_text(tick))
            for tick in nice_ticks(first, max(last, first + 1), 5)
            if first <= tick <= last and tick == int(tick)
        ],
        axis_is_grid=False,
        shapes=[*([("band", _path(upper + lower, closed=True))] if spread else []), ("line", _path(line))],
        rescales=tuple(_rescale_lines(rescales, x)),
        is_crowded=len(rescales) > _MOST_LINES,
        crosses=[x(b.middle) for b in buckets if b.not_finite][:_MOST_CROSSES],
    )


def _rescale_lines(rescales: Sequence[Rescale], x: Scale) -> Iterable[RescaleLine]:
    """Return where the world size changed, with labels that do not overlap, or without any where there are too many."""
    crowded = len(rescales) > _MOST_LINES
    last_line = last_label = float("-inf")
    for each in rescales:
        at = x(each.step)
        if crowded and at - last_line < 100 / _MOST_STROKES:
            continue
        last_line = at
        title = f"{each.before} to {counted(each.after, 'worker')} after step {each.step}"
        if crowded or at - last_label < _CLOSEST_LABELS:
            yield RescaleLine(at, title)
            continue
        last_label = at
        anchor = "start" if at < _CLOSEST_LABELS / 2 else "end" if at > 100 - _CLOSEST_LABELS / 2 else "middle"
        yield RescaleLine(at, title, f"{each.before}→{each.after}", anchor)


def waterfall_chart(bars: Sequence[WaterfallBar]) -> Chart:
    """Return the chart that leads from the delivered node-seconds to those of training that was kept."""
    whole = bars[0].seconds
    x = Scale(0, whole)
    drawn, rows = [], []
    for index, bar in enumerate(bars):
        at_edge = index in (0, len(bars) - 1)
        left = 0.0 if at_edge else x(bar.left)
        # Sums of floats may lead beyond the edge by a trace.
        width = x(bar.seconds) if at_edge else min(x(bar.seconds), 100 - left)
        share = bar.seconds / whole
        drawn.append(Bar(bar.name, bar.activity, left, width, f"{share:.1%}", duration_text(bar.seconds)))
        rows.append(DataRow((bar.name, f"{bar.seconds:,.1f}", f"{share:.2%}"), left, left + width))
    return Chart(
        name="waterfall",
        title="From delivered time to kept training",
        heading="Node-seconds by activity, from the delivered time to the training that was kept",
        description="; ".join(f"{bar.name} {bar.share}" for bar in drawn) + ".",
        height=len(bars) * ROW,
        headings=("activity", "node-seconds", "share"),
        rows=tuple(rows),
        note=f"{duration_text(whole)} of node time was delivered; what is left below is the goodput.",
        layout="bars",
        is_labelled=True,
        bars=drawn,
    )


def size_chart(content: PageContent) -> Chart:
    """Return the chart of the world size over time."""
    sizes, x = content.sizes, _time_scale(content)
    largest = max((span.world_size for span in sizes), default=1)
    ticks = [tick for tick in nice_ticks(0, largest, min(4, largest)) if tick == int(tick)]
    y = Scale(0, max(ticks[-1], 1), _SIZE_HEIGHT, 6)
    points: list[tuple[float, float]] = [(0.0, y(0))]
    for span in sizes:
        begin, end, top = x(span.started), x(span.ended), y(span.world_size)
        points += [(begin, points[-1][1]), (begin, top), (end, top), (end, y(0))]
    points.append((points[-1][0], y(0)))
    dense = len(sizes) > _MOST_OUTLINED
    rows = tuple(
        DataRow(
            (
                str(span.number),
                str(span.world_size),
                _since(content, span.started),
                duration_text(span.ended - span.started),
            ),
            x(span.started),
            x(span.ended),
        )
        for span in sizes
    )
    return Chart(
        name="size",
        title="World size",
        heading="World size over time",
        description=f"The world size was {_sequence(sizes)} in {counted(len(sizes), 'round')}.",
        height=_SIZE_HEIGHT,
        headings=("round", "workers", "from", "for"),
        rows=rows,
        layout="wide",
        grid=[(y(tick), tick_text(tick)) for tick in ticks],
        axis=_time_axis(content),
        shapes=[("area", _path(points, closed=True)), *([] if dense else [("line", _path(points))])],
        is_dense=dense,
    )


def nodes_chart(content: PageContent) -> Chart:
    """Return the timelines of the nodes."""
    x = _time_scale(content)
    activities = {segment.activity for node in content.nodes for segment in node.segments}
    kinds = {mark.kind for node in content.nodes for mark in node.marks}
    return Chart(
        name="nodes",
        title="Nodes",
        heading="What each node was doing over time",
        description="; ".join(_node_sentence(node) for node in content.nodes[:20]) + ".",
        height=len(content.nodes) * ROW,
        headings=("node", "activity", "from", "for", "round", "including"),
        rows=tuple(row for index, node in enumerate(content.nodes) for row in _node_rows(content, node, index, x)),
        note=f"Not shown: {counted(content.hidden_nodes, 'further node')}." if content.hidden_nodes else "",
        layout="wide",
        axis=_time_axis(content),
        x=x,
        nodes=content.nodes,
        activities=[name for name in _ACTIVITIES if name in activities],
        symbols=[(kind, name) for kind, name in _MARKS.items() if kind in kinds],
    )


def _time_scale(content: PageContent) -> Scale:
    return Scale(content.start, content.start + content.duration)


def _time_axis(content: PageContent) -> list[tuple[float, str]]:
    x = Scale(0, content.duration)
    return [(x(at), text) for at, text in time_ticks(content.duration)]


def _since(content: PageContent, time: float) -> str:
    return duration_text(max(0.0, time - content.start))


def _node_rows(content: PageContent, node: NodeTimeline, index: int, x: Scale) -> Iterable[DataRow]:
    for segment in node.segments:
        first, last = segment.rounds
        rounds = "" if not last else str(last) if first in (0, last) else f"{first} to {last}"
        cells = (
            node.node,
            activity_text(segment.activity, segment.cause),
            _since(content, segment.started),
            duration_text(segment.ended - segment.started),
            rounds,
            ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in segment.others),
        )
        yield DataRow(cells, x(segment.started), x(segment.ended), index)
    for mark in node.marks:
        yield DataRow((node.node, mark.text, _since(content, mark.time), "", "", ""), x(mark.time), x(mark.time), index)


def _node_sentence(node: NodeTimeline) -> str:
    sums: dict[str, float] = {}
    for segment in node.segments:
        sums[segment.activity] = sums.get(segment.activity, 0.0) + segment.ended - segment.started
    parts = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in sums.items())
    return f"{node.node}: {parts}" + (f", {node.ending}" if node.ending else "")


def _sequence(rounds: Sequence[RoundSpan], most: int = 12) -> str:
    merged = [size for size, _ in groupby(each.world_size for each in rounds)]
    text = ", then ".join(map(str, merged[:most])) or "no"
    return f"{text} and further" if len(merged) > most else text


def _path(points: Sequence[tuple[float, float]], *, closed: bool = False) -> str:
    """Return a path in units of a thousandth of the width, and of pixels."""
    if not points:
        return ""
    text = "L".join(f"{x * 10:.1f} {y:.1f}".replace(".0 ", " ").removesuffix(".0") for x, y in points)
    return f"M{text}Z" if closed else f"M{text}"
