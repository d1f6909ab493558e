"""HTML and SVG elements whose text and attributes are always escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "element", "joined"]

_EMPTY = frozenset({"br", "circle", "col", "input", "line", "link", "meta", "path", "rect", "use"})
"""Elements without an end tag in HTML, and those of SVG that are written without content."""

_SVG = frozenset({"circle", "line", "path", "rect", "use"})
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already and is not escaped again.

    Whatever is made of it by the methods of a string is a plain string again, which is escaped.
    """

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        name: name of the element.
        *children: content; plain strings are escaped.
        **attributes: values by name, in which underscores stand for hyphens and one at the end is ignored; ``None`` and
            ``False`` leave an attribute out, and ``True`` has no value.
    """
    start = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY and not children:
        return Markup(f"<{start}/>" if name in _SVG else f"<{start}>")
    return Markup(f"<{start}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Return the parts one after the other; plain strings are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".")
    return f' {name}="{_escaped(str(value))}"'


def _escaped(text: str) -> str:
    """Return the text for any place in a page; characters that a page cannot have are replaced."""
    return escape(_UNPRINTABLE.sub("�", text))
