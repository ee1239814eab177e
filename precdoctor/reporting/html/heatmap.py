"""Draws the charts of layer x step: share of subnormal elements, and headroom below the largest number of the dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Ints
from precdoctor.reporting.html import svg
from precdoctor.reporting.html.layers import LABEL, NARROW_LABEL, elided, in_order, kind_title, labels
from precdoctor.reporting.html.survey import SCALED_BITS, Survey, column_spans, headroom
from precdoctor.reporting.text import clean, number

#: Most rows of a chart; rows with the lowest levels are left out.
ROWS = 32
#: Lower bounds of the levels of a share, and upper bounds of the levels of a headroom in binades.
SHARE_LEVELS = (1e-6, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
ROOM_LEVELS = (12.0, 8.0, 4.0, 2.0, 1.0, 0.5)
#: Levels of a cell without a row, and of a cell whose only non-finite values are -Inf, as in a mask.
MISSING, MASK = -1, -2
#: Level of a cell with a NaN or Inf.
NOT_FINITE = 99


@dataclass(frozen=True)
class Row:
    """One tensor of a chart, and its row in the table; if ``full`` is empty, the heading of a kind of tensors.

    ``label`` and ``narrow`` are ``full``, shortened in the middle for wide and for narrow pages.
    """

    label: str
    narrow: str
    full: str
    kind: str
    dtype: str
    worst: str
    steps: str


@dataclass(frozen=True)
class Heatmap:
    """A chart of rows x columns; a cell of ``drawing`` is one unit wide and high. ``levels`` is the legend."""

    rows: list[Row]
    drawing: Markup
    axis: Markup
    note: str
    levels: list[tuple[str, str]]


def underflow(view: RunView, survey: Survey) -> Heatmap | None:
    """The chart of the share of non-zero elements that are subnormal in their dtype; None if there are none."""
    shares = survey.cells("subnormal")

    def level(tensor: int) -> Ints:
        values = shares[tensor]
        return np.where(np.isnan(values), MISSING, np.searchsorted(SHARE_LEVELS, np.nan_to_num(values), side="right"))

    def worst(tensor: int) -> tuple[float, str, int]:
        at = int(np.nanargmax(shares[tensor]))
        return float(shares[tensor][at]), percent(float(shares[tensor][at])), at

    names = ["above 0", "0.1 %", "1 %", "5 %", "10 %", "25 %", "50 %"]
    key = [(f"s{i + 1}", f"≥ {n}" if i else n) for i, n in enumerate(names)]
    return _heatmap(view, survey, level, worst, key, "s")


def saturation(view: RunView, survey: Survey) -> Heatmap | None:
    """The chart of the headroom below 12 binades, and of non-finite values; None if there is nothing to show."""
    rooms = [headroom(survey, t) for t in range(len(survey.tensors))]
    bad, masked = survey.cells("non_finite"), survey.cells("masked")
    wide = [(f := known_format(t.dtype)) is not None and f.bits > SCALED_BITS for t in survey.tensors]

    def level(tensor: int) -> Ints:
        room = rooms[tensor]
        out = np.where(np.isnan(bad[tensor]), MISSING, 0)
        if room is not None and wide[tensor]:
            filled = np.where(np.isnan(room), np.inf, room)
            out = np.maximum(out, len(ROOM_LEVELS) - np.searchsorted(ROOM_LEVELS[::-1], filled, side="right"))
        out = np.where((masked[tensor] > 0) & (out <= 0), MASK, out)
        return np.where(bad[tensor] > 0, NOT_FINITE, out)

    def worst(tensor: int) -> tuple[float, str, int]:
        if (bad[tensor] > 0).any():
            at = int(np.argmax(bad[tensor] > 0))
            return math.inf, "NaN or Inf", at
        room = rooms[tensor]
        assert room is not None
        at = int(np.nanargmin(room))
        return -float(room[at]), f"{number(round(float(room[at]), 1))} binades", at

    key = [(f"r{i + 1}", f"< {number(v)}") for i, v in enumerate(ROOM_LEVELS)]
    return _heatmap(view, survey, level, worst, [*key, ("rx", "NaN or Inf"), ("rm", "only −Inf: a mask")], "r")


def _heatmap(
    view: RunView,
    survey: Survey,
    level: Callable[[int], Ints],
    worst: Callable[[int], tuple[float, str, int]],
    key: list[tuple[str, str]],
    prefix: str,
) -> Heatmap | None:
    ordered = [t for t in in_order(view, survey) if known_format(survey.tensors[t].dtype) is not None]
    levels = {t: level(t) for t in ordered}
    notable = [t for t in ordered if (levels[t] > 0).any()]
    if not notable:
        return None
    kept = sorted(notable, key=lambda t: _interest(levels[t], worst(t)[0]))[:ROWS]
    shown = [t for t in notable if t in set(kept)]
    spans = column_spans(survey)
    fulls = labels(survey.tensors)
    wide, narrow = (elided((fulls[t] for t in shown), limit) for limit in (LABEL, NARROW_LABEL))
    rows: list[Row] = []
    lines: list[Ints | None] = []
    for t in shown:
        tensor, full = survey.tensors[t], fulls[t]
        kind = kind_title(tensor.kind)
        if not rows or rows[-1].kind != kind:
            rows.append(Row(kind, kind, "", kind, "", "", ""))
            lines.append(None)
        _, text, column = worst(t)
        a, b = spans[column]
        steps = number(a) if a == b else f"{number(a)}–{number(b)}"
        rows.append(Row(wide[full], narrow[full], full, kind, clean(tensor.dtype, 40), text, steps))
        lines.append(levels[t])
    drawing = _cells(lines, len(spans), prefix)
    quiet = len(ordered) - len(notable)
    note = f"{plural(len(shown), 'tensor')} of {number(len(ordered))}"
    if len(notable) > len(shown):
        note += f", the most telling of {number(len(notable))} with something to see"
    if quiet:
        note += f"; {number(quiet)} without are left out"
    per_column = max(b - a + 1 for a, b in spans)
    if len(spans) < survey.drawn_steps:
        note += f". A column is up to {number(per_column)} steps and shows the worst of them"
    elif len({b[0] - a[0] for a, b in itertools.pairwise(spans)}) > 1:
        note += ". A column is one recorded step; they are not evenly apart"
    return Heatmap(rows, drawing, _axis(spans), note + ".", key)


def _interest(levels: Ints, worst: float) -> tuple[float, ...]:
    """Sort key, smallest first: by the highest finite level, the earliest non-finite column, and the worst value.

    After a NaN nearly every tensor stays non-finite. The tensors that caused it have high finite levels before.
    """
    bad = np.flatnonzero(levels == NOT_FINITE)
    finite = int(np.where(levels == NOT_FINITE, 0, levels).max())
    return (-finite, float(bad[0]) if bad.size else float(len(levels)), -worst)


def _cells(rows: Sequence[Ints | None], width: int, prefix: str) -> Markup:
    """The cells as one SVG path per level, runs of equal cells as one rectangle. None in ``rows`` is a heading."""
    paths: dict[int, list[str]] = {}
    for y, cells in enumerate(rows):
        if cells is None:
            continue
        starts = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), width]
        for a, b in itertools.pairwise(starts):
            if cells[a] != MISSING:
                paths.setdefault(int(cells[a]), []).append(f"M{a} {y}.06h{b - a}v.88H{a}z")
    drawn = [
        svg.el("path", d="".join(d), class_=prefix + {MASK: "m", NOT_FINITE: "x"}.get(level, str(level)))
        for level, d in sorted(paths.items())
    ]
    return svg.stretched(*drawn, view=(0, 0, width, len(rows)))


def _axis(spans: Sequence[tuple[int, int]]) -> Markup:
    count = len(spans)
    every = math.ceil(count / 8)
    chosen = [*range(0, count - every // 2 - 1, every), count - 1]  # the last is always labelled: columns may be uneven
    return svg.axis((((at + 0.5) / count, number(spans[at][0])) for at in chosen), "14")
