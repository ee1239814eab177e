"""What the one pass over the tensors keeps, held against the rows themselves."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.histogram import ExponentHistogram
from precdoctor.reporting.html import survey as surveys
from precdoctor.reporting.html.survey import Survey, column_spans, headroom
from precdoctor.runlog import open_run
from tests.support.references import histogram_of, statistics_of
from tests.support.runs import write_run


def surveyed(path, rows, **options):
    steps = sorted({r["step"] for r in rows})
    return Survey(RunView(open_run(write_run(path, rows, [{"step": s, "loss": 1.0} for s in steps], **options))))


def stats(values, **columns):
    t = statistics_of(values)
    known = {"amax": t.amax, "amin_nonzero": t.amin_nonzero, "exp_lo": t.histogram.lo}
    return {"numel": len(values), **known, "exp_hist": t.histogram.counts.tolist(), **columns}


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(["a", "b"]),
            st.lists(st.floats(2.0**-20, 2.0**20), min_size=1, max_size=6),
            st.sampled_from([None, 0.25, 1.0, 1024.0, 3.0]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_total_is_all_rows_with_their_scale_taken_out(tmp_path_factory, given_rows):
    rows = [stats(v, step=s, module=m, scale=scale, numel=len(v)) for s, m, v, scale in given_rows]
    found = surveyed(tmp_path_factory.mktemp("run") / "run", rows, batch_rows=4)
    for at, tensor in enumerate(found.tensors):
        mine = [(v, scale) for _, m, v, scale in given_rows if m == tensor.module]
        kept = np.concatenate([np.array(v) / (scale or 1.0) for v, scale in mine if scale != 3.0] or [np.zeros(0)])
        total = found.total(at)
        assert (total.rows, total.left_out) == (len(mine), sum(scale == 3.0 for _, scale in mine))
        assert total.numel == kept.size
        assert total.histogram == histogram_of(kept)
        assert total.amax == (kept.max() if kept.size else None)
        assert total.amin_nonzero == (kept.min() if kept.size else None)


def test_a_spike_of_one_step_survives_in_its_column(tmp_path):
    rows = [
        {"step": s, "numel": 100, "subnormal": 90 * (s == 777), "amax": 5.0 if s == 333 else 1.0} for s in range(1000)
    ]
    found = surveyed(tmp_path / "run", rows)
    assert len(found.edges) <= surveys.COLUMNS and found.drawn_steps == 1000
    spans = column_spans(found)
    spike, largest = (next(n for n, (a, b) in enumerate(spans) if a <= step <= b) for step in (777, 333))
    assert found.cells("subnormal")[0].argmax() == spike and found.cells("subnormal")[0].max() == 0.9
    assert found.cells("amax")[0].argmax() == largest
    assert headroom(found, 0)[largest] == pytest.approx(128 - math.log2(5.0), abs=1e-6)
    assert spans[0][0] == 0 and spans[-1][1] == 999
    assert [b + 1 for _, b in spans[:-1]] == [a for a, _ in spans[1:]]


def test_a_mask_is_not_a_non_finite_tensor(tmp_path):
    rows = [{"step": 0, "neg_inf": 3, "numel": 9}, {"step": 1, "neg_inf": 3, "nan": 1, "numel": 9}]
    found = surveyed(tmp_path / "run", rows)
    assert found.cells("masked")[0].tolist() == [1.0, 0.0]
    assert found.cells("non_finite")[0].tolist() == [0.0, 4.0]


def test_updates_are_counted_as_the_rule_counts_them(tmp_path):
    row = {"kind": "update", "numel": 100, "zero": 40, "unchanged": 30, "rel_lo": -12, "rel_hist": [30, 60]}
    found = surveyed(tmp_path / "run", [{"step": s, **row} for s in range(2)])
    lost, intended, relative = found.updates(0)
    assert (lost, intended) == (60, 180)
    assert relative == ExponentHistogram.of(-12, [60, 120])


def test_many_tensors_make_room(tmp_path):
    rows = [stats([2.0**i], step=0, module=f"m{i}") for i in range(-70, 80)]
    found = surveyed(tmp_path / "run", rows)
    assert len(found.tensors) == 150
    assert [found.total(t).amax for t in range(150)] == [2.0**i for i in range(-70, 80)]


def test_ranks_and_integer_tensors_are_taken_as_they_come(tmp_path):
    rows = [stats([1.0, 2.0], step=0, module="a"), {"step": 0, "module": "tokens", "dtype": "int64", "numel": 7}]
    found = surveyed(tmp_path / "run", rows, ranks=3)
    assert [t.module for t in found.tensors] == ["a", "tokens"]
    assert found.total(0).numel == 6 and found.total(1).histogram.total == 0
    assert headroom(found, 1) is None
