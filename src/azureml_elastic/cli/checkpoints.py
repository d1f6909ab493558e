"""``azureml-elastic checkpoints``: list, verify, prune and export checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.errors import CheckpointDamaged, UsageError
from azureml_elastic.plurals import counted

if TYPE_CHECKING:
    from azureml_elastic.checkpoint.format.catalogue import FoundCheckpoint
    from azureml_elastic.checkpoint.format.manifest import Manifest
    from azureml_elastic.checkpoint.storage.storage import Storage

__all__ = ["checkpoints"]

checkpoints = typer.Typer(help="List, verify, prune and export the checkpoints of a run.", no_args_is_help=True)

Folder = Annotated[str, typer.Argument(help="The folder of the checkpoints, or a URL such as abfs://…")]


@checkpoints.command("list")
@explained()
def list_(folder: Folder) -> None:
    """List the checkpoints of a folder; only sizes are checked."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("step", "round", "ranks", "size", "state", "folder")
    for found in _survey(folder):
        ranks = "" if found.manifest is None else str(found.manifest.world_size)
        table.add_row(
            str(found.name.step), str(found.name.round), ranks, decimal(found.nbytes), _state(found), str(found.name)
        )
    Console().print(table)


@checkpoints.command()
@explained()
def verify(folder: Folder) -> None:
    """Read every byte of every checkpoint; exit with 1 if a committed one is damaged."""
    from azureml_elastic.checkpoint.format import catalogue

    damaged = 0
    for found in _survey(folder):
        problems = [found.problem] if found.problem is not None else []
        if found.manifest is not None and not problems:
            problems = catalogue.verify(_storage(folder), found.manifest)
        damaged += bool(problems) and found.committed
        typer.echo(f"{found.name}: {'; '.join(problems) or 'whole'}{'' if found.committed else ' (never committed)'}")
    if damaged:
        raise CheckpointDamaged(f"Damaged in {folder}: {counted(damaged, 'committed checkpoint')}.")


@checkpoints.command()
@explained()
def prune(
    folder: Folder,
    keep: Annotated[int, typer.Option(min=1, help="Number of the newest undamaged checkpoints to keep.")] = 2,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove old checkpoints and incomplete attempts. Not to be used while the run is active."""
    from azureml_elastic.checkpoint.format import catalogue

    count = len(_survey(folder))
    if not yes:
        typer.confirm(f"Keep the newest {keep} of {count} in {folder}, and remove the others?", abort=True)
    for removed in catalogue.prune(_storage(folder), keep):
        typer.echo(f"removed {removed}")


@checkpoints.command()
@explained()
def export(
    folder: Folder,
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

    manifest = _choose(folder, step)
    if target.exists():
        raise UsageError(f"{target} exists; nothing was written.")
    count = catalogue.export(_storage(folder), manifest, tracked, target)
    typer.echo(f"Wrote {counted(count, 'tensor')} of step {manifest.step} to {target}")


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
    manifest = max(found, key=lambda each: (each.committed, each.name.round)).manifest
    assert manifest is not None
    problems = catalogue.verify(_storage(folder), manifest)
    if problems:
        raise CheckpointDamaged(f"The checkpoint of step {step} is damaged: {'; '.join(problems)}")
    return manifest


def _survey(folder: str) -> list[FoundCheckpoint]:
    require(("xxhash", "xxhash", "node"))
    from azureml_elastic.checkpoint.format import catalogue
    from azureml_elastic.checkpoint.storage.opening import is_remote

    if not is_remote(folder) and not Path(folder).is_dir():
        raise UsageError(f"{folder} is not a folder.")
    found = catalogue.survey(_storage(folder))
    if not found:
        raise UsageError(f"There are no checkpoints in {folder}.")
    return found


def _storage(folder: str) -> Storage:
    from azureml_elastic.checkpoint.storage.opening import open_storage

    return open_storage(folder)


def _state(found: FoundCheckpoint) -> str:
    if found.problem is not None:
        return f"[red]{found.problem}[/red]" if found.committed else "[dim]incomplete[/dim]"
    if not found.committed:
        return "[yellow]complete, not committed[/yellow]"
    return "kept for good" if found.name.kept else "committed"
