"""Check the project's wording: no retired words, and descriptions of arguments that are noun phrases.

``python tools/vocabulary.py [paths]`` prints ``file:line: word`` for each finding and exits with 1 if there is one.
Without paths it checks the whole project.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("src", "tests", "samples", "benchmarks", "docs", "README.md", "CHANGELOG.md")
EXEMPT = ("tools/vocabulary.py", "tests/unit/tools/test_vocabulary.py")  # they spell the words out

RETIRED = (
    "crews?",
    "desks?",
    "fruitless(ly)?",
    "hears?",
    "heard",
    "inquir(y|ies)",
    "keepers?",
    "lanes?",
    "last[- ]words?",
    "lobb(y|ies)",
    "owe[ds]?",
    "patience",
    "patient(ly)?",
    "receptions?",
    "rescue[drs]?",
    "rescuing",
    "seat(s|ed|ing)?",
    "shelf",
    "shelves",
    "shield(s|ed|ing)?",
    "somebody('s)?",
    "stand-ins?",
    "stranded",
    "supervision",
    "supervisors?",
    "told",
    "(?<!c-)void(s|ed)?",  # not ctypes.c_void_p
    "warm[- ](process(es)?|workers?)",
    "who(m|so)?ever('s)?",
    "witness(es|ed|ing)?",
)
RETIRED_NAMES = ("keeping",)  # plain English as a verb
FOREIGN = {"patience": ("ReduceLROnPlateau", "EarlyStopping")}
"""Retired words that are another library's names, and the classes on whose lines they are allowed."""

_WORDS = re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
_NAMES = re.compile(rf"\b({'|'.join(RETIRED + RETIRED_NAMES)})\b", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

_PREPOSITIONS = (
    "about|after|against|as|at|before|between|by|during|for|from|in|into|of|on|onto|over|per|since|through|to|towards|"
    "under|until|via|with|within|without"
)
_AUXILIARIES = "are|can|could|did|do|does|had|has|have|is|may|might|must|shall|should|was|were|will|would"
_ADVERBS = "again|also|each|every|if|instead|never|once|only|when|where|while|whenever"
_PARTICIPLES = r"\w+ed|done|given|held|kept|known|made|put|read|run|said|seen|sent|set|taken|used|written"
_FRAGMENT = re.compile(
    rf"(?:{_PREPOSITIONS}|{_AUXILIARIES})\b(?!-)|(?:{_PARTICIPLES}) (?:{_PREPOSITIONS}|{_ADVERBS})\b(?!-)",
)
_ARGUMENT = re.compile(r"    (\*{0,2}\w+)(?: \([^)]*\))?: +(.*)")


def retired(text: str, *, name: bool = False) -> list[str]:
    """Return the retired words in a text or identifier, in lower case."""
    words = _HUMP.sub("-", text).replace("_", "-")
    return [match[0].lower() for match in (_NAMES if name else _WORDS).finditer(words)]


def fragments(docstring: str) -> list[tuple[int, str]]:
    """Return the arguments whose description is no noun phrase.

    Args:
        docstring: cleaned docstring in Google's style

    Returns:
        Line offset in the docstring, and the argument with its description
    """
    found = []
    inside = False
    for offset, line in enumerate(docstring.splitlines()):
        if line and not line.startswith(" "):
            inside = line == "Args:"
        elif inside and (match := _ARGUMENT.match(line)) and _FRAGMENT.match(match[2]):
            found.append((offset, f"{match[1]}: {match[2]}"))
    return found


def check_python(source: str) -> list[tuple[int, str]]:
    """Return the line numbers and findings in a Python source text."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            words = retired(token.string, name=True)
            found += [
                (token.start[0], word)
                for word in words
                if not any(each in token.line for each in FOREIGN.get(word, ()))
            ]
        elif token.type in _TEXTS:
            for offset, line in enumerate(token.string.split("\n")):
                found += [(token.start[0] + offset, word) for word in retired(line)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            found += [(first.lineno + line, text) for line, text in fragments(ast.get_docstring(node) or "")]
    return sorted(found)


def check_text(text: str) -> list[tuple[int, str]]:
    """Return the line numbers and findings in a text that is not Python."""
    return [(number, word) for number, line in enumerate(text.splitlines(), 1) for word in retired(line)]


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.suffix in {".py", ".md"})


def main(arguments: list[str]) -> int:
    """Check the given paths, or the whole project.

    Returns:
        Exit code: 1 if there is a finding
    """
    paths = [Path(argument).resolve() for argument in arguments] or [ROOT / path for path in CHECKED]
    count = 0
    for path in _files(paths):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        if shown.as_posix() in EXEMPT:
            continue
        text = path.read_text(encoding="utf-8")
        findings = [(1, f"{word} (file name)") for part in shown.parts for word in retired(part, name=True)]
        findings += check_python(text) if path.suffix == ".py" else check_text(text)
        for line, finding in findings:
            print(f"{shown}:{line}: {finding}")
        count += len(findings)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
