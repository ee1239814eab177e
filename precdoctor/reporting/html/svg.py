"""Builds SVG elements: all values are escaped, and no style attribute is used, which the page's policy forbids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

#: Width and height of stretched drawings, in their own units.
WIDE, HIGH = 1000, 100
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def el(name: str, *children: object, **attributes: object) -> Markup:
    """One element. In attribute names ``_`` becomes ``-``, a trailing ``_`` is dropped; None omits the attribute."""
    parts = [Markup("<") + name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _text(value)))
    if not children:
        return Markup("").join([*parts, Markup("/>")])
    inner = Markup("").join(escape(child) for child in children)
    return Markup("").join([*parts, Markup(">"), inner, Markup("</") + name, Markup(">")])


def join(parts: Iterable[Markup]) -> Markup:
    """The concatenation of elements."""
    return Markup("").join(parts)


def stretched(*children: object, view: tuple[float, float, float, float] = (0, 0, WIDE, HIGH)) -> Markup:
    """A drawing that is stretched to fill its container; the widths of lines do not change."""
    box = " ".join(_text(v) for v in view)
    return el("svg", *children, width="100%", height="100%", viewBox=box, preserveAspectRatio="none", class_="fill")


def bar(share: float, class_: str) -> Markup:
    """A bar that fills this share of its container."""
    return stretched(el("rect", width=WIDE * share, height=HIGH, class_=class_))


def line_path(points: Sequence[tuple[float, float] | None]) -> str:
    """Path data through the points; None breaks the line. A single point becomes a very short line."""
    out, pen = [], False
    for at, point in enumerate(points):
        if point is None:
            pen = False
            continue
        out.append(f"{'L' if pen else 'M'}{_short(point[0])} {_short(point[1])}")
        alone = not pen and (at + 1 == len(points) or points[at + 1] is None)
        if alone:
            out.append("h0.01")
        pen = True
    return "".join(out)


def dot_path(points: Sequence[tuple[float, float] | None]) -> str:
    """Path data of the points without a neighbour, for a wider pen, because a single point is hard to see."""
    padded = [None, *points, None]
    alone = (p for a, p, b in zip(padded, points, padded[2:], strict=False) if p is not None and a is None is b)
    return "".join(f"M{_short(x)} {_short(y)}h0.01" for x, y in alone)


def percentage(share: float) -> str:
    """A share of an axis as a percentage, for elements outside stretched drawings."""
    return f"{_short(100.0 * min(max(share, 0.0), 1.0))}%"


def power(exponent: int) -> str:
    """A power of two with a raised exponent: ``2⁻¹⁴``."""
    return "2" + str(exponent).translate(_RAISED)


def ticks(first: float, last: float) -> list[int]:
    """Round integers between two steps, for the labels of an axis; an end is included if it is round."""
    span = last - first
    if span <= 0:
        return [int(first)]
    rough = span / 5
    size = 10 ** math.floor(math.log10(max(rough, 1)))
    unit = next(int(size * m) for m in (1, 2, 5, 10) if size * m >= rough or m == 10)
    start = math.ceil(first / unit) * unit
    return list(range(int(start), int(last) + 1, max(1, unit)))


def axis(labels: Iterable[tuple[float, str]], y: str) -> Markup:
    """Text labels at shares of an axis; labels near an end are anchored so that they stay inside."""
    drawn = []
    for share, text in labels:
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        drawn.append(el("text", text, x=percentage(share), y=y, text_anchor=anchor))
    return join(drawn)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def _text(value: object) -> str:
    return _short(value) if isinstance(value, float) else str(value)
