"""Parts of the page of a run as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from azureml_elastic.ledger.timeline import headline
from azureml_elastic.report.charts import ROW, Chart, DataRow, activity_class
from azureml_elastic.report.failures import Failure
from azureml_elastic.report.markup import Markup, element, joined
from azureml_elastic.report.page_content import Fact, PageContent
from azureml_elastic.report.page_tables import DataTable

__all__ = ["data_table", "fact_item", "failure_list", "figure", "legend", "message_box"]

_ACTIVITIES = ("starting", "waiting", "training", "saving", "recovering", "lost work", "unknown", "idle")
_MARKS = {
    "checkpoint": "checkpoint",
    "fault": "injected fault",
    "loss": "loss",
    "failure": "failure or hang",
    "added": "added node",
}


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
