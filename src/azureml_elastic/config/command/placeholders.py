"""Placeholders for the variables of a worker, such as ``%{worker:RANK}``, which no shell expands.

The name in them is chosen per command and given to the nodes, so that no other text is taken for a placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["fill", "placeholder", "unused_name"]

_FIRST = "worker"


def placeholder(name: str, variable: str) -> str:
    """Return the placeholder for a variable."""
    return f"%{{{name}:{variable}}}"


def unused_name(texts: Sequence[str]) -> str:
    """Return a name whose placeholders occur in none of the texts."""
    name, number = _FIRST, 1
    while any(f"%{{{name}:" in text for text in texts):
        number += 1
        name = f"{_FIRST}{number}"
    return name


def fill(arguments: Sequence[str], name: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Replace the placeholders in the arguments of a worker by the values of its variables.

    Args:
        arguments: arguments of the program.
        name: name in the placeholders; ``None`` if there are none.
        environ: environment of the worker; as in a shell, a variable that it lacks is empty.
    """
    if name is None:
        return tuple(arguments)
    pattern = re.compile(re.escape(placeholder(name, "@")).replace("@", "([A-Z_]+)"))
    return tuple(pattern.sub(lambda match: environ.get(match[1], ""), word) for word in arguments)
