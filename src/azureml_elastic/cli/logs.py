"""``azureml-elastic logs``: what the nodes of a run have printed, on this machine or submitted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.submitted_run import RunArgument, open_run, read_state, run_folder
from azureml_elastic.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from azureml_elastic.submit.run import NodeOfRun

_FOLDER_SECONDS = 0.2
_SERVICE_SECONDS = 3.0


@explained(CONTINUES)
def logs(
    run: RunArgument,
    node: Annotated[
        str | None,
        typer.Option("--node", help="Node such as node_0 or spot_1, see 'status'; by default the one of rank 0."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Print the logs of all nodes, each line after its node's name.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", help="Print the last lines of each log, and do not wait for more.", min=0)
    ] = None,
) -> None:
    """Print the log of a node; while its job runs, what is added to it, too, unless --all or --tail is given."""
    if every and node is not None:
        raise UsageError("--all and --node cannot be combined. Give one of them.")
    folder = run_folder(run)
    source = _FolderLogs(folder) if folder is not None else _JobLogs(run)
    if every:
        for each, name in source.nodes().items():
            for line in _last_lines(source.text(each), tail):
                print(f"{name} | {line}")
        return
    chosen = source.choose(node)
    typer.echo(f"azureml-elastic: {source.describe(chosen)}", err=True)
    if tail is None and source.runs(chosen):
        source.follow(chosen)
        return
    for line in _last_lines(source.text(chosen), tail):
        print(line)


class _FolderLogs:
    def __init__(self, folder: Path) -> None:
        from azureml_elastic.ledger.summary import Paths

        self._paths = Paths.of(folder)
        self._logs = {path.stem: path for path in sorted(self._paths.logs.glob("*.log"))}
        if not self._logs:
            raise UsageError(
                f"{folder} contains no logs of a run. Give the folder that 'azureml-elastic local' has printed, for "
                "example one below ./runs."
            )

    def nodes(self) -> Mapping[str, str]:
        return {node: node for node in self._logs}

    def choose(self, node: str | None) -> str:
        """Return the node that is meant; by default the one of rank 0."""
        from azureml_elastic.ledger.picture import Picture
        from azureml_elastic.ledger.reading import read_events

        if node is None:
            leader = Picture.of(read_events(self._paths.events)).now.rank0
            return leader if leader in self._logs else next(iter(self._logs))
        if node not in self._logs:
            raise UsageError(
                f"The run in {self._paths.run_dir} has no node {node!r}. There are: {', '.join(self._logs)}."
            )
        return node

    def describe(self, node: str) -> str:
        return f"{node} ({self._logs[node]})"

    def runs(self, node: str) -> bool:  # noqa: ARG002 - the report is written when all nodes have ended
        return not self._paths.report.is_file()

    def text(self, node: str) -> str:
        return self._logs[node].read_text(encoding="utf-8", errors="replace")

    def follow(self, node: str) -> None:
        from azureml_elastic.ledger.reading import LineReader

        reader = LineReader(self._logs[node])
        over = False
        while not over:
            over = not self.runs(node)  # before the read, so that no line is missed
            for line in reader.read(last=over):
                print(line.decode("utf-8", "replace"), flush=True)
            if not over:
                time.sleep(_FOLDER_SECONDS)


class _JobLogs:
    """The logs of a submitted run, as Azure ML keeps them, by job: several jobs may have nodes of the same name."""

    def __init__(self, run: str) -> None:
        self._jobs, self._run, self._variables = open_run(run)
        self._nodes: dict[str, NodeOfRun] = {node.job: node for node in self._run.nodes()}

    def nodes(self) -> Mapping[str, str]:
        return {job: node.node for job, node in self._nodes.items()}

    def choose(self, node: str | None) -> str:
        chosen = self._run.node(node or self._leading_job())
        self._nodes[chosen.job] = chosen  # it may have come since
        return chosen.job

    def describe(self, node: str) -> str:
        chosen = self._nodes[node]
        return f"{chosen.node}, {chosen.status} ({chosen.job})"

    def runs(self, node: str) -> bool:
        return self._nodes[node].active

    def text(self, node: str) -> str:
        from azureml_elastic.submit.run import joined

        return joined(self._texts(node))

    def follow(self, node: str) -> None:
        from azureml_elastic.submit.run import GrowingLog

        chosen, log = self._nodes[node], GrowingLog()
        while True:
            over = not chosen.active  # before the read, so that no line is missed
            print(log.added(self._texts(node), last=over), end="", flush=True)
            if over:
                break
            time.sleep(_SERVICE_SECONDS)
            chosen = replace(chosen, status=self._jobs.status(node) or chosen.status)
        typer.echo(f"azureml-elastic: {chosen.node}, {chosen.status}", err=True)

    def _texts(self, node: str) -> dict[str, str]:
        from azureml_elastic.submit.run import read_logs

        return read_logs(self._jobs.service.log_files(node))

    def _leading_job(self) -> str | None:
        """Return the job of rank 0's node by the run's table, else by the logs of the running nodes."""
        from azureml_elastic.submit.run import leading_node

        with contextlib.suppress(ElasticError):
            state = read_state(self._run, self._variables)
            if state is not None and state.leading_job in self._nodes:
                return state.leading_job
        running = [job for job in self._nodes if self.runs(job)]
        return leading_node({job: self.text(job) for job in running or self._nodes})


def _last_lines(text: str, count: int | None) -> Iterable[str]:
    lines = text.splitlines()
    return lines if count is None else lines[max(0, len(lines) - count) :]
