r"""Encoding of keys and values of rows, in characters and sizes that every backend stores alike.

Letters, digits and ``-._`` are kept; every other byte of the UTF-8 form becomes ``=XX`` in hexadecimal. The encoding
works byte by byte, so the encoded form of a prefix is a prefix of the encoded form. No encoded character is greater
than a letter: all keys with a prefix lie between its encoded form and the same followed by ``~``.

**Row values: JSON text, cut into pieces that fit a table's string properties.** The text is ASCII (JSON escapes
everything else as ``\uXXXX``): each character is one UTF-16 unit in the table, no cut divides a surrogate pair, and
every backend stores the same text with the same limit.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from azureml_elastic.errors import KeyInvalid, TableError, UsageError, ValueTooLarge

MAX_KEY_CHARACTERS = 250
"""Maximum length of a key."""

MAX_WRITTEN_CHARACTERS = 1024
"""Maximum length of an encoded key, which is the limit of Azure Tables for partition and row keys."""

_PLAIN = frozenset((string.ascii_letters + string.digits + "-._").encode())
_WRITTEN = re.compile(r"(?:[A-Za-z0-9._-]|=[0-9A-F]{2})+")


def _write(text: str) -> str:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise KeyInvalid(
            f"The key {text!r} has half a surrogate pair at position {error.start}, which is no character and has no "
            "UTF-8 form. Remove it."
        ) from error
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in data)


def write_key(text: str) -> str:
    """Return the encoded form of a key of 1 to 250 characters.

    Raises:
        KeyInvalid: the key is empty, or too long as it is or in its encoded form.
    """
    if not text:
        raise KeyInvalid("The key is empty; a row of the table needs a key of 1 to 250 characters.")
    if len(text) > MAX_KEY_CHARACTERS:
        raise KeyInvalid(
            f"The key {text[:40]!r}… has {len(text)} characters, and a row of the table takes at most "
            f"{MAX_KEY_CHARACTERS}. Shorten the run, node or host name that it is made of."
        )
    written = _write(text)
    if len(written) > MAX_WRITTEN_CHARACTERS:
        raise KeyInvalid(
            f"The key {text[:40]!r}… takes {len(written)} characters in the table, which holds at most "
            f"{MAX_WRITTEN_CHARACTERS}: letters, digits and '-._' take one each, all others three for every byte of "
            "UTF-8. Shorten the run, node or host name that it is made of."
        )
    return written


def read_key(written: str) -> str:
    """Return the key whose encoded form this is.

    Raises:
        KeyInvalid: the text is not an encoded key.
    """
    if _WRITTEN.fullmatch(written):
        try:
            return unquote_to_bytes(written.replace("=", "%")).decode()
        except UnicodeDecodeError:
            pass
    raise KeyInvalid(
        f"The table holds a row with the key {written!r}, which is not an encoded key of this library. Give "
        "the run a table of its own."
    )


def key_range(prefix: str) -> tuple[str, str]:
    """Return the inclusive lower and exclusive upper bound of the encoded keys with a prefix; empty for all keys.

    Raises:
        KeyInvalid: the prefix contains half a surrogate pair.
    """
    written = _write(prefix)
    return written, written + "~"


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
