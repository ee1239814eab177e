"""Draws loss, gradient norm, loss scale and learning rate over the steps; marks skipped and bad steps and findings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.run_facts import table_columns
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.arrays import Floats, Ints
from precdoctor.reporting.html import svg
from precdoctor.reporting.text import SERIES, number

#: A series of more than twice this many points is reduced to this many stretches, each drawn with its smallest and
#: largest value.
BUCKETS = 500
#: Series whose largest value is more than this factor above the smallest are drawn logarithmically.
_LOGARITHMIC = 30.0
#: Whether a series is drawn logarithmically; the others are if their range asks for it.
_LOG = {"loss_scale": True, "lr": False}


@dataclass(frozen=True)
class Panel:
    """The drawing of one series, on the common axis of steps."""

    title: str
    high: str
    low: str
    logarithmic: bool
    flat: bool
    drawing: Markup
    #: For each run its name, first, smallest and largest value, step of the largest, last value, number of non-finite.
    table: list[tuple[str, ...]]


@dataclass(frozen=True)
class Timeline:
    """The panels with their axis, event marks and legend; ``reduced`` is a note if points were left out."""

    panels: list[Panel]
    axis: Markup
    events: Markup | None
    legend: list[tuple[str, str]]
    reduced: str | None


@dataclass(frozen=True)
class Series:
    """The values of one column by step, the worst over ranks and optimizers; steps without a value are left out.

    A value that is NaN or infinite is Inf.
    """

    steps: Ints
    values: Floats


def series(view: RunView, column: str) -> Series:
    """A column of the table ``steps`` as a series."""
    columns = ["step", column]
    batches = [batch.select(columns) for own in view.step_batches.values() for batch in own]
    table = pa.Table.from_batches(batches, schema=table_columns("steps", columns))
    table = table.filter(pc.is_valid(table[column]))  # in Arrow, because pandas takes a missing value for NaN
    values = table[column].to_numpy().astype(np.float64)
    steps, where = np.unique(table["step"].to_numpy(), return_inverse=True)
    worst = np.full(len(steps), -math.inf)
    # A non-finite value becomes Inf, which wins every maximum; the drawing marks NaN and Inf alike.
    np.maximum.at(worst, where, np.where(np.isfinite(values), values, math.inf))
    return Series(steps, worst)


def reduce(steps: Ints, values: Floats, buckets: int = BUCKETS) -> list[int]:
    """Indices of the points to draw: all, or for each stretch its smallest, largest and first non-finite value."""
    if len(steps) <= 2 * buckets:
        return list(range(len(steps)))
    kept: list[int] = []
    edges = np.linspace(0, len(steps), buckets + 1).astype(int)
    for a, b in itertools.pairwise(edges):
        part = values[a:b]
        finite = np.flatnonzero(np.isfinite(part))
        chosen = set(np.flatnonzero(~np.isfinite(part))[:1].tolist())
        if finite.size:
            chosen |= {int(finite[np.argmin(part[finite])]), int(finite[np.argmax(part[finite])])}
        kept += [int(a) + i for i in sorted(chosen)]
    return kept


def timeline(views: Sequence[RunView], findings: Iterable[Finding]) -> Timeline:
    """The panels of all series with values; a second view is overlaid in another colour."""
    first = min(int(v.steps["step"].min()) for v in views)
    last = max(int(v.steps["step"].max()) for v in views)
    incidents = sorted({int(f.location.step) for f in findings if f.location.step is not None})
    across = _StepAxis(first, last)
    panels = []
    for column in SERIES:
        per_view = [series(v, column) for v in views]
        if any(len(s.steps) for s in per_view):
            panels.append(_panel(column, per_view, across, incidents))
    longest = max(int(v.steps["step"].nunique()) for v in views)
    reduced = None
    if longest > 2 * BUCKETS:
        reduced = (
            f"{number(longest)} steps are drawn as {number(BUCKETS)} stretches, each with its smallest and its largest "
            "value: every spike is there."
        )
    return Timeline(panels, _axis(across, incidents), _events(views[0], across, incidents), _legend(views[0]), reduced)


@dataclass(frozen=True)
class _StepAxis:
    first: int
    last: int

    def share(self, step: float) -> float:
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5


def _panel(column: str, found: Sequence[Series], across: _StepAxis, incidents: Sequence[int]) -> Panel:
    title, _, spell = SERIES[column]
    finite = np.concatenate([s.values[np.isfinite(s.values)] for s in found])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    log = low > 0.0 and _LOG.get(column, high / low > _LOGARITHMIC)

    def height(value: float) -> float:
        a, b, v = (math.log(x) if log else x for x in (low, high, value))
        return svg.HIGH * (0.5 if b == a else 1.0 - (0.06 + 0.88 * (v - a) / (b - a)))

    lines, marks, table = [], [], []
    for which, s in enumerate(found):
        if not len(s.steps):
            continue
        points: list[tuple[float, float] | None] = []
        for i in reduce(s.steps, s.values):
            value = float(s.values[i])
            if math.isfinite(value):
                points.append((svg.WIDE * across.share(int(s.steps[i])), height(value)))
            else:
                points.append(None)
                at = svg.percentage(across.share(int(s.steps[i])))
                marks.append(svg.el("text", "×", x=at, y="13", class_=f"cross run{which}"))
        drawn = [svg.el("path", d=svg.line_path(points), class_=f"line run{which}")]
        if alone := svg.dot_path(points):
            drawn.append(svg.el("path", d=alone, class_=f"line lone run{which}"))
        lines.append(svg.join(drawn))
        table.append(_row("AB"[which], s, spell))
    drawing = svg.join([svg.stretched(_incident_lines(across, incidents), *reversed(lines)), *marks[:400]])
    return Panel(title.capitalize(), spell(high), spell(low), log, low == high, drawing, table)


def _row(name: str, s: Series, spell: Callable[[float], str]) -> tuple[str, ...]:
    finite = s.values[np.isfinite(s.values)]
    ends = [spell(float(v)) if math.isfinite(v) else "not finite" for v in (s.values[0], s.values[-1])]
    low, high = (spell(float(v)) for v in (finite.min(), finite.max())) if finite.size else ("–", "–")
    at = number(int(s.steps[np.isfinite(s.values)][np.argmax(finite)])) if finite.size else "–"
    return (name, ends[0], low, high, at, ends[1], number(int(len(s.values) - finite.size)))


def _incident_lines(across: _StepAxis, incidents: Sequence[int]) -> Markup:
    lines = []
    for step in incidents[:50]:
        x = svg.WIDE * across.share(step)
        lines.append(svg.el("path", d=f"M{x:.2f} 0V{svg.HIGH}", class_="incident"))
    return svg.join(lines)


def _axis(across: _StepAxis, incidents: Sequence[int]) -> Markup:
    steps = svg.axis(((across.share(step), number(step)) for step in svg.ticks(across.first, across.last)), "14")
    places = (svg.percentage(across.share(step)) for step in incidents[:50])
    return svg.join([steps, *(svg.el("text", "▲", x=x, y="5", class_="flag") for x in places)])


def _events(view: RunView, across: _StepAxis, incidents: Sequence[int]) -> Markup | None:
    """Ticks for skipped and non-finite steps; ticks that would coincide are drawn once. None if there are none."""
    rows: list[Markup] = []
    for y, (column, cls) in enumerate((("skipped", "skip"), ("non_finite", "bad"))):
        places = sorted({round(svg.WIDE * across.share(s)) for s in _marked_steps(view, column)})
        rows.append(svg.join(svg.el("path", d=f"M{x} {50 * y + 6}v38", class_=f"tick {cls}") for x in places))
    if not any(rows):
        return None
    return svg.stretched(_incident_lines(across, incidents), *rows)


def _legend(view: RunView) -> list[tuple[str, str]]:
    """``(column, words)`` for each kind of tick: its meaning, and the number of steps."""
    out = []
    for column, name in (("skipped", "skipped by the loss scaler"), ("non_finite", "with a NaN or Inf")):
        if steps := _marked_steps(view, column):
            out.append((column, f"{plural(len(steps), 'step')} {name}"))
    return out


def _marked_steps(view: RunView, column: str) -> set[int]:
    """The steps with a count above 0 in ``column``."""
    return set(view.steps["step"][view.steps[column].astype("float64") > 0].tolist())
