"""One message is one line: the encoding and its inverse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["MAX_LINE", "LineReader", "encode"]

MAX_LINE = 1 << 20
"""The longest message in bytes, its newline included."""

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the message as one line.

    Raises:
        ValueError: the message is no JSON or its line is longer than :data:`MAX_LINE`.
    """
    line = _to_json(dict(message)).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"A message of {len(line)} bytes exceeds the limit of {MAX_LINE}; send less at a time.")
    return line


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_from_json = json.JSONDecoder(parse_constant=_refuse).decode


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = _from_json(line.decode())
        if _SURROGATE.search(line):
            # Half of a character can be neither written nor sent on; a whole one is two of them in JSON.
            json.dumps(message, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(message, dict):
        kind = type(message).__name__
        raise ValueError(f"a JSON {kind}, not an object: {line[:80]!r}")  # noqa: TRY004 - bad input
    return message


class LineReader:
    """Cuts a stream of bytes into messages.

    Args:
        verify: function that checks a line before it is parsed, and returns it without its authentication.
    """

    def __init__(self, verify: Callable[[bytes], bytes] = lambda line: line) -> None:
        self._verify = verify
        self._partial = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that ``data`` completes; to be exhausted before the next call.

        Raises:
            ValueError: a line is too long or no JSON object. The messages before it have been yielded.
            AuthenticationError: a line is not authentic.
        """
        self._partial += data
        while (end := self._partial.find(b"\n")) >= 0:
            line = bytes(self._partial[:end])
            del self._partial[: end + 1]
            if end >= MAX_LINE:
                break
            yield _parse(self._verify(line))
        if end >= MAX_LINE or len(self._partial) >= MAX_LINE:
            raise ValueError(f"a line exceeds the limit of {MAX_LINE} bytes")

    def take_rest(self) -> bytes:
        """Return the bytes that no message has consumed yet, without keeping them."""
        rest = bytes(self._partial)
        self._partial.clear()
        return rest
