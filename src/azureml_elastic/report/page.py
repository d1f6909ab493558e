"""The page of a run: one self-contained HTML file without any third-party code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.events import Event
from azureml_elastic.ledger.summary import Report
from azureml_elastic.ledger.timeline import headline
from azureml_elastic.report.charts import (
    ROW,
    Chart,
    DataRow,
    activity_class,
    nodes_chart,
    series_chart,
    size_chart,
    waterfall_chart,
)
from azureml_elastic.report.failures import Failure
from azureml_elastic.report.page_content import DataTable, Fact, PageContent, page_content
from azureml_elastic.report.svg import PATTERNS, Markup, element, joined

__all__ = ["figure", "legend", "message_page", "run_page", "write_page"]

_ACTIVITIES = ("starting", "waiting", "training", "saving", "recovering", "lost work", "unknown", "idle")
_MARKS = {
    "checkpoint": "checkpoint",
    "fault": "injected fault",
    "loss": "loss",
    "failure": "failure or hang",
    "added": "added node",
}

_SIGNS = {"succeeded": "✓", "failed": "✕", "interrupted": "!", "unfinished": "?", "running": "●"}


def fact_item(fact: Fact) -> Markup:
    """Return a fact of the page's head."""
    return element(
        "div",
        element("dt", fact.name),
        element("dd", fact.value, class_=f"value {fact.state}".strip()),
        *((element("dd", fact.detail, class_="detail"),) if fact.detail else ()),
    )


def message_box(text: str) -> Markup:
    """Return the reason of a failure, folded if it has several lines."""
    if "\n" not in text.strip():
        return element("p", text, class_="callout bad")
    return element("div", _folded("message", Markup(element("strong", headline(text))), text), class_="callout bad")


def legend(content: PageContent) -> Markup:
    """Return the meaning of the colours and symbols that occur."""
    activities = {segment.activity for node in content.nodes for segment in node.segments}
    marks = {mark.kind for node in content.nodes for mark in node.marks}
    items = []
    for name in _ACTIVITIES:
        if name in activities:
            swatch = element("rect", width="22", height="12", class_=activity_class(name))
            items.append(element("li", element("svg", swatch, width="22", height="12", aria_hidden="true"), name))
    for kind, name in _MARKS.items():
        if kind in marks:
            symbol = element("use", href=f"#m-{kind}", x="7", y="7")
            items.append(element("li", element("svg", symbol, width="14", height="14", aria_hidden="true"), name))
    return element("ul", *items, class_="legend", aria_label="Colours and symbols")


def figure(chart: Chart, below: Markup | None = None) -> Markup:
    """Return a chart with its heading and its folded data."""
    title = element("figcaption", element("h3", chart.title), *((element("p", chart.note),) if chart.note else ()))
    plot = element("div", element("div", chart.image, class_="plot"), class_=f"frame {chart.layout}")
    heads = (element("th", heading, scope="col") for heading in chart.headings)
    table = element(
        "table",
        element("caption", f"{chart.title}: data", class_="unseen"),
        element("thead", element("tr", *heads)),
        element("tbody", *map(_data_row, chart.rows)),
    )
    data = element(
        "details",
        element("summary", "Data"),
        element("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"{chart.title}: data"),
        id=f"{chart.name}-data",
        class_="data",
    )
    return element(
        "figure",
        title,
        plot,
        *((below,) if below is not None else ()),
        data,
        id=f"{chart.name}-figure",
        data_lines=str(len(chart.lines)) if chart.lines else None,
        data_row=str(ROW) if chart.lines else None,
        data_labelled=chart.is_labelled,
    )


def _data_row(row: DataRow) -> Markup:
    cells = (element("td", cell) for cell in row.cells)
    right = None if row.right == row.left else f"{row.right:.2f}"
    return element(
        "tr", *cells, data_l=f"{row.left:.2f}", data_r=right, data_n=None if row.line is None else str(row.line)
    )


def failure_list(found: Sequence[Failure]) -> Markup:
    """Return the failures, with folded messages."""
    items = []
    for index, failure in enumerate(found):
        where = element("span", failure.where, class_="where")
        line = joined(
            (element("span", failure.kind, class_="badge"), " ", element("span", failure.summary), " ", where)
        )
        items.append(
            element("li", _folded(f"failure-{index}", line, failure.details))
            if failure.details
            else element("li", element("p", line))
        )
    return element("ul", *items, class_="failures")


def _folded(name: str, summary: Markup, text: str) -> Markup:
    return element("details", element("summary", summary), element("pre", text, tabindex="0"), id=name, class_="folded")


def data_table(name: str, table: DataTable) -> Markup:
    """Return a table in the section of this name."""
    kinds = [table.kind(column) for column in range(len(table.headings))]

    def cells(kind: str, texts: Sequence[str], **attributes: str) -> Iterable[Markup]:
        for text, column in zip(texts, kinds, strict=True):
            yield element(kind, text, class_=column, **attributes)

    rows = [element("tr", *cells("td", row)) for row in table.rows]
    if table.omitted:
        text = f"{table.omitted:,} more"
        rows.insert(len(rows) // 2, element("tr", element("td", text, colspan=str(len(kinds)), class_="omitted")))
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", *cells("th", table.headings, scope="col"))),
            element("tbody", *rows),
            aria_labelledby=f"{name}-heading",
        ),
        id=f"{name}-table",
        class_="scroll",
        tabindex="0",
        role="region",
        aria_labelledby=f"{name}-heading",
    )


def write_page(report: Report, events: Sequence[Event], path: Path, *, running: bool = False) -> None:
    """Write the page to a file, which is overwritten.

    Args:
        events: events of all nodes.
        path: file.
        running: whether the run goes on.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(run_page(page_content(report, events, running=running)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page {path} cannot be written: {error}. Give another file with --html.") from error


def run_page(content: PageContent, *, notice: str = "", poll_seconds: float | None = None) -> str:
    """Return the page.

    Args:
        notice: reason why the page is not up to date; may be empty.
        poll_seconds: time between two updates of an open page from its own address; ``None`` for a page that remains as
            it is.
    """
    sections = list(_sections(content, notice))
    links = (element("a", title, href=f"#{name}") for name, title, _ in sections)
    return _document(
        content.title,
        _head(content),
        element("nav", *links, id="contents", aria_label="Sections", data_part=True),
        joined(_section(*each) for each in sections),
        poll_seconds,
    )


def message_page(title: str, message: str, *, poll_seconds: float | None = None) -> str:
    """Return a page for a run of which nothing can be shown yet.

    Args:
        title: name of the run.
        message: reason.
        poll_seconds: see :func:`run_page`.
    """
    head = _header(title, "unfinished", "Nothing to show yet")
    body = _section("overview", "Overview", element("p", message, class_="callout"))
    return _document(
        title, head, element("nav", id="contents", aria_label="Sections", data_part=True), body, poll_seconds
    )


def _document(title: str, head: Markup, nav: Markup, main: Markup, poll_seconds: float | None) -> str:
    style, script = _file("page.css"), _file("page.js")
    connect = "'none'" if poll_seconds is None else "'self'"
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"connect-src {connect}"
    )
    theme = element("button", "Dark", type="button", id="theme", hidden=True, aria_label="Dark colours")
    live = element("p", id="live", class_="live", role="status", hidden=True)
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("meta", name="referrer", content="no-referrer"),
            element("link", rel="icon", href="data:,"),
            element("title", f"{title} · azureml-elastic"),
            element("style", style),
        ),
        element(
            "body",
            element("a", "Skip to the content", class_="skip", href="#main"),
            PATTERNS,
            element("header", head, element("div", live, theme, class_="tools")),
            nav,
            element("main", main, id="main", tabindex="-1"),
            element("footer", element("p", "Times of a node are those of its own clock."), id="footer"),
            element("script", script),
        ),
        lang="en",
        data_poll=None if poll_seconds is None else f"{poll_seconds * 1000:.0f}",
    )
    return f"<!doctype html>\n{page}\n"


@cache
def _file(name: str) -> Markup:
    """Return one of the page's own files."""
    return Markup((resources.files(__package__) / "static" / name).read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _header(title: str, state: str, verdict: str) -> Markup:
    return element(
        "div",
        element("p", "azureml-elastic run", class_="eyebrow"),
        element("h1", title),
        element("p", element("span", _SIGNS[state], aria_hidden="true"), verdict, class_=f"verdict {state}"),
        id="head",
        data_part=True,
    )


def _head(content: PageContent) -> Markup:
    return _header(content.title, content.state, f"The run {content.verdict}")


def _sections(content: PageContent, notice: str) -> Iterable[tuple[str, str, Markup]]:
    """Return name, title and content of each section."""
    yield "overview", "Overview", joined(_overview(content, notice))
    if content.nodes or content.sizes:
        yield "timeline", "Timeline", joined(_timeline(content))
    charts = _training(content)
    if charts:
        yield "training", "Training", joined(charts)
    if content.waterfall:
        yield "time", "Where the time went", figure(waterfall_chart(content.waterfall))
    if content.failures:
        yield "failures", "Failures and warnings", failure_list(content.failures)
    if content.recoveries.rows:
        yield "recoveries", "Recoveries", data_table("recoveries", content.recoveries)
    if content.rounds.rows:
        yield "rounds", "Rounds", data_table("rounds", content.rounds)
    if content.checkpoints.rows:
        yield "checkpoints", "Checkpoints", data_table("checkpoints", content.checkpoints)
    if content.cost is not None:
        notes = (element("p", note, class_="note") for note in content.cost_notes)
        yield "cost", "Cost", joined((data_table("cost", content.cost), *notes))


def _section(name: str, title: str, body: Markup) -> Markup:
    heading = element("h2", title, id=f"{name}-heading", class_="quietly" if name == "overview" else None)
    return element("section", heading, body, id=name, aria_labelledby=f"{name}-heading", data_part=True)


def _overview(content: PageContent, notice: str) -> Iterable[Markup]:
    if notice:
        yield element("p", notice, class_="callout")
    if content.message:
        yield message_box(content.message)
    yield element("dl", *map(fact_item, content.facts), class_=f"facts of-{len(content.facts)}")
    if not content.sizes:
        yield element("p", "No round of the run has started its workers.", class_="callout")
    for note in content.notes:
        yield element("p", note, class_="note")


def _timeline(content: PageContent) -> Iterable[Markup]:
    if content.sizes:
        yield figure(size_chart(content))
    if content.nodes:
        yield figure(nodes_chart(content), legend(content))


def _training(content: PageContent) -> list[Markup]:
    charts = [
        series_chart(content, series, f"metric-{index}", series.name) for index, series in enumerate(content.metrics)
    ]
    charts += [
        series_chart(content, series, f"throughput-{index}", f"Throughput, {series.name}", is_rate=True)
        for index, series in enumerate(content.throughput)
    ]
    if not charts:
        return []
    parts = [element("div", *map(figure, charts), class_="grid-2" if len(charts) > 1 else None)]
    notes = []
    if content.rescales:
        notes.append("Dashed lines, or short strokes at the top: the number of workers changed after this step.")
    if any(bucket.not_finite for series in content.metrics for bucket in series.buckets):
        notes.append("Crosses: values that are NaN or infinite.")
    if content.hidden_metrics:
        notes.append(f"{content.hidden_metrics:,} further metrics are in the event files.")
    return [*parts, *(element("p", note, class_="note") for note in notes)]
