"""Prepares the charts of lost updates and of headroom trends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.reporting.finding_view import KINDS
from precdoctor.reporting.html import svg
from precdoctor.reporting.html.layers import LABEL, elided, in_order, labels
from precdoctor.reporting.html.survey import SCALED_BITS, Survey, headroom
from precdoctor.reporting.text import clean, number

#: Most rows of a chart.
ROWS = 24
#: Range of exponent(dw) - exponent(w) that is drawn.
REL_LOW, REL_HIGH = -40, 4
#: Most headroom of a tensor in the chart, in binades; fewest points of a trend; share of pairs that must agree on its
#: sign.
_NEAR, _POINTS, _AGREEING = 16.0, 6, 0.8


def updates(view: RunView, survey: Survey) -> dict[str, Any] | None:
    """The chart of the parameters that lose the largest share of their updates; None if no update was recorded.

    ``rows``, in order of depth, with the lost share and a histogram of exponent(dw) - exponent(w); the ``axis`` of the
    histograms; a ``note``.
    """
    names = labels(survey.tensors)
    recorded = []
    for t in in_order(view, survey, ("update",)):
        lost, intended, relative = survey.updates(t)
        if intended > 0 or relative.total:
            recorded.append((t, lost, intended, relative))
    if not recorded:
        return None
    most = ROWS if any(lost for _, lost, _, _ in recorded) else ROWS // 2
    kept = {f[0] for f in sorted(recorded, key=lambda f: -(f[1] / max(f[2], 1)))[:most]}
    short = elided((names[t] for t in kept), LABEL)
    rows = []
    for t, lost, intended, relative in recorded:
        if t in kept:
            full, share = names[t], lost / intended if intended else 0.0
            dtype = survey.tensors[t].dtype
            rows.append(
                {
                    "label": short[full], "full": full, "dtype": clean(dtype, 40), "share": percent(share),
                    "lost": number(lost), "intended": number(intended), "drawing": _relative(relative, dtype),
                    "bar": svg.bar(share, "lostbar"),
                }
            )  # fmt: skip
    note = f"{number(len(rows))} of {number(len(recorded))} parameters" + (
        ", those that lose most" if len(recorded) > len(rows) else ""
    )
    return {"rows": rows, "axis": _relative_axis(), "note": note + ", over all recorded steps."}


def _relative(histogram: ExponentHistogram, dtype: str) -> Markup:
    """A histogram with logarithmic heights; a line marks the limit below which updates of this dtype are lost."""
    top = math.log2(1 + int(histogram.counts.max())) if histogram.total else 1.0
    bars: dict[int, float] = {}
    for i, count in enumerate(histogram.counts.tolist()):
        k = min(max(histogram.lo + i, REL_LOW), REL_HIGH)
        if count > 0:
            bars[k] = max(bars.get(k, 0.0), math.log2(1 + count) / top)
    fmt = known_format(dtype)
    limit = -(fmt.mantissa_bits + 2) if fmt is not None else None
    drawn = [
        svg.el(
            "path", d=f"M{k + 0.08:.2f} 10v{-9 * h:.2f}h.84v{9 * h:.2f}z",
            class_="rel below" if limit is not None and k <= limit else "rel",
        )
        for k, h in sorted(bars.items())
    ]  # fmt: skip
    if limit is not None and limit >= REL_LOW:
        drawn.append(svg.el("path", d=f"M{limit + 1} 0v10", class_="limit"))
    return svg.stretched(*drawn, view=(REL_LOW, 0, REL_HIGH - REL_LOW + 1, 10))


def _relative_axis() -> Markup:
    labels = []
    for k in range(REL_LOW + 8, REL_HIGH, 16):
        share = (k - REL_LOW) / (REL_HIGH - REL_LOW + 1)
        labels.append(
            svg.el("text", svg.power(k), x=svg.percentage(share), y="12", text_anchor="middle" if share else "start")
        )
    return svg.join(labels)


def forecasts(view: RunView, survey: Survey) -> list[dict[str, Any]]:
    """The tensors with at most 16 binades of headroom, by the step at which their trend reaches 0; at most 12.

    Each with its headroom now, the rate of change, when it reaches 0 in words, and whether that is urgent.
    """
    ranked = []
    names = labels(survey.tensors)
    for t in in_order(view, survey):
        tensor, room = survey.tensors[t], headroom(survey, t)
        fmt = known_format(tensor.dtype)
        if room is None or fmt is None or fmt.bits <= SCALED_BITS or np.isnan(room).all() or np.nanmin(room) > _NEAR:
            continue
        recorded = np.flatnonzero(~np.isnan(room))
        steps = survey.edges[recorded].astype(float)
        slope = _trend(steps, room[recorded])
        now, last = float(room[recorded[-1]]), float(survey.last_step)
        reaches = last + now / -slope if slope is not None and slope < 0.0 else math.inf
        span = max(1.0, last - float(survey.edges[0]))
        near = reaches <= last + span
        rate = "no steady trend" if slope is None else f"{number(round(100 * slope, 2))} binades per 100 steps"
        bad = np.flatnonzero(survey.cells("non_finite")[t] > 0)
        if bad.size:
            outlook, near = f"NaN or Inf at step {number(int(survey.edges[bad[0]]))}", True
        elif near:
            outlook = f"about step {number(round(reaches))}"
        elif slope is not None and slope < 0.0:
            outlook = f"not within the next {number(int(span))} steps"
        else:
            outlook = "no steady trend" if slope is None else "not heading there"
        drawing = _headroom_drawing(survey, room, slope if near and not bad.size else None)
        kind = KINDS.get(tensor.kind, clean(tensor.kind, 40))
        shown: dict[str, Any] = {
            "full": names[t], "kind": kind, "dtype": clean(tensor.dtype, 40), "now": f"{number(round(now, 1))} binades",
            "rate": rate, "reaches": outlook, "urgent": near, "drawing": drawing,
        }  # fmt: skip
        ranked.append((reaches, float(np.nanmin(room)), shown))
    ranked.sort(key=lambda f: (f[0], f[1]))
    rows = [shown for _, _, shown in ranked[: ROWS // 2]]
    short = elided((row["full"] for row in rows), LABEL)
    return [{**row, "label": short[row["full"]]} for row in rows]


def _trend(steps: Floats, room: Floats) -> float | None:
    """Median slope between all pairs of the last half (Theil-Sen), in binades per step.

    None with fewer than ``_POINTS`` points, or if the signs of the slopes disagree.
    """
    half = max(_POINTS, len(steps) // 2)
    x, y = steps[-half:], room[-half:]
    if len(x) < _POINTS:
        return None
    slopes = np.array([(y[j] - y[i]) / (x[j] - x[i]) for i, j in itertools.combinations(range(len(x)), 2)])
    slope = float(np.median(slopes))
    return slope if (np.sign(slopes) == np.sign(slope)).mean() >= _AGREEING else None


def _headroom_drawing(survey: Survey, room: Floats, slope: float | None) -> Markup:
    """A line of the headroom, 0 (bottom) to 16 binades, over the run in the left half; in the right half its trend."""
    first, last = float(survey.edges[0]), float(survey.last_step)
    span = max(1.0, last - first)

    def point(step: float, binades: float) -> tuple[float, float]:
        return svg.WIDE * (step - first) / (2 * span), svg.HIGH * (1 - min(max(binades, 0.0), _NEAR) / _NEAR)

    points: Sequence[tuple[float, float] | None] = [
        None if np.isnan(r) else point(float(s), float(r)) for s, r in zip(survey.edges, room, strict=True)
    ]
    drawn = [
        svg.el("path", d=f"M{svg.WIDE / 2:.0f} 0v{svg.HIGH}", class_="now"),
        svg.el("path", d=f"M0 {svg.HIGH}h{svg.WIDE}", class_="floor"),
        svg.el("path", d=svg.line_path(points), class_="line run0"),
    ]
    known = [p for p in points if p is not None]
    if slope is not None and known:
        now = float(room[~np.isnan(room)][-1])
        end = last + now / -slope
        drawn.append(svg.el("path", d=svg.line_path([known[-1], point(end, 0.0)]), class_="line run0 ahead"))
    return svg.stretched(*drawn)
