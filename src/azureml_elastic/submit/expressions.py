"""The expressions of Azure ML (``${{inputs.data}}``) in a command, which it replaces before the shell reads them.

The variables of the workers become placeholders, which the node replaces.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import FoundProgram
from azureml_elastic.program.worker_variables import Translated, refuse_changing, with_placeholders
from azureml_elastic.submit.fields import JobFields, field_of

_OTHER_EXPRESSION = re.compile(r"\$\{\{(?!\s*(?:inputs|outputs)\.)\s*([\w.]*).*?\}\}", re.ASCII)
_OPTION = re.compile(r"\$\[\[(.*?)\]\]", re.DOTALL)
_EXPRESSION = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)[\w.]*\s*\}\}", re.ASCII)


def check_expressions(command: str, inputs: Collection[str], outputs: Collection[str], *, reserved: str) -> None:
    """Check that a command names only inputs and outputs that the job declares.

    Args:
        reserved: beginning of the names that are added to the job.

    Raises:
        CommandError: the command names another one, or has an expression of another kind.
    """
    other = _OTHER_EXPRESSION.search(command)
    if other is not None:
        name = other[1].rpartition(".")[2]
        instead = f"Declare an input, and write ${{{{inputs.{name}}}}}." if name else "Correct the command."
        trials = ", not those of a sweep's trials" if other[1].startswith("search_space.") else ""
        raise CommandError(
            f"The command has {other.group()!r}, but a job of its own has only the values of its inputs and outputs"
            f"{trials}. {instead}"
        )
    for match in _EXPRESSION.finditer(command):
        kind, name = match.groups()
        declared = inputs if kind == "inputs" else outputs
        if name in declared or name.startswith(reserved):
            continue
        close = difflib.get_close_matches(name, declared, 1)
        known = f"the {kind} {', '.join(sorted(declared))}" if declared else f"no {kind}"
        instead = f" Did you mean ${{{{{kind}.{close[0]}}}}}?" if close else ""
        raise CommandError(
            f"The command has {match.group()!r}, but the job declares {known}.{instead} Add {name!r} to {kind}, or "
            "correct the command."
        )


def without_options(command: str, inputs: Collection[str]) -> str:
    """Return a command in which the optional parts ``$[[...]]`` whose inputs all have values are plain, and no others.

    Args:
        inputs: names of the inputs that have values.
    """

    def part(match: re.Match[str]) -> str:
        names = {name for kind, name in _EXPRESSION.findall(match[1]) if kind == "inputs"}
        return match[1] if names <= set(inputs) else ""

    return _OPTION.sub(part, command)


def with_literals(text: str, inputs: Mapping[str, Any]) -> str:
    """Return a text with the values of the inputs that are numbers, texts or truth values."""

    def value(match: re.Match[str]) -> str:
        literal = literal_of(inputs.get(match[2])) if match[1] == "inputs" else None
        return match.group() if literal is None else str(literal)

    return _EXPRESSION.sub(value, text)


def literal_of(value: Any) -> bool | float | str | None:
    """Return the value of an input that is a literal, or an ``Input`` of one; ``None`` for data."""
    if isinstance(value, (bool, int, float, str)):
        return value
    literal = field_of(value, "default")
    return literal if isinstance(literal, (bool, int, float, str)) else None


def translated_command(job: JobFields, found: FoundProgram) -> Translated:
    """Return the job's command with placeholders for the variables of its workers.

    Raises:
        CommandError: such a variable is used where it has no value.
    """
    literals = [str(literal_of(value) or "") for value in job.inputs.values()]
    translated = with_placeholders(found, [*literals, *job.environment_variables.values()], job.environment_variables)
    refuse_changing(translated.variables, job.distribution)
    return translated
