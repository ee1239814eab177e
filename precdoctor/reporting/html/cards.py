"""Prepares the findings for the page, each with drawings of its evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, TensorRow, known_format, path_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, bin_of
from precdoctor.reporting.finding_view import KINDS, predicted_effect, stated_facts
from precdoctor.reporting.html import svg
from precdoctor.reporting.text import clean, clean_block, number

#: Most tensors after the origin on a path; of more, the middle is left out.
_AFTER = 6
#: With this headroom, in binades, or more the meter is empty.
_METER = 16.0
#: Below this headroom, in binades, a tensor is marked as near its limit.
_NEAR = 2.0


@dataclass(frozen=True)
class Strip:
    """A drawing with axis and caption, and its data as rows of a table."""

    drawing: Markup
    axis: Markup
    caption: str
    rows: list[tuple[str, str]]


def card(view: RunView, finding: Finding) -> dict[str, Any]:
    """The texts and drawings of one finding, by their names in the template."""
    evidence = finding.evidence
    return {
        "code": clean(finding.code, 40),
        "severity": finding.severity.value,
        "title": _sentence(clean(finding.title)),
        "message": clean_block(finding.message),
        "facts": [*stated_facts(finding), *([("resume", clean(words), "")] if (words := finding.resume_words) else [])],
        "strip": _strip(evidence.get("range")),
        "history": _history(finding),
        "path": _path(view, finding),
        "shares": _shares(evidence.get("tensors")),
        "consequences": [
            clean(f"{c.get('code', '')} {c.get('name', '')}: {c.get('message', '')}", 300)
            for c in _items(evidence.get("consequences"))
        ],
        "remedies": [
            {
                "title": _sentence(clean(p.title)),
                "predicted": predicted_effect(p.predicted),
                "snippet": clean_block(p.snippet.strip("\n")),
            }
            for p in finding.prescriptions
        ],
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, (list, tuple)) else []


def _shares(tensors: Any) -> list[tuple[str, str, Markup]]:
    """``(place, share in percent, bar)`` of the tensors in a finding's evidence; those without a share are left out."""
    rows = []
    for entry in _items(tensors)[:16]:
        name = next((k for k in ("flushed_share", "lost_share", "saturated_share") if k in entry), None)
        share = entry.get(name) if name else None
        if not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            continue
        where = entry.get("parameter") or entry.get("module") or entry.get("root") or ""
        rows.append((clean(where, 200), percent(float(share)), svg.bar(float(share), "sharebar")))
    return rows


# -- the exponents of the finding's tensor ----------------------------------------------------------------------------


def _strip(evidence: Any) -> Strip | None:
    """The exponent histogram of the finding's tensor on the range of its format; None if the evidence has none."""
    if not isinstance(evidence, Mapping):
        return None
    fmt = known_format(str(evidence.get("dtype")))
    counts = evidence.get("exp_hist")
    if fmt is None or not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
        return None
    histogram = ExponentHistogram.of(evidence.get("exp_lo"), counts).trimmed()
    if not histogram.total:
        return None
    smallest, largest = max(bin_of(fmt.min_subnormal), EXP_MIN), min(bin_of(fmt.max), EXP_MAX)
    last = histogram.lo + histogram.counts.size - 1
    wide = largest - smallest > 80  # the range of FP32 or BF16 is too wide to draw: show the surroundings of the values
    low = min(histogram.lo, smallest) - 2 if not wide else histogram.lo - 6
    high = max(last, largest) + 3 if not wide else last + 7
    top = math.log2(1 + int(histogram.counts.max()))
    bars = [
        svg.el("path", d=f"M{k + 0.06:.2f} 40v{-36 * math.log2(1 + c) / top:.2f}h.88V40z", class_="bar run0")
        for k, c in zip(range(histogram.lo, last + 1), histogram.counts.tolist(), strict=True)
        if c > 0
    ]
    drawing = svg.stretched(*_bands(fmt, low, high), *bars, view=(low, 0, high - low, 40))
    amax = evidence.get("amax")
    caption = f"{fmt.name}: grey is outside its range, tinted are its subnormal numbers"
    if isinstance(amax, (int, float)) and 0.0 < amax < math.inf:
        room = number(round(fmt.headroom(float(amax)), 1))
        caption += f"; amax {number(float(amax))}, {room} binades of headroom"
    rows = [
        (f"{svg.power(k)} to {svg.power(k + 1)}", number(int(c)))
        for k, c in enumerate(histogram.counts.tolist(), histogram.lo)
    ]
    every = next((n for n in (1, 2, 4, 8, 16, 32) if (high - low) / n <= 8), 64)
    marks = range(math.ceil(low / every) * every, math.floor(high) + 1, every)
    axis = svg.axis((((k - low) / (high - low), svg.power(k)) for k in marks), "13")
    if evidence.get("tensor"):
        caption = f"Drawn is the {clean(evidence['tensor'], 160)}. {caption}"
    return Strip(drawing, axis, caption + ".", rows)


def _bands(fmt: Format, low: float, high: float) -> list[Markup]:
    """Rectangles for the ranges outside a format and for its subnormal range; the x axis is the binary exponent."""
    flush, normal = math.log2(fmt.flush_limit), math.log2(fmt.min_normal)
    end = math.log2(fmt.max)
    spans = ((low, flush, "outside"), (flush, normal, "subband"), (end, high, "outside"))
    return [
        svg.el("rect", x=max(a, low), width=min(b, high) - max(a, low), height=40, class_=name)
        for a, b, name in spans
        if min(b, high) > max(a, low)
    ]


def _history(finding: Finding) -> Strip | None:
    """The amax of the healthy steps before the finding, as a line; None with fewer than three, or an unknown format."""
    points_before = [
        (int(h["step"]), float(h["amax"]))
        for h in _items(finding.evidence.get("history"))
        if isinstance(h.get("step"), int) and isinstance(h.get("amax"), (int, float)) and h["amax"] > 0
    ]
    evidence = finding.evidence.get("range")
    fmt = known_format(str(evidence.get("dtype"))) if isinstance(evidence, Mapping) else None
    if len(points_before) < 3 or fmt is None:
        return None
    ends = [math.log2(a) for _, a in points_before]
    end = math.log2(fmt.max)
    low, high = min(ends), max(*ends, end) if end - max(ends) < 24 else max(ends) + 1
    span, steps = max(high - low, 1.0), max(points_before[-1][0] - points_before[0][0], 1)
    points = [
        (svg.WIDE * (s - points_before[0][0]) / steps, 92 - 84 * (math.log2(a) - low) / span) for s, a in points_before
    ]  # fmt: skip
    drawn = [svg.el("path", d=svg.line_path(points), class_="line run0")]
    if high >= end:
        drawn.append(svg.el("path", d=f"M0 {92 - 84 * (end - low) / span:.1f}h{svg.WIDE}", class_="limit"))
    span_text = f"{number(points_before[0][1])} to {number(points_before[-1][1])}"
    caption = f"amax at the healthy steps before: {span_text}; the line is the end of {fmt.name}."
    rows = [(f"step {s}", number(a)) for s, a in points_before]
    first, last = points_before[0][0], points_before[-1][0]
    axis = svg.axis((((s - first) / steps, number(s)) for s in svg.ticks(first, last)), "13")
    return Strip(svg.stretched(*drawn), axis, caption, rows)


# -- the way to the loss ----------------------------------------------------------------------------------------------


def _path(view: RunView, finding: Finding) -> list[dict[str, Any]]:
    """The tensors on the path to the finding's tensor, then the non-finite tensors after it, up to the loss."""
    entries = _items(finding.evidence.get("path"))
    if not entries:
        return []
    source = finding.location.source
    line = "" if source is None else clean(f"{source.place} {(source.code or '').strip()}", 200)
    nodes = [*(_node(e, "") for e in entries[:-1]), _node(entries[-1], "origin", line)]
    rows = [] if finding.location.kind not in (*FORWARD_KINDS, None) else _downstream(view, finding, entries[-1])
    after = [_node(path_evidence([row])[0], "after") for row in rows]
    if len(after) > _AFTER:
        left_out = f"{number(len(after) - _AFTER)} more tensors"
        names = ("kind", "dtype", "amax", "headroom", "count", "source")
        after[_AFTER - 2 : -2] = [{"label": left_out, "meter": None, "state": "gap", **dict.fromkeys(names, "")}]
    return nodes + after


def _downstream(view: RunView, finding: Finding, origin: Mapping[str, Any]) -> list[TensorRow]:
    """The non-finite tensors of the forward pass after the origin, except masks; the loss is last."""
    order, step, at = origin.get("order"), finding.location.step, finding.location
    if not isinstance(order, int) or step is None:
        return []
    process = next(
        (p for p in view.processes if p.rank == at.rank and at.attempt in (None, p.attempt) and view.rows(p, step)),
        None,
    )
    if process is None:
        return []
    rows = [r for r in view.rows(process, step) if r.kind in (*FORWARD_KINDS, "loss") and r.bad and not r.mask_like]
    return [r for r in rows if r.order is not None and r.order > order]


def _node(entry: Mapping[str, Any], state: str, source: str = "") -> dict[str, Any]:
    nan, inf = (entry.get(k) if isinstance(entry.get(k), int) else 0 for k in ("nan", "inf"))
    room, amax = entry.get("headroom_binades"), entry.get("amax")
    room = float(room) if isinstance(room, (int, float)) else None
    bad = bool(nan or inf)
    if not state:
        state = "bad" if bad else "near" if room is not None and room < _NEAR else "ok"
    count = " and ".join(f"{number(n)} {w}" for n, w in ((nan, "NaN"), (inf, "Inf")) if n)
    kind, name = str(entry.get("kind") or ""), str(entry.get("name") or "")
    return {
        "label": clean(entry.get("module") or ("loss" if kind == "loss" else "(model)"), 200),
        "kind": clean(f"{KINDS.get(kind, kind)} {name}".strip(), 120) if kind != "loss" else "",
        "dtype": clean(entry.get("dtype") or "", 40),
        "amax": number(float(amax)) if isinstance(amax, (int, float)) else "–",
        "headroom": "" if room is None else f"{number(round(room, 1))} binades",
        "meter": _meter(room),
        "count": count,
        "state": state,
        "source": source,
    }


def _meter(room: float | None) -> Markup | None:
    """A bar for a headroom in binades, full at 0; None for None."""
    if room is None:
        return None
    full = 1.0 - min(max(room, 0.0), _METER) / _METER
    return svg.bar(full, "meter bad" if room < _NEAR else "meter")
