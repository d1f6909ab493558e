"""The pages of the stacks quote messages that are in the source: by their fixed words, with … for the others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import azureml_elastic
from tests.support.paths import ROOT

PAGES = ROOT / "docs" / "how-to" / "stacks"
SOURCE = Path(azureml_elastic.__file__).parent
QUOTED = re.compile(r"`([^`]+)`|\*([^*]+)\*")
"""Code and emphasised words; those with a space are messages."""


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module, with a gap for each value that is put into them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "\0" for each in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdgr]", "\0", node.value)


@functools.cache
def sentences() -> str:
    """Return the texts of the modules that speak of a training."""
    folders = (SOURCE / name for name in ("train", "node", "checkpoint", "local"))
    return "\n".join(text for folder in folders for path in sorted(folder.rglob("*.py")) for text in texts(path))


def messages(page: Path) -> Iterator[str]:
    """Yield what the tables of a page quote in the columns of messages."""
    columns: list[int] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            columns = []
        elif not columns:
            columns = [at for at, cell in enumerate(cells) if re.search("message|what is said", cell)]
        found = (code or words for at in columns for code, words in QUOTED.findall(cells[at]))
        yield from (message for message in found if " " in message)


def fixed_words(message: str) -> Iterator[str]:
    """Yield the parts of a message between the words that differ, and where a reason may follow."""
    for part in re.split(r"…|: ", message):
        words = part.strip(" .:,")
        if words:
            yield words


@pytest.mark.parametrize(
    ("page", "least"), [("accelerate", 10), ("transformers", 9), ("lightning", 9), ("deepspeed", 8), ("index", 4)]
)
def test_every_message_that_a_page_quotes_is_one_of_the_source(page, least):
    quoted = list(messages(PAGES / f"{page}.md"))
    assert len(quoted) >= least
    unknown = {(message, words) for message in quoted for words in fixed_words(message) if words not in sentences()}
    assert not unknown
