"""Azure ML's expressions in a command: ``${{inputs.x}}``, ``${{outputs.x}}`` and optional parts ``$[[...]]``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from azureml_elastic.errors import UsageError

__all__ = ["expand", "parent_reference"]

_EXPRESSION = re.compile(r"\$\{\{\s*([^{}]*?)\s*\}\}")
_OPTIONAL = re.compile(r"\$\[\[(.*?)\]\]", re.DOTALL)
_NAMED = re.compile(r"(inputs|outputs)\.([\w.]+)")
_PARENT = re.compile(r"parent\.(inputs|outputs)\.([\w.]+)")


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


def parent_reference(value: object) -> tuple[str, str] | None:
    """Return ``("inputs" or "outputs", name)`` for ``${{parent.inputs.name}}``, ``None`` for a plain value.

    Raises:
        UsageError: the value is another expression, such as the output of another step.
    """
    if not isinstance(value, str) or "${{" not in value:
        return None
    match = _EXPRESSION.fullmatch(value.strip())
    named = _PARENT.fullmatch(match[1]) if match is not None else None
    if named is None:
        raise UsageError(
            f"The local workspace does not support the binding {value!r}: the steps of its pipelines run in parallel, "
            "each with ${{parent.inputs.<name>}} and ${{parent.outputs.<name>}}. Submit dependent steps as separate "
            "jobs, one after the other."
        )
    return named[1], named[2]
