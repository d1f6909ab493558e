"""The page of ``azureml-elastic report --serve``: a run in a browser, updated while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from azureml_elastic.cli.run_reports import LocalRunReports, RunReports
from azureml_elastic.errors import ElasticError

if TYPE_CHECKING:
    from azureml_elastic.report.page_content import PageContent

__all__ = ["LivePage", "serve"]

_POLL_SECONDS = 2.0
_LOCAL_SECONDS = 1.0
_SERVICE_SECONDS = 5.0
"""Least time between two reads of a local run's files, or of the service."""

_SHARE = 4.0
"""Time between the end of one read and the next, as a multiple of the time of the first one."""


def serve(reports: RunReports, *, host: str, port: int) -> None:
    """Serve the page of a run until Ctrl-C.

    Args:
        reports: source of the run's reports.
        host: address to listen on.
        port: port; 0 for a free one.
    """
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
        reports: source of the run's reports.
        least_seconds: least time between two reads of the source.
        clock: monotonic clock.
    """

    def __init__(
        self, reports: RunReports, least_seconds: float, *, clock: Callable[[], float] = time.monotonic
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
