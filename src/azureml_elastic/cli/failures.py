"""Conversion of errors to a message on stderr and an exit code."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import typer
from pydantic import ValidationError

from azureml_elastic.config.exit_codes import FAILED, USAGE
from azureml_elastic.errors import ElasticError, MissingExtra, UsageError

CONTINUES = "Interrupted; a run that was submitted continues. 'azureml-elastic cancel RUN' ends it."
"""Message after Ctrl-C for commands about a run in Azure ML."""

_INTERRUPTED = 130


@contextlib.contextmanager
def explained(interrupted: str = "Interrupted; all nodes have been ended.") -> Iterator[None]:
    """Convert errors to a message and an exit code: 2 for invalid input, 130 for Ctrl-C, otherwise 1.

    Serves as a decorator of commands and as a context manager.
    """
    try:
        yield
    except (ValidationError, ElasticError) as error:
        code = USAGE if isinstance(error, ValidationError | UsageError) else FAILED
        raise _exit(message_of(error), code) from error
    except KeyboardInterrupt as error:
        raise _exit(interrupted, _INTERRUPTED) from error


def require(*packages: tuple[str, str, str]) -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        packages: tuples of module, distribution, and the extra that installs it.

    Raises:
        MissingExtra: a package is not installed.
    """
    for module, distribution, extra in packages:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(distribution, extra)


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(f"azureml-elastic: {message}", err=True)
    return typer.Exit(code)


def message_of(error: ValidationError | ElasticError) -> str:
    """Return what an error says; the invalid fields of a model in one line."""
    if isinstance(error, ElasticError):
        return str(error)
    faults = []
    for detail in error.errors(include_url=False):
        path = ".".join(str(part) for part in detail["loc"])
        text = detail["msg"].removeprefix("Value error, ")
        faults.append(f"{path}={detail['input']!r}: {text}" if path else text)
    return "; ".join(faults) + "."
