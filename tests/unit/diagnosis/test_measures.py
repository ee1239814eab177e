"""Every measure of a row equals its slow reference, and what frames of rows are grouped and joined by."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.diagnosis.analyses.harm import kept_bits, mean_bits
from precdoctor.diagnosis.survey.frames import (
    by_kind,
    courses,
    firsts,
    groups,
    largest,
    lasts,
    on_steps,
    pairs,
    rows_of,
    sums,
    worst_rows,
)
from precdoctor.diagnosis.survey.measures import MEASURES, lists
from precdoctor.diagnosis.survey.view import Process
from precdoctor.numerics.formats import FP16
from precdoctor.numerics.histogram import ExponentHistogram, Histograms

Row = dict[str, Any]
COUNTS = st.integers(0, 40)
SIZES = st.none() | st.floats(0.0, 1e30)
_FLOATS = ("amax", "sum_sq", "scale", "saturated", "flushed", "unchanged")


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row of the log; its counts add up to no more than its elements."""
    counts = {c: draw(COUNTS) for c in ("nan", "pos_inf", "neg_inf", "zero", "subnormal", "at_max")}
    sizes = {"amax": draw(SIZES), "sum_sq": draw(SIZES), "scale": draw(SIZES | st.just(math.inf))}
    casts = {c: draw(st.none() | COUNTS) for c in ("saturated", "flushed", "unchanged")}
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "int64"]))
    shape = draw(st.none() | st.lists(st.integers(0, 9), max_size=3))
    numel = sum(counts.values()) + draw(COUNTS)
    return {**counts, **sizes, **casts, "numel": numel, "dtype": dtype, "shape": shape}


def frame_of(made: list[Row]) -> pd.DataFrame:
    """As ``RunView.measured`` makes it."""
    frame = pd.DataFrame({c: [r[c] for r in made] for c in made[0] if c != "shape"})
    shapes = pd.array([r["shape"] for r in made], dtype=pd.ArrowDtype(pa.list_(pa.int64())))
    return frame.astype({**dict.fromkeys(_FLOATS, np.float64), "dtype": "category"}).assign(shape=shapes)


def ratio(part: float | None, whole: float | None) -> float:
    return part / whole if part is not None and whole is not None and whole > 0 else math.nan


def bad(r: Row) -> int:
    return r["nan"] + r["pos_inf"] + r["neg_inf"]


def intended(r: Row) -> float | None:
    return None if r["unchanged"] is None else r["numel"] - r["zero"] + r["unchanged"]


def norm(r: Row) -> float:
    return math.nan if r["sum_sq"] is None else math.sqrt(r["sum_sq"]) / (r["scale"] or 1.0)


REFERENCES: dict[str, Callable[[Row], float | None]] = {
    "non_finite": bad,
    "alive": lambda r: r["numel"] - r["zero"] - bad(r),
    "zero_share": lambda r: ratio(r["zero"], r["numel"]),
    "at_max_share": lambda r: ratio(r["at_max"], r["numel"]),
    "saturated_share": lambda r: ratio(r["saturated"], r["numel"]),
    "flushed_share": lambda r: ratio(r["flushed"], r["numel"] - r["zero"]),
    "dimensions": lambda r: None if r["shape"] is None else len(r["shape"]),
    "fan_in": lambda r: r["numel"] / max(1, r["shape"][0]) if r["shape"] else None,
    "rms": lambda r: math.sqrt(ratio(r["sum_sq"], r["numel"] - bad(r))),
    "norm": norm,
    "intended": intended,
    "finite": lambda r: r["numel"] - bad(r),
    "multiplier": lambda r: r["scale"] if r["scale"] and r["scale"] < math.inf else 1.0,
}


@given(made=st.lists(rows(), min_size=1, max_size=6))
def test_a_measure_equals_its_slow_reference(made: list[Row]) -> None:
    frame = frame_of(made)
    for name, reference in REFERENCES.items():
        found = MEASURES[name].of(frame[list(MEASURES[name].columns)]).tolist()
        expected = [math.nan if (e := reference(r)) is None else e for r in made]
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True), name


def test_lists_are_read_of_any_column_of_lists() -> None:
    values = [[1, 2], None, [], [3]]
    for column in (pd.array(values, dtype=pd.ArrowDtype(pa.list_(pa.int64()))), pd.Series(values, dtype=object)):
        lengths, entries = lists(pd.DataFrame({"x": column}), "x")
        assert (lengths.tolist(), entries.tolist()) == ([2, 0, 0, 1], [1, 2, 3])


# -- rows of weights --------------------------------------------------------------------------------------------------

Made = list[tuple[str, str, int, str]]
MADE = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 2), st.sampled_from(["weight", "update"])),
    max_size=12,
)


def keyed(made: Made) -> pd.DataFrame:
    """Rows of weights: module, name, step and kind; step 1 is of another rank."""
    names = dict.fromkeys(("module", "name", "kind"), "category")
    frame = pd.DataFrame(made, columns=["module", "name", "step", "kind"]).astype({**names, "step": np.int64})
    return frame.assign(root="M#0", rank=(frame["step"] == 1).astype(np.int32), attempt=0, call=0)


@given(MADE)
def test_groups_are_numbered_as_they_appear(made: Made) -> None:
    ids = groups(keyed(made), ("module", "name", "step"))

    seen = list(dict.fromkeys(key[:3] for key in made))
    assert ids.tolist() == [seen.index(key[:3]) for key in made]
    assert [made[i][:3] for i in firsts(ids)] == seen
    assert lasts(ids).tolist() == [max(i for i, key in enumerate(made) if key[:3] == own) for own in seen]
    assert [own.tolist() for own in rows_of(ids)] == [np.flatnonzero(ids == i).tolist() for i in range(len(seen))]


def test_groups_of_more_combinations_than_a_number_holds() -> None:
    frame = pd.DataFrame({f"c{i}": np.arange(4096) % (4096 - i) for i in range(8)})
    names = list(frame)
    assert (groups(frame, names) == frame.groupby(names, sort=False).ngroup().to_numpy()).all()
    assert groups(pd.concat([frame, frame]), names).max() == 4095


@given(MADE)
def test_rows_of_two_kinds_are_joined_by_weight_and_step(made: Made) -> None:
    frame = keyed(made)
    left, right = pairs(frame, "weight", "update")
    known, values = by_kind(frame, np.arange(len(made), dtype=np.float64), ("weight", "update"))

    last: dict[Any, dict[str, int]] = {}
    for i, (*key, kind) in enumerate(made):
        last.setdefault(tuple(key), {})[kind] = i
    both = [found for found in last.values() if len(found) == 2]
    assert left.index.tolist() == [found["weight"] for found in both]
    assert right.index.tolist() == [found["update"] for found in both]
    assert list(zip(known["module"], known["name"], known["step"], strict=True)) == list(last)
    for kind, found in zip(("weight", "update"), values, strict=True):
        assert found.tolist() == pytest.approx([float(own.get(kind, math.nan)) for own in last.values()], nan_ok=True)


@given(MADE)
def test_the_course_of_a_weight_is_of_one_process_and_has_each_step_once(made: Made) -> None:
    found = {place: (process, values, own.tolist()) for place, process, values, own in courses(keyed(made), ["step"])}

    expected: dict[Any, tuple[Process, tuple[int], dict[int, int]]] = {}
    for i, (module, name, step, _) in enumerate(made):
        process = Process(int(step == 1), 0)
        own = expected.setdefault(("M#0", module, name), (process, (step,), {}))
        if own[0] == process:
            own[2][step] = i
    assert found == {p: (o, v, [steps[s] for s in sorted(steps)]) for p, (o, v, steps) in expected.items()}


def test_rows_are_chosen_by_process_and_step() -> None:
    frame = keyed([("a", "x", step, "weight") for step in range(3)])
    assert on_steps(frame, {(Process(0, 0), 1), (Process(1, 0), 1), (Process(0, 0), 2)}).tolist() == [False, True, True]


@given(st.integers(-40, 10), st.lists(st.integers(0, 50), max_size=40))
def test_the_bits_that_fp16_keeps_are_counted_bin_by_bin(lo: int, counts: list[int]) -> None:
    bits = 0.0
    for k, count in enumerate(counts, lo):  # magnitudes in (2^k, 2^(k+1)]
        bits += count * (0 if k < -25 else 11 if k >= -14 else max(1, 11 + 14 + k))
    assert mean_bits(ExponentHistogram.of(lo, counts), FP16) == pytest.approx(bits / (sum(counts) or 1.0))
    assert kept_bits(np.array([0]), FP16)[0] == 11


KEYED = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1e3, 1e3) | st.just(math.nan)), min_size=1)


@given(KEYED)
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
