"""The live view's memory: what it keeps of a run that goes on for ever."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.reporting.live.picture import EVENT_COLUMNS, MOST, STEP_COLUMNS, TENSOR_COLUMNS, Picture, Series
from precdoctor.runlog.schema import TABLES
from tests.support.runs import DEFAULTS


def batch(table, rows):
    names = {"tensors": TENSOR_COLUMNS, "steps": STEP_COLUMNS, "events": EVENT_COLUMNS}[table]
    filled = [{"rank": 0, **DEFAULTS[table], **row} for row in rows]
    return pa.RecordBatch.from_pylist(
        [{name: row.get(name) for name in names} for row in filled],
        schema=pa.schema([TABLES[table].field(name) for name in names]),
    )


def picture(tensors=(), steps=(), events=()):
    found = Picture()
    for rows, table in ((tensors, "tensors"), (steps, "steps"), (events, "events")):
        if rows:
            getattr(found, f"take_{table}")(batch(table, rows))
    return found


def half(module="a", **row):
    return {"module": module, "dtype": "float16", "numel": 100, **row}


# -- series ----------------------------------------------------------------------------------------------------------


def test_a_long_series_stays_small_and_keeps_its_spike():
    series = Series()
    for step in range(20 * MOST):
        series.add(step, 500.0 if step == 12_345 else 1.0 + step / 1e6)
    assert len(series.values) <= MOST
    assert max(series.values) == 500.0 and series.last == 1.0 + (20 * MOST - 1) / 1e6


def test_a_nan_is_never_hidden():
    series = Series()
    for step in range(5 * MOST):
        series.add(step, math.nan if step == 777 else float(step))
    assert sum(math.isnan(v) for v in series.values) == 1


@settings(deadline=None)
@given(st.permutations(list(range(40))))
def test_the_order_of_ranks_does_not_matter(steps):
    one, other = Series(), Series()
    for step in range(40):
        one.add(step, step * 0.5)
    for step in steps:
        other.add(step, step * 0.5)
    assert one.values == other.values and one.last == other.last


# -- steps and events ------------------------------------------------------------------------------------------------


def test_steps_are_counted_per_rank():
    rows = [{"step": s, "rank": r, "skipped": s == 1, "loss": float(s)} for r in range(2) for s in range(3)]
    found = picture(steps=rows)
    assert (found.last_step, found.skipped, found.sampled) == (2, 1, 3)
    assert found.series["loss"].values == [0.0, 1.0, 2.0]


def test_overhead_is_the_share_of_all_time():
    found = picture(steps=[{"step": 0, "recorder_ns": 1, "step_ns": 50}, {"step": 1, "recorder_ns": 3, "step_ns": 150}])
    assert found.overhead == 4 / 200 and found.step_seconds == 150e-9
    assert picture(steps=[{"step": 0}]).overhead is None


def test_lost_rows_and_trouble_are_kept_and_garbage_is_not():
    events = [
        {"event": "drop", "data": '{"reason": "backlog", "rows": 70}'},
        {"event": "drop", "data": '{"reason": "backlog", "rows": 5}'},
        {"event": "warning", "data": '{"message": "the disk is full"}'},
        {"event": "error", "data": "not json"},
        {"event": "error", "data": "[1]"},
        {"event": "scaler", "data": '{"message": "no trouble"}'},
    ]
    found = picture(events=events)
    assert dict(found.dropped) == {"backlog": 75} and found.trouble == "the disk is full"


# -- tensors ---------------------------------------------------------------------------------------------------------


def test_ranks_of_a_step_merge_and_a_later_step_replaces():
    found = picture(
        [
            half(step=3, amax=2.0, subnormal=10, exp_lo=0, exp_hist=[5]),
            half(step=3, amax=8.0, subnormal=30, exp_lo=2, exp_hist=[7]),
            half(step=2, amax=1000.0, subnormal=99),
        ]
    )
    (tensor,) = found.tensors.values()
    assert (tensor.amax, tensor.numel, tensor.subnormal_share) == (8.0, 200, 0.2)
    assert tensor.histogram.lo == 0 and tensor.histogram.counts.tolist() == [5, 0, 7]
    found.take_tensors(batch("tensors", [half(step=4, amax=1.0)]))
    assert (tensor.amax, tensor.numel, tensor.histogram.total) == (1.0, 100, 0)


def test_the_tightest_come_first_and_what_broke_first_before_all():
    rows = [half(m, step=0, amax=a) for m, a in (("wide", 1.0), ("tight", 60000.0), ("early", 2.0), ("late", 3.0))]
    rows += [half(m, step=1, amax=1.0, nan=1, first_bad_order=o) for m, o in (("late", 9), ("early", 4))]
    found = picture(rows)
    assert [t.module for t in found.tightest(9)] == ["early", "late", "tight", "wide"]
    found.take_tensors(batch("tensors", [half(m, step=2, amax=1.0, nan=1, first_bad_order=1) for m in ("late",)]))
    assert [t.module for t in found.tightest(2)] == ["early", "late"]  # since when counts, not where in this step


def test_a_mask_is_no_alarm_and_recovery_ends_one():
    found = picture([half("mask", step=0, amax=1.0, neg_inf=50), half("x", step=0, amax=1.0, pos_inf=1)])
    assert {t.module: t.bad_since is not None for t in found.tensors.values()} == {"mask": False, "x": True}
    found.take_tensors(batch("tensors", [half("x", step=1, amax=1.0)]))
    assert all(t.bad_since is None for t in found.tensors.values())


def test_old_steps_are_left_out_but_never_an_old_nan():
    rows = [half(f"m{s}", step=s, amax=1.0) for s in range(100)] + [half("bad", step=5, amax=1.0, nan=2)]
    found = picture(rows)
    assert {t.module for t in found.tensors.values()} == {"bad", "m96", "m97", "m98", "m99"}


@pytest.mark.parametrize("kind", ["update", "loss", "opt_state"])
def test_kinds_that_tell_no_range_are_left_out(kind):
    assert not picture([half(step=0, kind=kind, amax=1.0)]).tensors


def test_formats_filled_by_their_scale_have_no_headroom_to_lose():
    found = picture([{"step": 0, "dtype": "float8_e4m3fn", "numel": 4, "amax": 448.0}])
    assert found.tightest(3) == []
