"""Parser that splits a shell command into simple commands, with the position of each word.

It covers quotes, line continuations, comments, operators, redirections, substitutions, and the ``${{...}}`` expressions
of Azure ML, without expanding anything. :mod:`shlex` supports neither positions nor these expressions.

Variables of a worker become placeholders, such as ``%{worker:RANK}``, which no shell expands. The name in them is
chosen per command and given to the nodes, so that no other text is taken for a placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from azureml_elastic.errors import CommandError

_FIRST = "worker"

_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[|;&()\n]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<|>>|>\||[<>]&|<>|[<>])")
_SPACE = re.compile(r"(?:\\\r?\n|[^\S\n])+")
_COMMENT = re.compile(r"#[^\n]*")
_PLAIN = re.compile(r"[^\s\\'\"`$|&;()<>]+")
_ESCAPED = re.compile(r'\\([\\"$`])')
_OVERRIDE = re.compile(r"(?:\+{1,2}|~)[A-Za-z_]|[A-Za-z_]\w*(?:[./@]\w+)+=", re.ASCII)
"""An argument of Hydra, such as ``trainer.epochs=3`` and ``+seed=1``, which is no assignment of the shell."""

_OPENING = frozenset({"{", "case", "for", "if", "until", "while"})
_CLOSING = frozenset({"}", "done", "esac", "fi"})
_INSIDE = frozenset({"!", "do", "elif", "else", "if", "then", "until", "while", "{"})
"""Words of the shell after which a command begins."""

_PARAMETER = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])?", re.ASCII)


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
        name: name in the placeholders; ``None`` if there are none.
        environ: environment of the worker; as in a shell, a variable that it lacks is empty.
    """
    if name is None:
        return tuple(arguments)
    # "@" stands where the variable will be: re.escape leaves it as it is.
    pattern = re.compile(re.escape(placeholder(name, "@")).replace("@", "([A-Z_]+)"))
    return tuple(pattern.sub(lambda match: environ.get(match[1], ""), word) for word in arguments)


def replaced(text: str, parts: Iterable[tuple[int, int, str]]) -> str:
    """Return a text with other parts in the place of these ranges, which do not overlap."""
    for start, end, part in sorted(parts, reverse=True):
        text = text[:start] + part + text[end:]
    return text


class Word(NamedTuple):
    """A word or an operator of a command, and the range of its characters in the command."""

    text: str
    """Text without quotes, as a program would receive it before expansion."""
    start: int
    end: int
    expansions: tuple[tuple[int, int], ...] = ()
    """Ranges of what the shell replaces: ``$A``, ``${A}``, ``$(a)`` and the like, but not ``${{a}}``."""
    kind: Literal["word", "file", "operator"] = "word"
    """``file`` for that of a redirection."""


def simple_commands(text: str) -> Iterator[list[Word]]:
    """Yield the words of each command between the shell's operators, without redirections.

    Raises:
        CommandError: a quotation or expression is not closed, the text has a here-document, or a command begins with
            an argument of the one before.
    """
    words: list[Word] = []
    for token in (*_tokens(text), Word("", len(text), len(text), kind="operator")):
        if token.kind == "word":
            words.append(token)
        elif token.kind == "operator" and words:
            if token.text != ")":  # which ends a pattern of 'case'
                _refuse_argument(text, words[0])
            yield words
            words = []


def all_words(text: str) -> Iterator[Word]:
    """Yield the words of all commands, and the files of their redirections.

    Raises:
        CommandError: as for :func:`simple_commands`.
    """
    yield from (token for token in _tokens(text) if token.kind != "operator")


def runs_in_background(text: str, end: int) -> bool:
    """Return whether ``&`` follows the simple command that ends at ``end``, or a group or list that it is part of."""
    depth, skips = 0, False  # blocks opened since; whether the list of this block has ended
    begins = False  # whether a command begins here, where alone 'for' and 'done' are no arguments
    for token in _tokens(text):
        if token.start < end:
            continue
        operator = token.kind == "operator"
        if operator:
            opens, closes, begins = token.text == "(", token.text == ")", token.text != ")"
        else:
            opens, closes = begins and token.text in _OPENING, begins and token.text in _CLOSING
            begins = begins and token.text in _INSIDE
        if opens:
            depth += 1
        elif closes and depth:
            depth -= 1
        elif closes:
            skips = False  # what follows concerns the whole block
        elif not depth and not skips and operator:
            if token.text == "&":
                return True
            skips = token.text in (";", ";;", "\n")
    return False


def _refuse_argument(text: str, first: Word) -> None:
    """Check that the first word of a command is no option or override, as on a line without a backslash before it."""
    option = len(first.text) > 1 and first.text.startswith("-")
    if not option and not _OVERRIDE.match(first.text):
        return
    line = text.count("\n", 0, first.start) + 1
    raise CommandError(
        f"Line {line} of the command begins with {text[first.start : first.end]!r}, which the shell would take for a "
        "command of its own, and start the program without it. End each line that goes on with a backslash and no "
        "space behind it, or write the command in one line (in YAML, 'command: >-' in place of '|')."
    )


def _tokens(text: str) -> Iterator[Word]:
    redirected = False
    position = 0
    while position < len(text):
        # A '#' begins a comment only here, where a word would begin: inside of one it is a character like others.
        if match := _SPACE.match(text, position) or _COMMENT.match(text, position):
            position = match.end()
        # Before the operators and words, as '&>' begins with one and '2>' with what may be the other.
        elif match := _REDIRECTION.match(text, position):
            if match.group().endswith("<<"):
                raise CommandError(
                    "The command holds a here-document or here-string (<<), which is not supported because its lines "
                    "look like commands. Put the text into a file next to the script."
                )
            redirected = True
            position = match.end()
        elif match := _OPERATOR.match(text, position):
            yield Word(match.group(), position, match.end(), kind="operator")
            redirected = False
            position = match.end()
        else:
            word = _word(text, position)
            yield word._replace(kind="file") if redirected else word
            redirected = False
            position = word.end


def _word(text: str, start: int) -> Word:
    content = ""
    expansions: list[tuple[int, int]] = []
    position = start
    while position < len(text):
        if match := _PLAIN.match(text, position):
            end = match.end()
            content += match.group()
        elif text[position] == "\\":
            end = min(position + 2, len(text))
            content += text[position + 1 : end].replace("\n", "")
        elif text[position] == "'":
            end = _end_at(text, position, "'", 1)
            content += text[position + 1 : end - 1]
        elif text[position] == '"':
            end, inner = _double_quotes(text, position)
            expansions += inner
            content += _ESCAPED.sub(r"\1", text[position + 1 : end - 1].replace("\\\n", ""))
        elif text[position] in "$`":
            end, inner = _expansion(text, position)
            expansions += inner
            content += text[position:end]
        else:
            break
        position = end
    return Word(content, start, position, tuple(expansions))


def _expansion(text: str, start: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the index after what begins at ``start``, and its range if the shell replaces it."""
    end = _end_of_expansion(text, start)
    return end, [] if end - start == 1 or text.startswith("${{", start) else [(start, end)]


def _end_of_expansion(text: str, start: int) -> int:
    """Return the index after the ``${{...}}``, ``${...}``, ``$(...)``, ``$A`` or backquotes that begin at ``start``."""
    if text[start] == "`":
        return _end_at(text, start, "`", 1)
    if text.startswith("${{", start):
        return _end_at(text, start, "}}", 3)
    braces = text.startswith("${", start)
    if not braces and not text.startswith("$(", start):
        match = _PARAMETER.match(text, start)
        assert match is not None
        return match.end()
    opening, closing = ("", "}") if braces else ("(", ")")
    position, depth = start + 2, 1
    while depth:
        if position >= len(text):
            raise _not_closed(text, start, closing)
        character = text[position]
        if character == "'" and not braces:
            position = _end_at(text, position, "'", 1)
        elif character == '"':
            position, _ = _double_quotes(text, position)
        elif text.startswith("${", position):
            position = _end_of_expansion(text, position)
        else:
            depth += (character == opening) - (character == closing)
            position += 2 if character == "\\" else 1
    return position


def _double_quotes(text: str, start: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the index after the closing quote, and the ranges of the expansions before it."""
    expansions: list[tuple[int, int]] = []
    position = start + 1
    while position < len(text):
        if text[position] == '"':
            return position + 1, expansions
        if text[position] in "$`":
            position, inner = _expansion(text, position)
            expansions += inner
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
