"""Charts over the time of a run: its world size, and what its nodes were doing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from azureml_elastic.plurals import counted
from azureml_elastic.report.cells import activity_text
from azureml_elastic.report.charts import AXIS, BAR, ROW, Chart, DataRow, activity_class
from azureml_elastic.report.markup import Markup, element, joined
from azureml_elastic.report.node_timelines import Mark, NodeTimeline, Segment
from azureml_elastic.report.numbers import duration_text, nice_ticks, tick_text, time_ticks
from azureml_elastic.report.page_content import PageContent
from azureml_elastic.report.svg import Scale, horizontal_grid, percent, picture, stretched, vertical_axis

__all__ = ["nodes_chart", "size_chart"]

_SIZE_HEIGHT = 96
_LONGEST_NAME = 15
_MOST_OUTLINED = 60
"""Most rounds whose sizes have an outline, which would hide the area of more."""


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
