"""Extension of griffe and hook of mkdocs: what docstrings have of Sphinx's markup becomes Markdown in the reference."""

from __future__ import annotations

import html
import logging
import re
from typing import Any

import griffe

_LOG = logging.getLogger("mkdocs.hooks.reference_pages")  # a warning there fails a strict build

_ROLE = re.compile(r":(\w+):`(~?)([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"(?:(?<=\S)(:):|^::\n)$", re.MULTILINE)
_MOST_COLUMNS = 100


class Markdown(griffe.Extension):
    """Rewrites the docstrings that the reference shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL_BLOCK.sub(r"\1", _ROLE.sub(_code, obj.docstring.value))


def _code(role: re.Match[str]) -> str:
    kind, short, name = role.groups()
    return f"`{name.rpartition('.')[2] if short else name}{'()' if kind in ('func', 'meth') else ''}`"


def on_page_content(text: str, *, page: Any, **_: Any) -> None:
    """Warn of markup of Sphinx that a page still has, and of code that is too wide for it."""
    found = re.findall(r":\w+:(?:<code>|`)[^<`]*|<p>[^<]*::\s*</p>", text)
    for block in re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL):
        lines = html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()
        found += [line for line in lines if len(line) > _MOST_COLUMNS]
    for each in found:
        _LOG.warning("%s: markup of Sphinx, or code of more than %d columns: %s", page.file, _MOST_COLUMNS, each)
