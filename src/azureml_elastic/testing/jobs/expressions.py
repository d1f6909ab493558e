"""Azure ML's expressions in a command: ``${{inputs.x}}``, ``${{outputs.x}}`` and optional parts ``$[[...]]``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from azureml_elastic.errors import UsageError

__all__ = ["Binding", "as_searched", "expand", "read_binding", "with_values"]

_EXPRESSION = re.compile(r"\$\{\{\s*([^{}]*?)\s*\}\}")
_OPTIONAL = re.compile(r"\$\[\[(.*?)\]\]", re.DOTALL)
_NAMED = re.compile(r"(inputs|outputs)\.([\w.]+)")
_SEARCHED = re.compile(r"search_space\.([\w.]+)")
_BOUND = re.compile(r"parent\.(?:jobs\.(?P<step>[\w-]+)\.)?(?P<kind>inputs|outputs)\.(?P<name>[\w.]+)")


@dataclass(frozen=True)
class Binding:
    """What an input or output of a step is bound to.

    Args:
        kind: whether it is one of the inputs or of the outputs.
        name: name of the input or output.
        step: name of the step in the same pipeline that has it; ``None`` for the pipeline itself.
    """

    kind: Literal["inputs", "outputs"]
    name: str
    step: str | None = None


def expand(text: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """Return the text with each expression replaced by its value.

    An optional part ``$[[...]]`` is kept if all its inputs have values, and removed otherwise. Inputs without a value
    are not in ``inputs``.
    """
    known = {"inputs": inputs, "outputs": outputs}

    def value(match: re.Match[str]) -> str:
        named = _NAMED.fullmatch(match[1])
        if named is None:
            raise UsageError(
                f"The local workspace does not support the expression {match[0]}. In a command write "
                "${{inputs.<name>}} or ${{outputs.<name>}}."
            )
        found = known[named[1]].get(named[2])
        if found is None:
            there = ", ".join(sorted(known[named[1]])) or "none"
            raise UsageError(f"The expression {match[0]} refers to no value; the job's {named[1]} are: {there}.")
        return found

    def option(match: re.Match[str]) -> str:
        names = [_NAMED.fullmatch(found) for found in _EXPRESSION.findall(match[1])]
        missing = any(name is not None and name[2] not in known[name[1]] for name in names)
        return "" if missing else match[1]

    return _EXPRESSION.sub(value, _OPTIONAL.sub(option, text))


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text with each ``${{search_space.x}}`` replaced by its value.

    Raises:
        UsageError: there is no such value.
    """

    def value(match: re.Match[str]) -> str:
        searched = _SEARCHED.fullmatch(match[1])
        if searched is None:
            return match[0]
        if searched[1] not in values:
            raise UsageError(
                f"The expression {match[0]} refers to no value; the search space has: {', '.join(sorted(values))}."
            )
        return values[searched[1]]

    return _EXPRESSION.sub(value, text)


def as_searched(text: str, names: Collection[str]) -> str:
    """Return the text with ``${{inputs.x}}`` as ``${{search_space.x}}`` for each of these inputs."""

    def value(match: re.Match[str]) -> str:
        named = _NAMED.fullmatch(match[1])
        searched = named is not None and named[1] == "inputs" and named[2] in names
        return f"${{{{search_space.{named[2]}}}}}" if named is not None and searched else match[0]

    return _EXPRESSION.sub(value, text)


def read_binding(value: object) -> Binding | None:
    """Return what ``${{parent.inputs.x}}`` or ``${{parent.jobs.step.outputs.x}}`` refers to, ``None`` for plain values.

    Raises:
        UsageError: the value is another expression.
    """
    if not isinstance(value, str) or "${{" not in value:
        return None
    match = _EXPRESSION.fullmatch(value.strip())
    bound = _BOUND.fullmatch(match[1]) if match is not None else None
    if bound is None or (bound["step"] is not None and bound["kind"] == "inputs"):
        raise UsageError(
            f"The local workspace does not support the binding {value!r}. Bind to ${{{{parent.inputs.<name>}}}}, "
            "${{parent.outputs.<name>}} or ${{parent.jobs.<step>.outputs.<name>}}."
        )
    return Binding("inputs" if bound["kind"] == "inputs" else "outputs", bound["name"], bound["step"])
