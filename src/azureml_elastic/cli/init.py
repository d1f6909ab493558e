"""``azureml-elastic init``: writes a starter project that works at once."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.cli.failures import explained
from azureml_elastic.errors import UsageError

_FILES = {
    "job.yml": "job.yml",
    "src/train.py": "src/train.py",
    "src/amlignore": "src/.amlignore",
    "README.md": "README.md",
}
"""The files of the template, and their names in the project."""

_SCHEMA = "elastic-job.schema.json"


@explained()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the project; created if it is missing.")] = Path(),
) -> None:
    """Write a starter project: a job, a training script that runs here and on Azure ML, and the next commands.

    Existing files are never changed.
    """
    files = starter_files()
    _write(folder, files)
    for name in files:
        typer.echo(f"wrote {folder / name}")
    where = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"Try it: {where}azureml-elastic local --nodes 1:2 src/train.py")


def starter_files() -> dict[str, str]:
    """Return the texts of the project's files by their paths."""
    from azureml_elastic.submit.yaml.elastic_block import schema_text

    template = resources.files("azureml_elastic") / "templates" / "starter"
    files = {name: template.joinpath(source).read_text(encoding="utf-8") for source, name in _FILES.items()}
    return {**files, _SCHEMA: schema_text()}


def _write(folder: Path, files: dict[str, str]) -> None:
    taken = [str(folder / name) for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if taken:
        raise UsageError(f"{', '.join(taken)} already exists; nothing was written. Give another folder.")
    made: list[Path] = []
    try:
        for parent in sorted({(folder / name).parent for name in files}, key=lambda path: len(path.parts)):
            for missing in reversed([one for one in (parent, *parent.parents) if not one.exists()]):
                missing.mkdir()
                made.append(missing)
        for name, text in files.items():
            # "x" fails where a file has appeared since the check, in place of overwriting it.
            with (folder / name).open("x", encoding="utf-8", newline="\n") as stream:
                made.append(folder / name)
                stream.write(text)
    except OSError as error:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        raise UsageError(f"{error.filename} cannot be written ({error.strerror}); nothing was written.") from error
