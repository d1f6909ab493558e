"""Conversion of azure-ai-ml's errors about invalid job files to sentences.

Its messages contain JSON, whose strings contain further messages, with one entry per alternative for a field that
accepts several types.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from azureml_elastic.submit.conversion import FIELDS_OF_COMMAND, FIELDS_OF_RESOURCES

__all__ = ["readable"]

_BINDING = "not a data binding string"
_NOT_IN = " passed is not in set"
_CHOICE = re.compile(rf"Value (?P<value>.*){_NOT_IN} \[(?P<names>.*)\]", re.DOTALL)
_NAMES = sorted(FIELDS_OF_COMMAND | {"limits", "queue_settings", "resources"} | set(FIELDS_OF_RESOURCES))
_MASK = "***"
_SHORTEST_SECRET = 4


def readable(error: Exception, document: Mapping[str, Any]) -> str:
    """Return an error as sentences, without the values of the job's environment variables."""
    faults = [_sentence(path, message) for path, message in _faults(str(error), "")]
    text = " ".join(one if one.endswith((".", "?")) else f"{one}." for one in dict.fromkeys(faults))
    for secret in sorted(_texts(document.get("environment_variables")), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _sentence(path: str, message: str) -> str:
    if message == "Unknown field.":
        near = difflib.get_close_matches(path.rpartition(".")[2], _NAMES, 1)
        return f"{path} is no field of a command job{f'; did you mean {near[0]}?' if near else ''}"
    message = _CHOICE.sub(lambda match: f"{match['value']} is none of {match['names']}", message)
    return f"{path}: {message}" if path else message


def _faults(message: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the text of each fault in a message."""
    start = message.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(message, max(start, 0))
    except ValueError:
        found = None
    if start < 0 or not isinstance(found, dict):
        yield from _leaves(message.strip().split("\n\n")[0], path)
    elif isinstance(found.get("errors"), list):
        for one in found["errors"]:
            yield from _faults(str(one.get("message", "")), path if one.get("path") in {"*", None} else one["path"])
    else:
        yield from _leaves(found, path)


def _leaves(found: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, dict):
        for key, value in found.items():
            part = "" if key in {"_schema", "value"} else str(key)
            yield from _leaves(value, ".".join(text for text in (path, part) if text))
    elif isinstance(found, list) and found:
        kinds = [list(_leaves(one, path)) for one in found if _BINDING not in str(one)]
        yield from _one_of(kinds or [list(_leaves(found[0], path))])
    elif isinstance(found, str) and found.startswith("{'"):
        yield from _leaves(_python(found), path)
    else:
        yield path, " ".join(str(found).split())


def _one_of(kinds: list[list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """Yield the faults of a value that accepts several types.

    If every type is an enumeration, their names are combined; otherwise the faults of the first type are yielded, which
    is the most likely one.
    """
    choices = [_CHOICE.fullmatch(faults[0][1]) if len(faults) == 1 else None for faults in kinds]
    if len({faults[0][0] for faults in kinds}) == 1 and all(choices):
        names = ", ".join(choice["names"] for choice in choices if choice is not None)
        yield kinds[0][0][0], _CHOICE.sub(lambda match: f"Value {match['value']}{_NOT_IN} [{names}]", kinds[0][0][1])
    else:
        yield from kinds[0]


def _python(text: str) -> Any:
    """Return the first of the faults in a text of Python literals."""
    first, more, _ = text.partition("}; ")
    try:
        return ast.literal_eval(f"{first}}}" if more else first)
    except (SyntaxError, ValueError):
        return f" {text}"


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a value that are long enough to be secrets."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif value is not None and len(str(value)) >= _SHORTEST_SECRET:
        yield str(value)
