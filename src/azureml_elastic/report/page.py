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
from azureml_elastic.report.charts import series_chart, waterfall_chart
from azureml_elastic.report.markup import Markup, element, joined
from azureml_elastic.report.page_content import PageContent, page_content
from azureml_elastic.report.page_parts import data_table, fact_item, failure_list, figure, legend, message_box
from azureml_elastic.report.svg import PATTERNS
from azureml_elastic.report.timeline_charts import nodes_chart, size_chart

__all__ = ["message_page", "run_page", "write_page"]

_SIGNS = {"succeeded": "✓", "failed": "✕", "interrupted": "!", "unfinished": "?", "running": "●"}


def write_page(report: Report, events: Sequence[Event], path: Path, *, running: bool = False) -> None:
    """Write the page to a file, which is overwritten.

    Args:
        report: report of the run.
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
        content: content of the page.
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
