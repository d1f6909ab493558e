"""The page of a run: one self-contained HTML file without any third-party code, from the package's own templates."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.sentences import headline
from azureml_elastic.ledger.summary import Report
from azureml_elastic.report.charts import (
    AXIS,
    BAR,
    ROW,
    TOP,
    nodes_chart,
    percent,
    pixels,
    series_chart,
    size_chart,
    waterfall_chart,
)
from azureml_elastic.report.page_content import PageContent, page_content

_SIGNS = {"succeeded": "✓", "failed": "✕", "interrupted": "!", "unfinished": "?", "running": "●"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_page(report: Report, picture: Picture, path: Path, *, running: bool = False) -> None:
    """Write the page to a file, which is overwritten.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(run_page(page_content(report, picture, running=running)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The page {path} cannot be written: {error}. Give another file with --html.") from error


def run_page(content: PageContent, *, notice: str = "", poll_seconds: float | None = None) -> str:
    """Return the page.

    Args:
        notice: reason why the page is not up to date; may be empty.
        poll_seconds: time between two updates of an open page from its own address; ``None`` for a page that remains as
            it is.
    """
    return _rendered(
        "run.html",
        poll_seconds,
        title=content.title,
        state=content.state,
        verdict=f"The run {content.verdict}",
        content=content,
        notice=notice,
    )


def message_page(title: str, message: str, *, poll_seconds: float | None = None) -> str:
    """Return a page for a run of which nothing can be shown yet.

    Args:
        poll_seconds: see :func:`run_page`.
    """
    return _rendered(
        "message.html", poll_seconds, title=title, state="unfinished", verdict="Nothing to show yet", message=message
    )


def _rendered(template: str, poll_seconds: float | None, **context: object) -> str:
    poll_ms = None if poll_seconds is None else f"{poll_seconds * 1000:.0f}"
    page = _templates().get_template(template).render(poll_ms=poll_ms, **context)
    # Escaping leaves control characters and halves of surrogate pairs, which a page cannot have: a terminal would obey
    # the ones, and the file could not be encoded with the others. The templates themselves have none.
    return _UNPRINTABLE.sub("�", page)


@cache
def _templates() -> Environment:
    templates = Environment(
        # Whatever a run says, such as the message of a failure, is text and never markup.
        autoescape=True,
        loader=PackageLoader(__package__),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {
        "activity_class": lambda activity: f"a-{activity.replace(' ', '-')}",
        "headline": headline,
        "percent": percent,
        "px": pixels,
        "sha256": lambda text: f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}",
    }
    own = resources.files(__package__) / "static"
    templates.globals |= {
        "axis_height": AXIS,
        "bar_height": BAR,
        "nodes_chart": nodes_chart,
        "row_height": ROW,
        "script": (own / "page.js").read_text(encoding="utf-8"),
        "series_chart": series_chart,
        "signs": _SIGNS,
        "size_chart": size_chart,
        "plot_top": TOP,
        "style": (own / "page.css").read_text(encoding="utf-8"),
        "waterfall_chart": waterfall_chart,
    }
    return templates
