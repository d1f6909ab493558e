"""The live view of ``azureml-elastic status --watch``: a run, local or submitted, from any shell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from azureml_elastic.cli.run_argument import run_folder
from azureml_elastic.cli.submitted_run import open_run, open_run_table
from azureml_elastic.errors import TableError, UsageError

if TYPE_CHECKING:
    from azureml_elastic.ledger.events import Event
    from azureml_elastic.local.view import View
    from azureml_elastic.node.table import Table
    from azureml_elastic.submit.run import ElasticRun

__all__ = ["watch_run"]

_FOLDER_SECONDS = 0.2
_TABLE_SECONDS = 2.0
_JOBS_SECONDS = 10.0


def watch_run(run: str, *, live: bool | None) -> bool:
    """Show the nodes, rounds, steps and checkpoints of a run until it ends; return whether it succeeded.

    Args:
        run: folder of a local run, or name of a submitted one.
        live: whether to show a live table; ``None`` for what the terminal supports.
    """
    from rich.console import Console

    from azureml_elastic.local.view import choose_view

    view = choose_view(Console(), live=live)
    folder = run_folder(run)
    if folder is not None:
        return _show(_LocalRun(folder), view, _FOLDER_SECONDS)
    _, submitted, variables = open_run(run)
    return _watch_submitted(submitted, variables, view)


class _Watched(Protocol):
    """A run that is watched."""

    def read(self) -> list[Event]:
        """Return the new events."""

    def output(self) -> Mapping[str, Sequence[str]]:
        """Return the new lines of output by node."""

    def end(self) -> str | None:
        """Return why no further event comes although the run has not recorded its end, ``None`` if some may come."""


def _show(run: _Watched, view: View, interval: float) -> bool:
    """Show a run until its end; return whether it succeeded."""
    from azureml_elastic.local.view import Board

    board = Board()
    with view:
        while True:
            end = run.end()  # before the read, so that no event in between is missed
            events = run.read()
            board.apply(events)
            for node, lines in run.output().items():
                view.output(node, lines)
            view.events(board, events)
            if board.ended is not None:
                return board.ended.succeeded
            if end is not None:
                view.note(end)
                return False
            time.sleep(interval)


class _LocalRun:
    """The folder of a run on this machine, running or ended."""

    def __init__(self, folder: Path) -> None:
        from azureml_elastic.ledger.reading import EventReader, LineReader
        from azureml_elastic.ledger.summary import Paths

        self._paths = Paths.of(folder)
        if not self._paths.events.is_dir():
            raise UsageError(
                f"{folder} contains no events of a run. Give the folder that 'azureml-elastic local' has printed, for "
                "example one below ./runs."
            )
        self._reader = EventReader(self._paths.events)
        self._logs: dict[Path, LineReader] = {}
        self._new_log = LineReader

    def read(self) -> list[Event]:
        return sorted(self._reader.read(), key=lambda event: event.time)  # one machine, one clock

    def output(self) -> Mapping[str, Sequence[str]]:
        found = {}
        over = self._paths.report.is_file()  # the report is written last
        for path in sorted(self._paths.logs.glob("*.log")):
            lines = self._logs.setdefault(path, self._new_log(path)).read(last=over)
            if lines:
                found[path.stem] = [line.decode("utf-8", "replace") for line in lines]
        return found

    def end(self) -> str | None:
        return f"the run has ended, see {self._paths.report}" if self._paths.report.is_file() else None


def _watch_submitted(submitted: ElasticRun, variables: Mapping[str, str], view: View) -> bool:
    """Show a submitted run from its table until its end; return whether it succeeded."""
    with open_run_table(submitted, variables) as table:
        return _show(_SubmittedRun(submitted, table, view.note), view, _TABLE_SECONDS)


class _SubmittedRun:
    """The table of a submitted run, with the names of its nodes by its jobs.

    Args:
        submitted: run.
        table: table of the run.
        note: function that shows a line.
    """

    def __init__(self, submitted: ElasticRun, table: Table, note: Callable[[str], object]) -> None:
        from azureml_elastic.ledger.node_names import NodeNames
        from azureml_elastic.node.observation.event_rows import EventRowReader

        self._submitted = submitted
        self._reader = EventRowReader(table)
        self._names = NodeNames(self._label)
        self._note = note
        self._problem = ""
        self._jobs_at = -_JOBS_SECONDS
        self._labels: dict[str, str] = {}
        self._active = True

    def read(self) -> list[Event]:
        try:
            events = self._reader.read()
        except TableError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._note(f"the table cannot be read, trying again: {error}")
            return []
        return self._names.apply(events)

    def output(self) -> Mapping[str, Sequence[str]]:
        return {}  # that is what 'logs' is for

    def end(self) -> str | None:
        if time.monotonic() - self._jobs_at >= _JOBS_SECONDS:
            self._read_jobs()
        return None if self._active else f"all jobs of {self._submitted.name} have ended"

    def _label(self, job: str) -> str | None:
        if job not in self._labels:
            self._read_jobs()  # that of a node that has come since
        return self._labels.get(job)

    def _read_jobs(self) -> None:
        jobs = self._submitted.nodes()
        self._jobs_at = time.monotonic()
        self._labels = {job.job: job.node for job in jobs}
        # A pipeline without children has yet to start them.
        self._active = not jobs or any(job.active for job in jobs)
