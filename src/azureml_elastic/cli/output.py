"""What commands print: text for people, or JSON for scripts."""

from __future__ import annotations

from itertools import zip_longest
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_STDOUT = "-"

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the result as JSON to this file. Without a file, or with -, stdout has the JSON and nothing else. "
        "One whose name does not end in .json is given as --json=FILE.",
        metavar="[FILE.json]",
    ),
]


class CommandWithJson(TyperCommand):
    """A command whose ``--json`` may be given without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let ``--json`` that no file follows mean stdout: what follows may be the name of a run."""
        given = []
        for word, following in zip_longest(args, args[1:], fillvalue="--"):
            given.append(word)
            if word == "--json" and following != _STDOUT and not following.endswith(".json"):
                given.append(_STDOUT)
        return super().parse_args(ctx, given)


def console_beside(json: Path | None) -> Console:
    """Return the console for text, which is silent if stdout has the JSON."""
    from rich.console import Console

    return Console(quiet=_is_stdout(json))


def write_json(document: Any, json: Path | None) -> None:
    """Write a document, or a model, as ``--json`` says, if it is given."""
    text = document.model_dump_json(indent=2) if isinstance(document, BaseModel) else dumps(document, indent=2)
    if _is_stdout(json):
        typer.echo(text)
    elif json is not None:
        write_file(json, text, console_beside(json))


def write_file(path: Path, text: str, console: Console) -> None:
    """Write a text to a file, and say so.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Give another file.") from error
    console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _is_stdout(json: Path | None) -> bool:
    return json is not None and str(json) == _STDOUT
