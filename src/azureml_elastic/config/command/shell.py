"""Parser that splits a shell command into simple commands, with the position of each word.

It covers quotes, line continuations, comments, operators, redirections, substitutions, and the ``${{...}}`` expressions
of Azure ML, without expanding anything. :mod:`shlex` supports neither positions nor these expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from azureml_elastic.errors import CommandError

__all__ = ["Word", "simple_commands"]

_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[|;&()\n]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<|>>|>\||[<>]&|<>|[<>])")
_SPACE = re.compile(r"(?:\\\r?\n|[^\S\n])+")
_COMMENT = re.compile(r"#[^\n]*")
_PLAIN = re.compile(r"[^\s\\'\"`$|&;()<>]+|\$")
_ESCAPED = re.compile(r'\\([\\"$`])')


class Word(NamedTuple):
    """A word of a command, and the range of its characters in the command."""

    text: str
    """Text without quotes, as a program would receive it before expansion."""
    start: int
    end: int


def simple_commands(text: str) -> Iterator[list[Word]]:
    """Yield the words of each command between the shell's operators, without redirections.

    Raises:
        CommandError: a quotation or expression is not closed, or the text has a here-document.
    """
    words: list[Word] = []
    redirected = False  # whether the next word is the file of a redirection
    position = 0
    while position < len(text):
        if match := _SPACE.match(text, position) or _COMMENT.match(text, position):
            position = match.end()
        elif match := _REDIRECTION.match(text, position):
            if match.group().endswith("<<"):
                raise CommandError(
                    "The command holds a here-document or here-string (<<), which is not supported because its lines "
                    "look like commands. Put the text into a file next to the script."
                )
            redirected = True
            position = match.end()
        elif match := _OPERATOR.match(text, position):
            if words:
                yield words
            words, redirected = [], False
            position = match.end()
        else:
            word = _word(text, position)
            position = word.end
            if not redirected:
                words.append(word)
            redirected = False
    if words:
        yield words


def _word(text: str, start: int) -> Word:
    content = ""
    position = start
    while position < len(text):
        if match := _PLAIN.match(text, position):
            expansion = match.group() == "$" and text.startswith(("${", "$("), position)
            end = _end_of_expansion(text, position) if expansion else match.end()
            content += text[position:end]
        elif text[position] == "\\":
            end = min(position + 2, len(text))
            content += text[position + 1 : end].replace("\n", "")
        elif text[position] == "'":
            end = _end_at(text, position, "'", 1)
            content += text[position + 1 : end - 1]
        elif text[position] == '"':
            end = _end_of_double_quotes(text, position)
            content += _ESCAPED.sub(r"\1", text[position + 1 : end - 1].replace("\\\n", ""))
        elif text[position] == "`":
            end = _end_at(text, position, "`", 1)
            content += text[position:end]
        else:
            break
        position = end
    return Word(content, start, position)


def _end_of_expansion(text: str, start: int) -> int:
    """Return the index after the ``${{...}}``, ``${...}`` or ``$(...)`` that begins at ``start``."""
    if text.startswith("${{", start):
        return _end_at(text, start, "}}", 3)
    if text.startswith("${", start):
        return _end_at(text, start, "}", 2)
    position, depth = start + 2, 1
    while depth:
        if position >= len(text):
            raise _not_closed(text, start, ")")
        character = text[position]
        if character == "'":
            position = _end_at(text, position, "'", 1)
        elif character == '"':
            position = _end_of_double_quotes(text, position)
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            position += 2 if character == "\\" else 1
    return position


def _end_of_double_quotes(text: str, start: int) -> int:
    position = start + 1
    while position < len(text):
        if text[position] == '"':
            return position + 1
        if text.startswith(("${", "$("), position):
            position = _end_of_expansion(text, position)
        else:
            position += 2 if text[position] == "\\" else 1
    raise _not_closed(text, start, '"')


def _end_at(text: str, start: int, closing: str, opening_length: int) -> int:
    end = text.find(closing, start + opening_length)
    if end < 0:
        raise _not_closed(text, start, closing)
    return end + len(closing)


def _not_closed(text: str, start: int, closing: str) -> CommandError:
    return CommandError(
        f"The command cannot be read: {text[start : start + 40]!r} is not closed by {closing!r}. Close it."
    )
