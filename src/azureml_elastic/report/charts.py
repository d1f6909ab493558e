"""Charts over steps, of sums and over the time of a run, each as an image with a table of the same data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import activity_text, duration_text, nice_ticks, number_text, tick_text, time_ticks
from azureml_elastic.report.node_timelines import Mark, NodeTimeline, Segment
from azureml_elastic.report.page_content import PageContent, Rescale, WaterfallBar
from azureml_elastic.report.series import Series
from azureml_elastic.report.svg import (
    Markup,
    Scale,
    element,
    horizontal_grid,
    joined,
    percent,
    picture,
    stretched,
    vertical_axis,
)

__all__ = [
    "BAR",
    "ROW",
    "Chart",
    "DataRow",
    "activity_class",
    "nodes_chart",
    "series_chart",
    "size_chart",
    "waterfall_chart",
]

ROW = 28
"""Height of a node's row in pixels."""

BAR = 16
"""Height of a bar in it."""

AXIS = 26
"""Height of a horizontal axis with its texts."""

_SERIES_HEIGHT, _TOP = 150, 14
_CLOSEST_LABELS = 11.0
"""Least distance of two labels of rescales in percent of the width."""

_MOST_LINES, _MOST_STROKES = 24, 160

_SIZE_HEIGHT = 96
_LONGEST_NAME = 15
_MOST_OUTLINED = 60
"""Most rounds whose sizes have an outline, which would hide the area of more."""


def activity_class(activity: str) -> str:
    """Return the class of an activity's colour and pattern."""
    return f"a-{activity.replace(' ', '-')}"


@dataclass(frozen=True)
class DataRow:
    """A row of a chart's table.

    Args:
        cells: texts.
        left: left edge of the same data in the image, in percent.
        right: its right edge.
        line: index of the node, where each has a line of its own.
    """

    cells: tuple[str, ...]
    left: float
    right: float
    line: int | None = None


@dataclass(frozen=True)
class Chart:
    """An image and its data.

    Args:
        name: name that is unique in the page.
        title: heading.
        headings: headings of the data.
        note: sentence below the heading; may be empty.
        layout: class of the margins around the image.
        lines: names of the nodes that have a line each.
        is_labelled: whether the image has all values as texts, so that it needs no cursor.
    """

    name: str
    title: str
    image: Markup
    headings: tuple[str, ...]
    rows: tuple[DataRow, ...]
    note: str = ""
    layout: str = "narrow"
    lines: tuple[str, ...] = ()
    is_labelled: bool = False


def series_chart(content: PageContent, series: Series, name: str, title: str, *, is_rate: bool = False) -> Chart:
    """Return the chart of a quantity over the steps.

    Args:
        series: quantity.
        name: name of the chart that is unique in the page.
        title: heading.
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
    ticks = nice_ticks(0.0 if is_rate else low, high, 4)
    y = Scale(ticks[0], ticks[-1], _SERIES_HEIGHT, _TOP)
    line = [(x(b.middle), y(b.mean)) for b in shown if b.mean is not None]
    upper = [(x(b.middle), y(b.high)) for b in shown if b.high is not None]
    lower = [(x(b.middle), y(b.low)) for b in reversed(shown) if b.low is not None]
    spread = not is_rate and any(b.low != b.high for b in shown)
    if len(line) == 1:
        line = [(max(0.0, line[0][0] - 0.5), line[0][1]), (line[0][0] + 0.5, line[0][1])]
    shapes = ([("band", upper + lower)] if spread else []) + [("line", line)]
    bad = [b for b in buckets if b.not_finite]
    image = picture(
        name,
        _SERIES_HEIGHT + AXIS,
        f"{title} over the steps",
        f"{title} of steps {first:,} to {last:,}: between {number_text(low)} and {number_text(high)}, "
        + (f"{number_text(_line_end(series))} at the end." if shown else "without a finite value."),
        horizontal_grid([(y(tick), tick_text(tick)) for tick in ticks]),
        vertical_axis(_step_ticks(first, last, x), _SERIES_HEIGHT, _SERIES_HEIGHT),
        joined(_rescales(content.rescales, x)),
        stretched(_SERIES_HEIGHT + 1, shapes),
        joined(element("use", href="#m-fault", x=percent(x(b.middle)), y=_TOP + 6) for b in bad[:100]),
    )
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
    return Chart(name, title, image, headings, tuple(rows))


def waterfall_chart(bars: Sequence[WaterfallBar]) -> Chart:
    """Return the chart that leads from the delivered node-seconds to those of training that was kept."""
    whole = bars[0].seconds
    x = Scale(0, whole)
    parts, rows = [], []
    for index, bar in enumerate(bars):
        top = index * ROW + (ROW - BAR) / 2
        last = index == len(bars) - 1
        left = 0.0 if index == 0 or last else x(bar.left)
        width = x(bar.seconds) if index == 0 or last else min(x(bar.seconds), 100 - left)
        share = bar.seconds / whole
        name = activity_class(bar.activity)
        parts += [
            element("text", bar.name, x="-8", y=top + 12, class_="label end"),
            element("rect", x="0", width="100%", y=top, height=BAR, class_="track"),
            element("rect", x=percent(left), width=percent(max(width, 0.15)), y=top, height=BAR, class_=f"bar {name}"),
            element("text", f"{share:.1%}", x="100%", dx="56", y=top + 12, class_="label strong end"),
            element("text", duration_text(bar.seconds), x="100%", dx="140", y=top + 12, class_="label quiet end"),
        ]
        if not last:
            edge = 100.0 if index == 0 else left
            parts.append(
                element("line", x1=percent(edge), x2=percent(edge), y1=top, y2=top + ROW + BAR, class_="connector")
            )
        rows.append(DataRow((bar.name, f"{bar.seconds:,.1f}", f"{share:.2%}"), left, left + width))
    image = picture(
        "waterfall",
        len(bars) * ROW,
        "Node-seconds by activity, from the delivered time to the training that was kept",
        "; ".join(f"{bar.name} {bar.seconds / whole:.1%}" for bar in bars) + ".",
        *parts,
    )
    note = f"{duration_text(whole)} of node time was delivered; what is left below is the goodput."
    headings = ("activity", "node-seconds", "share")
    title = "From delivered time to kept training"
    return Chart("waterfall", title, image, headings, tuple(rows), note, "bars", is_labelled=True)


def _line_end(series: Series) -> float:
    """Return the last finite mean of a series."""
    return next((b.mean for b in reversed(series.buckets) if b.mean is not None), float("nan"))


def _step_ticks(first: int, last: int, x: Scale) -> list[tuple[float, str]]:
    ticks = [tick for tick in nice_ticks(first, max(last, first + 1), 5) if first <= tick <= last and tick == int(tick)]
    return [(x(tick), tick_text(tick)) for tick in ticks]


def _rescales(rescales: Sequence[Rescale], x: Scale) -> Iterable[Markup]:
    """Return where the world size changed: lines with labels that do not overlap, or short strokes where too many."""
    shown = [each for each in rescales if x.low <= each.step <= x.high]
    crowded = len(shown) > _MOST_LINES
    last_line = last_label = float("-inf")
    for each in shown:
        at = x(each.step)
        if crowded and at - last_line < 100 / _MOST_STROKES:
            continue
        last_line = at
        title = element("title", f"{each.before} to {counted(each.after, 'worker')} after step {each.step}")
        bottom = _TOP + 6 if crowded else _SERIES_HEIGHT
        yield element(
            "line",
            title,
            x1=percent(at),
            x2=percent(at),
            y1=_TOP - 2,
            y2=bottom,
            class_="rescale short" if crowded else "rescale",
        )
        if not crowded and at - last_label >= _CLOSEST_LABELS:
            last_label = at
            kind = "start" if at < _CLOSEST_LABELS / 2 else "end" if at > 100 - _CLOSEST_LABELS / 2 else "middle"
            yield element("text", f"{each.before}→{each.after}", x=percent(at), y=_TOP - 5, class_=f"tick {kind}")


def size_chart(content: PageContent) -> Chart:
    """Return the chart of the world size over time."""
    sizes, x = content.sizes, Scale(content.start, content.start + content.duration)
    largest = max((span.size for span in sizes), default=1)
    ticks = [tick for tick in nice_ticks(0, largest, min(4, largest)) if tick == int(tick)]
    y = Scale(0, max(ticks[-1], 1), _SIZE_HEIGHT, 6)
    points: list[tuple[float, float]] = [(0.0, y(0))]
    for span in sizes:
        points += [(x(span.started), points[-1][1]), (x(span.started), y(span.size)), (x(span.ended), y(span.size))]
        points.append((x(span.ended), y(0)))
    points.append((points[-1][0], y(0)))
    dense = len(sizes) > _MOST_OUTLINED
    image = picture(
        "size",
        _SIZE_HEIGHT + AXIS,
        "World size over time",
        f"The world size was {_sequence([span.size for span in sizes])} in {counted(len(sizes), 'round')}.",
        horizontal_grid([(y(tick), tick_text(tick)) for tick in ticks]),
        _time_axis(content, _SIZE_HEIGHT),
        stretched(_SIZE_HEIGHT + 1, [("area", points)] if dense else [("area", points), ("line", points)], dense=dense),
    )
    rows = tuple(
        DataRow(
            (str(span.round), str(span.size), _since(content, span.started), duration_text(span.ended - span.started)),
            x(span.started),
            x(span.ended),
        )
        for span in sizes
    )
    return Chart("size", "World size", image, ("round", "workers", "from", "for"), rows, layout="wide")


def nodes_chart(content: PageContent) -> Chart:
    """Return the timelines of the nodes."""
    x = Scale(content.start, content.start + content.duration)
    height = len(content.nodes) * ROW
    parts: list[Markup] = [_time_axis(content, height)]
    rows: list[DataRow] = []
    for index, node in enumerate(content.nodes):
        top = index * ROW + (ROW - BAR) / 2
        parts.append(_node_texts(node, top))
        parts.append(joined(_segment(segment, x, top) for segment in node.segments))
        parts.append(joined(_mark(mark, x, index * ROW + ROW / 2) for mark in node.marks))
        rows += _node_rows(content, node, index, x)
    image = picture(
        "nodes",
        height + AXIS,
        "What each node was doing over time",
        "; ".join(_node_sentence(node) for node in content.nodes[:20]) + ".",
        *parts,
    )
    note = f"Not shown: {counted(content.hidden_nodes, 'further node')}." if content.hidden_nodes else ""
    headings = ("node", "activity", "from", "for", "round", "including")
    lines = tuple(node.node for node in content.nodes)
    return Chart("nodes", "Nodes", image, headings, tuple(rows), note, "wide", lines)


def _time_axis(content: PageContent, y: float) -> Markup:
    x = Scale(0, content.duration)
    return vertical_axis([(x(at), text) for at, text in time_ticks(content.duration)], y)


def _since(content: PageContent, time: float) -> str:
    return duration_text(max(0.0, time - content.start))


def _node_texts(node: NodeTimeline, top: float) -> Markup:
    name = node.node if len(node.node) <= _LONGEST_NAME else f"{node.node[:6]}…{node.node[-(_LONGEST_NAME - 7) :]}"
    good = node.ending in ("finished", "preempted", "running")
    return joined(
        (
            element("text", element("title", node.node), name, x="-8", y=top + 12, class_="label end"),
            element("text", node.ending, x="100%", dx="8", y=top + 12, class_=f"ending {'quiet' if good else 'bad'}"),
        )
    )


def _segment(segment: Segment, x: Scale, top: float) -> Markup:
    left, right = x(segment.started), x(segment.ended)
    width = percent(max(right - left, 0.06))
    return element("rect", x=percent(left), width=width, y=top, height=BAR, class_=activity_class(segment.activity))


def _mark(mark: Mark, x: Scale, y: float) -> Markup:
    return element(
        "use",
        element("title", mark.text),
        href=f"#m-{mark.kind}",
        x=percent(x(mark.time)),
        y=y + (BAR / 2 if mark.kind == "checkpoint" else 0),
    )


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


def _sequence(sizes: Sequence[int], most: int = 12) -> str:
    merged: list[int] = []
    for size in sizes:
        if not merged or merged[-1] != size:
            merged.append(size)
    text = ", then ".join(map(str, merged[:most])) or "no"
    return f"{text} and further" if len(merged) > most else text
