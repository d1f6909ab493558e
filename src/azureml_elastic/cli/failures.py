"""Turns errors into one paragraph on stderr and an exit code."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import typer
from pydantic import ValidationError

from azureml_elastic.errors import ElasticError, MissingExtra, UsageError

__all__ = ["GOES_ON", "USAGE", "explained", "require"]

USAGE = 2
"""Exit code for input that is wrong."""

GOES_ON = "Interrupted; a run that was submitted goes on. 'azureml-elastic cancel RUN' ends it."
"""What Ctrl-C means for a run in Azure ML."""

FAILED = 1
INTERRUPTED = 130


@contextlib.contextmanager
def explained(interrupted: str = "Interrupted; all nodes have been ended.") -> Iterator[None]:
    """Give each error of the body its message and exit code: 2 for wrong input, 130 for Ctrl-C, else 1.

    Args:
        interrupted: what Ctrl-C means for the nodes.
    """
    try:
        yield
    except UsageError as error:
        raise _exit(str(error), USAGE) from error
    except ValidationError as error:
        raise _exit(_paragraph(error), USAGE) from error
    except ElasticError as error:
        raise _exit(str(error), FAILED) from error
    except KeyboardInterrupt as error:
        raise _exit(interrupted, INTERRUPTED) from error


def require(*packages: tuple[str, str, str]) -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        packages: module, distribution and the extra that brings it.

    Raises:
        MissingExtra: one is not.
    """
    for module, distribution, extra in packages:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(distribution, extra)


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(f"azureml-elastic: {message}", err=True)
    return typer.Exit(code)


def _paragraph(error: ValidationError) -> str:
    """Return what is wrong with a model's fields in one line."""
    faults = []
    for detail in error.errors(include_url=False):
        place = ".".join(str(part) for part in detail["loc"])
        text = detail["msg"].removeprefix("Value error, ")
        faults.append(f"{place}={detail['input']!r}: {text}" if place else text)
    return "; ".join(faults) + "."
