"""``azureml-elastic checkpoints``: list, verify, prune and export checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.cli.output import CommandWithJson, JsonOption, console_beside, write_json
from azureml_elastic.cli.submitted_run import complete_run, open_run, run_folder
from azureml_elastic.errors import CheckpointDamaged, CheckpointError, UsageError
from azureml_elastic.plurals import counted

if TYPE_CHECKING:
    from azureml_elastic.checkpoint.format.catalogue import FoundCheckpoint
    from azureml_elastic.checkpoint.format.manifest import Manifest
    from azureml_elastic.checkpoint.storage.storage import Storage
    from azureml_elastic.cli.workspace_jobs import Jobs
    from azureml_elastic.submit.run import ElasticRun

_IN_DATASTORE = re.compile(r"azureml:/+(?:.*/)?datastores/([^/]+)/paths/(.*)")

CheckpointsArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of a run on this machine, name of a submitted run, or folder or URL (abfs://…) of checkpoints.",
        metavar="RUN",
        autocompletion=complete_run,
    ),
]

checkpoints = typer.Typer(help="List, verify, prune and export the checkpoints of a run.", no_args_is_help=True)


def folder_of_files(path: Path) -> Path:
    """Return the folder of checkpoints in a folder: that of a run, of its checkpoints, or of those of several runs.

    Raises:
        UsageError: there are no checkpoints, or those of several runs.
    """
    # A job's nodes make a folder for their run in the one that they are given.
    places = [path, path / "checkpoints"]
    places += [below for place in places if place.is_dir() for below in sorted(place.iterdir()) if below.is_dir()]
    found = [place for place in places if _has_checkpoints(place)]
    if not found:
        raise UsageError(f"There are no checkpoints in {path}.")
    if len(found) > 1 and found[0] not in places[:2]:
        names = ", ".join(place.name for place in found)
        raise UsageError(f"{path} has the checkpoints of several runs: {names}. Give the folder of one of them.")
    return found[0]


def folder_of_submitted(run: ElasticRun, jobs: Jobs) -> str:
    """Return the URL of a submitted run's checkpoints.

    Raises:
        UsageError: they are in a folder of the nodes, or in a place that only the nodes know.
        WorkspaceForbidden: the login may not read the datastore.
        WorkspaceUnavailable: the workspace does not answer.
    """
    from azureml_elastic.checkpoint.storage.locations import is_remote, join_path

    output = run.plan.checkpoint.output
    if output is None:
        path = str(run.checkpoint_path)
        if is_remote(path):
            return join_path(path, run.run_id)
        raise UsageError(
            f"The checkpoints of {run.name} are in the folder {join_path(path, run.run_id)} of its nodes. Give that "
            "folder on a machine that has it, or what it is mounted from."
        )
    match = _IN_DATASTORE.fullmatch(output)
    container = None if match is None or "${{" in output else jobs.container_url(match[1])
    if match is None or container is None:
        raise UsageError(
            f"The checkpoints of {run.name} are below {output}, whose container is not known here. Give its URL, such "
            f"as abfs://container@account.dfs.core.windows.net/path/{run.run_id}."
        )
    return join_path(join_path(container, match[2].strip("/")), run.run_id)


def _has_checkpoints(folder: Path) -> bool:
    from azureml_elastic.checkpoint.format.manifest import FolderName

    return folder.is_dir() and any(FolderName.parse(each.name) is not None for each in folder.iterdir())


@checkpoints.command("list", cls=CommandWithJson)
@explained()
def list_(run: CheckpointsArgument, json: JsonOption = None) -> None:
    """List the checkpoints of a run; only sizes are checked."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    where = _folder(run)
    table = Table("step", "round", "ranks", "size", "state")
    table.add_column("folder", overflow="fold")
    rows = []
    for found in _survey(where):
        state, style = _state(found)
        step, round_ = found.name.step, found.name.round
        ranks = None if found.manifest is None else found.manifest.world_size
        row = {"step": step, "round": round_, "ranks": ranks, "bytes": found.nbytes}
        rows.append({**row, "state": state, "committed": found.committed, "folder": str(found.name)})
        shown = "" if ranks is None else str(ranks)
        table.add_row(str(step), str(round_), shown, decimal(found.nbytes), Text(state, style=style), str(found.name))
    console = console_beside(json)
    console.print(where, soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    write_json({"version": 1, "folder": where, "checkpoints": rows}, json)


@checkpoints.command()
@explained()
def verify(run: CheckpointsArgument) -> None:
    """Read every byte of every checkpoint of a run; exit with 1 if a committed one is damaged."""
    from azureml_elastic.checkpoint.format import catalogue

    where = _folder(run)
    damaged = 0
    for found in _survey(where):
        problems = [found.problem] if found.problem is not None else []
        if found.manifest is not None and not problems:
            problems = catalogue.verify(_storage(where), found.manifest)
        damaged += bool(problems) and found.committed
        typer.echo(f"{found.name}: {'; '.join(problems) or 'whole'}{'' if found.committed else ' (never committed)'}")
    if damaged:
        raise CheckpointDamaged(f"Damaged in {where}: {counted(damaged, 'committed checkpoint')}.")


@checkpoints.command()
@explained()
def prune(
    run: CheckpointsArgument,
    keep: Annotated[int, typer.Option(min=1, help="Number of the newest undamaged checkpoints to keep.")] = 2,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove old checkpoints and incomplete attempts. Not to be used while the run is active."""
    from azureml_elastic.checkpoint.format import catalogue

    where = _folder(run, ended=True)
    count = len(_survey(where))
    if not yes:
        typer.confirm(f"Keep the newest {keep} of {count} in {where}, and remove the others?", abort=True)
    for removed in catalogue.prune(_storage(where), keep):
        typer.echo(f"removed {removed}")


@checkpoints.command()
@explained()
def export(
    run: CheckpointsArgument,
    target: Annotated[Path, typer.Argument(help="Path of the safetensors file.")],
    tracked: Annotated[
        str, typer.Option("--object", help="The name given to run.track(), or a part: engine/parameters.")
    ] = "model",
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; the newest undamaged one by default.")
    ] = None,
) -> None:
    """Write the tensors of a tracked object to one safetensors file."""
    require(("numpy", "numpy", "node"))
    from azureml_elastic.checkpoint.format import catalogue

    where = _folder(run)
    manifest = _choose(where, step)
    if target.exists():
        raise UsageError(f"{target} exists; nothing was written.")
    count = catalogue.export(_storage(where), manifest, tracked, target)
    typer.echo(f"Wrote {counted(count, 'tensor')} of step {manifest.step} to {target}")


def _folder(run: str, *, ended: bool = False) -> str:
    """Return the folder or URL of the checkpoints that an argument names."""
    require(("xxhash", "xxhash", "node"))
    from azureml_elastic.checkpoint.storage.locations import is_remote

    if is_remote(run):
        return run
    local = run_folder(run.removeprefix("file://"))
    if local is not None:
        return str(folder_of_files(local))
    jobs, submitted, _ = open_run(run)
    active = [node for node in submitted.nodes() if node.active] if ended else []
    if active:
        raise UsageError(
            f"The run {submitted.name} still has {counted(len(active), 'active node')}, which may read and write its "
            "checkpoints. Wait for its end."
        )
    return folder_of_submitted(submitted, jobs)


def _choose(folder: str, step: int | None) -> Manifest:
    from azureml_elastic.checkpoint.format import catalogue

    if step is None:
        newest = catalogue.newest_whole(_storage(folder))
        if newest is None:
            raise UsageError(f"No checkpoint in {folder} is committed and undamaged.")
        return newest
    found = [each for each in _survey(folder) if each.name.step == step and each.manifest is not None]
    if not found:
        steps = ", ".join(str(each.name.step) for each in _survey(folder))
        raise UsageError(f"There is no checkpoint of step {step} in {folder}; there are {steps}.")
    # A step that was trained again after a loss may have been saved by several rounds.
    manifest = max(found, key=lambda each: (each.committed, each.name.round)).manifest
    assert manifest is not None
    problems = catalogue.verify(_storage(folder), manifest)
    if problems:
        raise CheckpointDamaged(f"The checkpoint of step {step} is damaged: {'; '.join(problems)}")
    return manifest


def _survey(folder: str) -> list[FoundCheckpoint]:
    from azureml_elastic.checkpoint.format import catalogue

    try:
        found = catalogue.survey(_storage(folder))
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"The checkpoints in {folder} cannot be read: {reason}. To read those of a submitted run, a login needs "
            "the role 'Storage Blob Data Reader' on the storage account: az login."
        ) from error
    if not found:
        raise UsageError(f"There are no checkpoints in {folder}.")
    return found


def _storage(folder: str) -> Storage:
    from azureml_elastic.checkpoint.storage.locations import open_storage

    return open_storage(folder)


def _state(found: FoundCheckpoint) -> tuple[str, str]:
    if found.problem is not None:
        return (found.problem, "red") if found.committed else ("incomplete", "dim")
    if not found.committed:
        return "complete, not committed", "yellow"
    return "kept for good" if found.name.kept else "committed", ""
