"""The page computes what `precdoctor.numerics.prediction` computes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import precdoctor.reporting.html
from precdoctor.numerics.formats import BF16, FP16, FP32
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram
from precdoctor.numerics.prediction import TensorStatistics, predict
from precdoctor.numerics.tail import flushed_tail
from precdoctor.reporting.html.rangemap import FORMATS, _encoded, _tail, format_data
from tests.support.browser import CHROMIUM, NODE, WITHOUT_ENGINE, evaluate
from tests.support.references import amax_scale, statistics_of

PREDICT_JS = Path(precdoctor.reporting.html.__file__).parent / "templates" / "predict.js"
SCALES = (1.0, 2.0**-9, 2.0**16, 3.0, 0.37, 1e-30, 1e30, 448.0 / 3.3)


def tensors():
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(3000)
    yield statistics_of(normal.astype(np.float32), FP32)
    yield statistics_of((normal * 2.0**-20).astype(np.float16), FP16)
    yield statistics_of(np.exp(4.0 * normal[:500]), BF16)
    yield statistics_of(np.exp(normal) * 300.0)
    yield statistics_of([2.0**-24, 2.0**-25, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65520.0], FP32)
    yield statistics_of([1.0], FP32)
    yield statistics_of([], FP32)
    yield TensorStatistics(ExponentHistogram.of(EXP_MIN, [3, 4]), source=None)
    yield TensorStatistics(ExponentHistogram.of(EXP_MAX - 1, [3, 4]), source=None)
    for _ in range(8):  # histograms with gaps, ends known or not
        counts = rng.integers(0, 1000, rng.integers(1, 30)) * rng.integers(0, 2)
        lo = int(rng.integers(-40, 20))
        histogram = ExponentHistogram.of(lo, counts).trimmed()
        if histogram.total:
            top, bottom = histogram.lo + histogram.counts.size - 1, histogram.lo
            yield TensorStatistics(histogram, amax=1.5 * 2.0**top if histogram.total > 1 else None, source=FP32)
            yield TensorStatistics(histogram, amin_nonzero=1.25 * 2.0**bottom)


def given(t):
    grid = None if t.source is None else [t.source.mantissa_bits, t.source.min_subnormal]
    lo, counts = _encoded(t.histogram)
    return {"lo": lo, "counts": counts, "amax": t.amax, "amin": t.amin_nonzero, "grid": grid}


@pytest.mark.skipif(NODE is None and CHROMIUM is None, reason=WITHOUT_ENGINE)
def test_the_page_predicts_what_the_package_predicts():
    cases = [(t, f, s) for t in tensors() for f in FORMATS for s in (*SCALES, amax_scale(t.amax, f))]
    asked = json.dumps([[given(t), format_data(f), s] for t, f, s in cases])
    script = f"""{PREDICT_JS.read_text()}
      return {asked}.map(([t, f, s]) => {{
        const p = Predict.predict({{...t, counts: Predict.decode(t.counts)}}, f, s);
        const of = (e) => [e.low, e.high, e.estimate];
        return [p.elements, Predict.amaxScale(t.amax, f), of(p.flushed), of(p.subnormal), of(p.saturated),
                t.amax ? p.headroom : null];
      }});"""
    assert len(cases) > 500
    open_ = 0
    for (t, f, s), (elements, filling, *shares, headroom) in zip(cases, evaluate(script), strict=True):
        wanted = predict(t, f, scale=s)
        said = f"{f.name} x {s} of {t}"
        assert elements == wanted.elements, said
        assert filling == amax_scale(t.amax, f), said
        for share, estimate in zip(shares, (wanted.flushed, wanted.subnormal, wanted.saturated), strict=True):
            assert share[:2] == [estimate.low, estimate.high], said
            assert share[2] == pytest.approx(estimate.estimate, rel=1e-9, abs=1e-12), said
            open_ += estimate.low < share[2] < estimate.high
        if t.amax:
            assert headroom == pytest.approx(wanted.headroom_binades.estimate, rel=1e-12, abs=1e-12), said
    assert open_ > 100  # the guesses inside a bin were put to the test as well


@pytest.mark.skipif(NODE is None and CHROMIUM is None, reason=WITHOUT_ENGINE)
def test_what_was_rounded_to_zero_before_comes_back_with_the_scale():
    rng = np.random.default_rng(5)
    stored = (rng.standard_normal(20_000) * 2.0**-24).astype(np.float16)
    t = statistics_of(stored, FP16)
    zeros = int((stored == 0).sum())
    tail = flushed_tail(t.histogram, zeros, FP16)
    lo, counts = _tail("float16", t.histogram, zeros, t.amin_nonzero)
    cases = [(f, s) for f in FORMATS for s in (1.0, 2.0**3, 2.0**7, 2.0**-4, 5.5, 2.0**14)]
    script = f"""{PREDICT_JS.read_text()}
      const t = {json.dumps(given(t))}, tail = {json.dumps({"lo": lo, "counts": counts})};
      t.counts = Predict.decode(t.counts);
      return {json.dumps([[format_data(f), s] for f, s in cases])}.map(([f, s]) =>
        Predict.flushedShare(Predict.predict(t, f, s), tail, f, s));"""
    seen = evaluate(script)
    for (f, s), share in zip(cases, seen, strict=True):
        likely = predict(t, f, scale=s).flushed.estimate * t.histogram.total
        again = tail.still_flushed(f, 2.0 ** round(math.log2(s)))
        assert share == pytest.approx((likely + again) / (tail.total + t.histogram.total), rel=1e-6), (f.name, s)
    assert seen[cases.index((FP16, 1.0))] == pytest.approx(zeros / stored.size, rel=0.1)
    assert seen[cases.index((FP16, 2.0**7))] < 0.01


def test_zeros_that_left_no_mark_have_no_tail():
    t = statistics_of([1.0, 2.0])
    assert _tail("float16", t.histogram, 1000, t.amin_nonzero) == []
    assert _tail("int64", t.histogram, 1000, t.amin_nonzero) == []
