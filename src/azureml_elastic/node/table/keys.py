"""Encoding of the keys of rows, in characters and sizes that every backend stores alike.

Letters, digits and ``-._`` are kept; every other byte of the UTF-8 form becomes ``=XX`` in hexadecimal. The encoding
works byte by byte, so the encoded form of a prefix is a prefix of the encoded form. No encoded character is greater
than a letter: all keys with a prefix lie between its encoded form and the same followed by ``~``.
"""

from __future__ import annotations

import re
import string
from urllib.parse import unquote_to_bytes

from azureml_elastic.errors import KeyInvalid

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
