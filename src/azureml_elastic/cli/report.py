"""``azureml-elastic report``: what a run has done, from its folder or from Azure ML.

With ``--serve``, a page in a browser is updated while the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.cli.output import JsonOption, console_beside, write_json
from azureml_elastic.cli.run_reports import LocalRunReports, SubmittedRunReports, open_reports
from azureml_elastic.cli.submitted_run import RunArgument
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azureml_elastic.report.page_content import PageContent

_POLL_SECONDS = 2.0
_LOCAL_SECONDS = 1.0
_SERVICE_SECONDS = 5.0
"""Least time between two reads of a local run's files, or of the service."""

_SHARE = 4.0
"""Time between the end of one read and the next, as a multiple of the time of the first one."""


def _serve_page(reports: LocalRunReports | SubmittedRunReports, *, host: str, port: int) -> None:
    """Serve the page of a run until Ctrl-C."""
    from azureml_elastic.local.http_server import PageServer

    local = isinstance(reports, LocalRunReports)
    page = LivePage(reports, _LOCAL_SECONDS if local else _SERVICE_SECONDS)
    with PageServer(page, host=host, port=port) as server:
        typer.echo(f"Report of {reports.name}: {server.url}")
        if server.token is not None:
            typer.echo("The URL is all that is needed to read the page, and the connection is not encrypted.", err=True)
        threading.Event().wait()


class LivePage:
    """The page of a run at the moment, made anew when it is requested and not too often.

    Args:
        least_seconds: least time between two reads of the reports' source.
    """

    def __init__(
        self,
        reports: LocalRunReports | SubmittedRunReports,
        least_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reports = reports
        self._least_seconds = least_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._due = clock()
        self._content: PageContent | None = None
        self._page = b""
        self._final = False

    def __call__(self) -> bytes:
        """Return the page."""
        # Each request has a thread of its own: the first one reads the source, and the others wait for its page.
        with self._lock:
            if not self._final and self._clock() >= self._due:
                began = self._clock()
                self._page = self._made().encode()
                now = self._clock()
                self._due = now + max(self._least_seconds, _SHARE * (now - began))
            return self._page

    def _made(self) -> str:
        from azureml_elastic.report.page import message_page, run_page
        from azureml_elastic.report.page_content import page_content

        try:
            found = self._reports.read()
        except ElasticError as error:
            if self._content is None:
                return message_page(self._reports.name, str(error), poll_seconds=_POLL_SECONDS)
            notice = f"This is the last known state: {error}"
            return run_page(self._content, notice=notice, poll_seconds=_POLL_SECONDS)
        self._content = page_content(found.report, found.events, running=found.running)
        self._final = not found.running
        return run_page(self._content, poll_seconds=_POLL_SECONDS if found.running else None)


@explained("Interrupted; a run that goes on is not ended by it.")
def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a self-contained HTML page to this file.")
    ] = None,
    json: JsonOption = None,
    prices: Annotated[
        Path | None, typer.Option(help="JSON file of prices per VM size and tier, for the cost of the nodes.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page, which updates itself until the run ends. Ctrl-C ends it.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --serve: port; by default a free one.", min=0, max=65535)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="With --serve: address to listen on, by default 127.0.0.1. Any but the loopback requires a token, "
            "which the URL has."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for the events of a submitted run; by default runs/RUN.")
    ] = None,
) -> None:
    """Show the report of a run, also while it runs, and write it as JSON or as an HTML page if requested.

    That of a submitted run is made from its table and from the run history; its events are written to a folder.
    """
    if serve:
        _refuse(
            "--serve shows the report in a browser and writes no files", {"--html": html, "--json": json, "--to": to}
        )
        _serve_page(open_reports(run, None, prices), host=host or "127.0.0.1", port=port or 0)
        return
    _refuse("Only --serve listens", {"--port": port, "--host": host})
    from azureml_elastic.report.terminal import summary

    reports = open_reports(run, to, prices)
    found = reports.read()
    if isinstance(reports, SubmittedRunReports):
        reports.write(found)
    console = console_beside(json)
    console.print(summary(found.report))
    if html is not None:
        from azureml_elastic.report.page import write_page

        write_page(found.report, found.events, html, running=found.running)
        console.print(f"Wrote {html}", soft_wrap=True, highlight=False, markup=False)
    write_json(found.report, json)


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Refuse options that have no effect."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"{why}. Leave {' and '.join(given)} out.")
