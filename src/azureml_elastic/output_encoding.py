"""Output in whatever encoding the terminal, the pipe or the log takes: no character of a message ends the process."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

_HANDLER = "azureml_elastic.similar"

_SIMILAR = {
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{MINUS SIGN}": "-",
    "\N{MIDDLE DOT}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{CHECK MARK}": "ok",
    "\N{BALLOT X}": "x",
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
}


def accept_all_characters() -> None:
    """Have this process's output replace what its encoding lacks by something similar, or by an escape."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's or a test's stream takes all characters
            stream.reconfigure(errors=_HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_similar, error.object[error.start : error.end])), error.end


def _similar(character: str) -> str:
    """Return ASCII for a character."""
    if character in _SIMILAR:
        return _SIMILAR[character]
    if "─" <= character <= "▟":  # boxes and bars
        return {"─": "-", "━": "-", "│": "|", "┃": "|"}.get(character, "#" if character >= "▀" else "+")
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or character.encode("ascii", "backslashreplace").decode()
