"""Overrides of values in a job file, such as ``--set elastic.max_instance_count=12``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from azureml_elastic.errors import SubmitError, needs_extra

with needs_extra("PyYAML", "submit"):
    import yaml

__all__ = ["apply_overrides", "parse_override"]

_KEY = re.compile(r'"(?P<quoted>[^"]*)"|(?P<plain>[^."=]+)')


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a document with values set by overrides, later ones taking precedence.

    Missing blocks are created; field names are not validated.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for override in overrides:
        path, value = parse_override(override)
        _set(changed, path, value)
    return changed


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Return the path and the value of an override.

    Args:
        override: ``a.b=c``: keys separated by dots, in double quotes if they contain dots, with indices for entries of
            lists; and a value in single-line YAML. An empty value is the empty string.

    Raises:
        SubmitError: there is no ``=`` or no key, or the value is no YAML. The message never contains the value.
    """
    path, equals, text = _split(override)
    if not path or not equals:
        raise SubmitError(
            f"--set {override.partition('=')[0]!r} sets nothing. Give a path and a value, such as "
            "elastic.max_instance_count=12 or inputs.lr=0.5."
        )
    try:
        return path, "" if not text.strip() else yaml.safe_load(text)
    except yaml.YAMLError:
        raise SubmitError(
            f"The value that --set gives to {'.'.join(path)} is no YAML. Put text with special characters in quotes, "
            "as in --set 'tags.note=\"a: b\"'."
        ) from None


def _split(override: str) -> tuple[tuple[str, ...], str, str]:
    """Return the keys, ``=`` and the text of the value; no keys if they cannot be parsed."""
    keys: list[str] = []
    position = -1
    while position < 0 or override.startswith(".", position):
        match = _KEY.match(override, position + 1)
        if match is None:
            return (), "", ""
        keys.append(match["plain"] if match["quoted"] is None else match["quoted"])
        position = match.end()
    return tuple(keys), override[position : position + 1], override[position + 1 :]


def _set(document: dict[str, Any], path: Sequence[str], value: Any) -> None:
    here: Any = document
    for number, name in enumerate(path):
        key: str | int = name
        if isinstance(here, list):
            key = _index(here, path[: number + 1])
        elif not isinstance(here, dict):
            raise SubmitError(
                f"--set {'.'.join(path)}: {'.'.join(path[:number])} is a {type(here).__name__}, which has no {key!r}. "
                f"Set {'.'.join(path[:number])} as a whole, or correct the path."
            )
        if number == len(path) - 1:
            here[key] = value
        elif isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]


def _index(entries: list[Any], path: Sequence[str]) -> int:
    if not path[-1].isdecimal() or int(path[-1]) >= len(entries):
        raise SubmitError(
            f"--set {'.'.join(path)}: {'.'.join(path[:-1])} is a list of {len(entries)}, whose entries are 0 to "
            f"{len(entries) - 1}. Give one of these numbers, or set the list as a whole, as in [a, b]."
        )
    return int(path[-1])
