"""Parts of charts as inline SVG: horizontal positions are percentages, vertical ones pixels, so that any width fits.

Text keeps its size at any width. Paths, which cannot have percentages, are in an image of their own that is stretched.

The text and the attributes of elements, also those of HTML, are always escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = [
    "PATTERNS",
    "Markup",
    "Scale",
    "element",
    "horizontal_grid",
    "joined",
    "percent",
    "picture",
    "stretched",
    "vertical_axis",
]

_EMPTY = frozenset({"br", "circle", "col", "input", "line", "link", "meta", "path", "rect", "use"})
"""Elements without an end tag in HTML, and those of SVG that are written without content."""

_SVG = frozenset({"circle", "line", "path", "rect", "use"})
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_WIDE = 1000
"""Width of stretched images in their own units."""


class Markup(str):
    """Text that is markup already and is not escaped again.

    Whatever is made of it by the methods of a string is a plain string again, which is escaped.
    """

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
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


@dataclass(frozen=True)
class Scale:
    """A linear scale.

    Args:
        low: value at ``start``.
        high: value at ``end``.
        start: position of ``low``.
        end: position of ``high``.
    """

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0

    def __call__(self, value: float) -> float:
        """Return the position of a value; those outside of the scale are at its ends."""
        # Halves, as the difference of two numbers may be too large for a number.
        span = self.high / 2 - self.low / 2
        share = (value / 2 - self.low / 2) / span if span > 0 else 0.0
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def percent(value: float) -> str:
    """Return a horizontal position."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"


def picture(name: str, height: float, title: str, description: str, *parts: str) -> Markup:
    """Return a chart that assistive technology takes for an image.

    Args:
        name: name that is unique in the page.
        height: height in pixels.
        description: what can be seen, in words.
        *parts: content.
    """
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *parts,
        class_="chart",
        width="100%",
        height=height,
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def stretched(
    height: float, shapes: Iterable[tuple[str, Sequence[tuple[float, float]]]], *, dense: bool = False
) -> Markup:
    """Return lines and areas.

    Args:
        height: height in pixels.
        shapes: class and points of each shape, in percent and pixels; areas have the class ``area`` or ``band``.
        dense: whether an area has no outline and is drawn darker.
    """
    return element(
        "svg",
        *(element("path", d=_path(points, closed=name in ("area", "band")), class_=name) for name, points in shapes),
        class_="dense" if dense else None,
        width="100%",
        height=height,
        viewBox=f"0 0 {_WIDE} {height:g}",
        preserveAspectRatio="none",
    )


def horizontal_grid(ticks: Iterable[tuple[float, str]]) -> Markup:
    """Return horizontal lines at these heights in pixels, with their texts on the left."""
    parts = []
    for y, text in ticks:
        parts.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(element("text", text, x="-8", y=y + 4, class_="tick end"))
    return joined(parts)


def vertical_axis(ticks: Sequence[tuple[float, str]], y: float, top: float = 0) -> Markup:
    """Return an axis with texts below it; each second text can be hidden where there is no room.

    Args:
        ticks: positions in percent, and texts.
        y: height of the axis in pixels.
        top: upper end of the grid lines in pixels.
    """
    parts = [element("line", x1="0", x2="100%", y1=y, y2=y, class_="axis")]
    for index, (x, text) in enumerate(ticks):
        parts.append(element("line", x1=percent(x), x2=percent(x), y1=top, y2=y + 4, class_="grid"))
        kind = "tick start" if x < 1 else "tick end" if x > 98 else "tick middle"  # noqa: PLR2004 - the edges
        parts.append(
            element("text", text, x=percent(x), y=y + 18, class_=f"{kind} minor" if index % 2 else kind),
        )
    return joined(parts)


def _path(points: Sequence[tuple[float, float]], *, closed: bool) -> str:
    if not points:
        return ""
    text = "L".join(f"{x * _WIDE / 100:.1f} {y:.1f}".replace(".0 ", " ").removesuffix(".0") for x, y in points)
    return f"M{text}Z" if closed else f"M{text}"


def _pattern(name: str, *shapes: str, rotated: int = 0, size: int = 6) -> Markup:
    return element(
        "pattern",
        element("rect", width=size, height=size, class_=f"base-{name}"),
        *shapes,
        id=f"p-{name}",
        width=size,
        height=size,
        patternUnits="userSpaceOnUse",
        patternTransform=f"rotate({rotated})" if rotated else None,
    )


def _stripe(name: str, width: float, height: float) -> Markup:
    return element("rect", width=width, height=height, class_=f"ink-{name}")


def _symbols() -> Iterable[Markup]:
    yield element("g", element("path", d="M0-4.5L4.5 0L0 4.5L-4.5 0Z"), id="m-checkpoint", class_="mark checkpoint")
    cross = "M-5-5L5 5M-5 5L5-5"
    for name in ("fault", "loss"):
        yield element(
            "g", element("path", d=cross, class_="halo"), element("path", d=cross), id=f"m-{name}", class_="mark cross"
        )
    yield element("g", element("path", d="M0-6L6 5H-6Z"), id="m-failure", class_="mark failure")
    yield element("g", element("path", d="M-5-5L5 0L-5 5Z"), id="m-added", class_="mark added")


PATTERNS = element(
    "svg",
    element(
        "defs",
        _pattern("starting", _stripe("starting", 2, 6), rotated=45),
        _pattern("waiting", _stripe("waiting", 6, 1.5), size=5),
        _pattern("saving", element("circle", cx=3, cy=3, r=1.3, class_="ink-saving")),
        _pattern("recovering", _stripe("recovering", 2, 6), rotated=-45),
        _pattern("lost-work", _stripe("lost-work", 2, 6), _stripe("lost-work", 6, 2), rotated=45),
        _pattern("unknown", _stripe("unknown", 2, 6), size=8),
        _pattern("idle", element("circle", cx=4, cy=4, r=0.9, class_="ink-idle"), size=8),
        *_symbols(),
    ),
    class_="definitions",
    width="0",
    height="0",
    aria_hidden="true",
    focusable="false",
)
"""Patterns of the activities and symbols of the marks, for all charts of a page."""
