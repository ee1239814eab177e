"""Measures and reductions of rows, each against a slow reference."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.survey.frames import groups, largest, sums, worst_rows
from precdoctor.diagnosis.survey.measures import MEASURES
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.histogram import ExponentHistogram, Histograms
from tests.support.training import Training

counts = st.integers(0, 1 << 40)
numbers = st.none() | st.floats(width=64)
sizes = st.none() | st.floats(0.0, 1e300)


def measured(name: str, rows: list[dict[str, object]]) -> list[float]:
    measure = MEASURES[name]
    frame = pd.DataFrame([{c: row[c] for c in measure.columns} for row in rows], columns=list(measure.columns))
    return measure.of(frame.astype({c: "Float64" for c in measure.columns if frame[c].isna().any()})).tolist()


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(("numel", "nan", "pos_inf", "neg_inf"), counts)), min_size=1))
def test_finite_elements(rows):
    expected = [r["numel"] - r["nan"] - r["pos_inf"] - r["neg_inf"] for r in rows]
    assert measured("finite", rows) == pytest.approx(expected)


@given(st.lists(numbers, min_size=1))
def test_a_scale_of_no_use_is_one(scales):
    expected = [s if s is not None and 0.0 < s < math.inf else 1.0 for s in scales]
    assert measured("multiplier", [{"scale": s} for s in scales]) == expected


grouped = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1e3, 1e3) | st.just(math.nan)), min_size=1)


@given(grouped)
def test_reductions_by_group(rows):
    frame = pd.DataFrame(rows, columns=["key", "value"])
    ids = groups(frame, ["key"])
    members: dict[str, list[int]] = {}
    for i, (key, _) in enumerate(rows):
        members.setdefault(key, []).append(i)
    assert [list(members).index(key) for key, _ in rows] == ids.tolist()
    values = [[rows[i][1] for i in mine] for mine in members.values()]
    known = [[v for v in mine if not math.isnan(v)] for mine in values]
    assert largest(ids, frame["value"]) == pytest.approx([max(k, default=math.nan) for k in known], nan_ok=True)
    assert sums(ids, frame["value"].fillna(0.0)).tolist() == pytest.approx([sum(k) for k in known])
    size = lambda i: -math.inf if math.isnan(rows[i][1]) else rows[i][1]  # noqa: E731
    assert worst_rows(ids, frame["value"]).tolist() == [max(mine, key=size) for mine in members.values()]


histogram = st.builds(ExponentHistogram.of, st.integers(-150, 100), st.lists(st.integers(0, 9), max_size=6))


@given(st.lists(histogram, min_size=1, max_size=6), st.data())
def test_some_of_many_histograms(held, data):
    at = data.draw(st.lists(st.integers(0, len(held) - 1)))
    taken = Histograms.of(held).taken(np.array(at, np.int64))
    assert [taken.row(i) for i in range(len(at))] == [held[i] for i in at]


def test_steps_that_are_kept_besides_are_seen_only_by_those_who_name_them(tmp_path, monkeypatch):
    monkeypatch.setattr("precdoctor.diagnosis.survey.survey.MOST_ROWS", 500)
    run = Training(steps=200).write(tmp_path / "run")
    chosen = RunView(run).kept_steps
    besides = [s for s in range(200) if s not in chosen][:3]
    view = RunView(run)
    view.keep(besides)
    assert view.kept_steps == chosen
    assert set(view.measured((), ("output",))["step"]) == set(chosen)
    assert view.survey.covers(besides)
    assert sorted(set(view.measured((), ("output",), steps=besides)["step"])) == besides
