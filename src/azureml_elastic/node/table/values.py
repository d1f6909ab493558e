r"""Values of rows: JSON text, cut into pieces that fit a table's string properties.

The text is ASCII (JSON escapes everything else as ``\uXXXX``): each character is one UTF-16 unit in the table, no cut
divides a surrogate pair, and every backend stores the same text with the same limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from azureml_elastic.errors import TableError, UsageError, ValueTooLarge

MAX_PIECE_CHARACTERS = 32 * 1024
"""Maximum length of one string property: 64 KiB in UTF-16."""

MAX_VALUE_CHARACTERS = 450 * 1024
"""Maximum length of one value: 900 KiB in UTF-16, which leaves room for keys and names within an entity's 1 MiB."""


def write_value(key: str, value: Mapping[str, Any]) -> str:
    """Return the value as JSON text.

    Args:
        value: JSON object; tuples become lists.

    Raises:
        ValueTooLarge: the text is too long for one row.
        UsageError: the value is not JSON, such as an object of another type, NaN or an infinity.
    """
    try:
        text = json.dumps(dict(value), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The value for row {key!r} cannot be written as JSON: {error}. Give an object of text, finite numbers, "
            "booleans, null, lists and objects."
        ) from error
    if len(text) > MAX_VALUE_CHARACTERS:
        raise ValueTooLarge(
            f"The value for row {key!r} takes {2 * len(text):,} bytes in the table, two for each character of its "
            f"JSON text, and one row holds at most {2 * MAX_VALUE_CHARACTERS:,}. Nothing was written; put the bulk "
            "into a file and its path into the row."
        )
    return text


def read_value(key: str, text: str) -> dict[str, Any]:
    """Return the value of a JSON text.

    Raises:
        TableError: the text is not a JSON object.
    """
    cause: ValueError | None = None
    try:
        value = json.loads(text)
    except ValueError as error:
        value, cause = None, error
    if not isinstance(value, dict):
        raise TableError(
            f"Row {key!r} of the table holds {text[:60]!r}, which is not a JSON object: another program writes to this "
            "table. Give the run a table of its own."
        ) from cause
    return value


def cut(text: str, size: int = MAX_PIECE_CHARACTERS) -> Iterable[str]:
    """Yield the text in pieces of at most ``size`` characters."""
    for start in range(0, len(text), size):
        yield text[start : start + size]
