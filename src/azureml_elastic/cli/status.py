"""``azureml-elastic status``: the round, the step and the nodes of a submitted run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from azureml_elastic.cli.failures import CONTINUES, explained
from azureml_elastic.cli.submitted_run import RunName, open_run, read_state
from azureml_elastic.cli.workspaces import GroupOption, SubscriptionOption, WorkspaceOption
from azureml_elastic.errors import ElasticError

if TYPE_CHECKING:
    from rich.table import Table

    from azureml_elastic.node.observation.run_state import RunState
    from azureml_elastic.submit.submitted import NodeOfRun

__all__ = ["status"]

_FINAL = frozenset({"Completed", "Failed", "Canceled"})


@explained(CONTINUES)
def status(
    run: RunName, subscription: SubscriptionOption = None, group: GroupOption = None, workspace: WorkspaceOption = None
) -> None:
    """Show round, world size, step and last checkpoint of a run, and the state of each node."""
    from rich.console import Console

    from azureml_elastic.submit.client import readable_errors

    _, submitted, variables = open_run(run, subscription, group, workspace)
    with readable_errors(f"list the nodes of {run!r}"):
        nodes = submitted.nodes()
    state: RunState | None = None
    unknown = "No node has started yet."
    try:
        state = read_state(submitted, variables)
    except ElasticError as error:
        unknown = f"Round, step and checkpoints are unknown, as the run's table cannot be read: {error}"
    console = Console()
    console.print(f"{submitted.name}: {submitted.status}", highlight=False)
    if submitted.job.studio_url:
        console.print(submitted.job.studio_url, soft_wrap=True, highlight=False)
    lines = (unknown,) if state is None else (state.headline, state.progress, state.waits)
    for line in filter(None, lines):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(_table(nodes, state))


def _table(jobs: Sequence[NodeOfRun], state: RunState | None) -> Table:
    """Return the jobs with what their nodes do, and the nodes of jobs with several nodes below their job."""
    from rich.table import Table
    from rich.text import Text

    table = Table("node", "pool", "status", "in the run")
    table.add_column("job", overflow="fold")
    by_job: dict[str, list[str]] = {}
    for node in state.nodes if state is not None else ():
        text = node.state if node.rank is None else f"node rank {node.rank}"
        by_job.setdefault(node.job, []).append(f"{text}: {node.reason}" if node.reason else text)
    for job in jobs:
        # A node that was lost has not written that it left.
        alive = [text for text in by_job.get(job.job, ()) if job.status not in _FINAL or text.startswith("left")]
        table.add_row(job.node, job.pool or "", job.status, Text("\n".join(alive)), job.job)
    return table
