from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.numerics import FORMATS
from precdoctor.numerics.histogram import bin_of
from precdoctor.reporting.rangebar import RangeBar
from precdoctor.reporting.sparkline import sparkline
from tests.support.offenders import check_each


def histogram(dtype, *magnitudes):
    bins = [bin_of(m) for m in magnitudes]
    return {"dtype": dtype, "exp_lo": min(bins), "exp_hist": np.bincount(np.array(bins) - min(bins)).tolist()}


def test_float16_has_one_cell_per_binade_and_its_ends_are_its_limits():
    bar = RangeBar.of(histogram("float16", 2.0**-24, 65504.0), 48)
    assert len(bar.heights) == 41  # 2^-24 closes bin -25, 65504 lies in bin 15
    assert bar.heights[0] and bar.heights[-1] and not any(bar.heights[1:-1])
    assert bar.subnormal_cells == 10
    assert bar.text().plain == "2^-24 ┊█·········┊" + "·" * 30 + "█┊ 65504"
    assert bar.text(ascii_only=True).plain.isascii()


def test_what_another_format_cannot_hold_is_told_as_a_share():
    bar = RangeBar.of(histogram("float32", 2.0**-30, 1.0, 1.0, 70000.0) | {"format": "float16"}, 48)
    assert (bar.below, bar.above) == (0.25, 0.25)
    assert bar.text().plain.startswith("25 % below") and bar.text().plain.endswith("25 % above")


@pytest.mark.parametrize("width", [8, 16, 48, 400])
def test_every_format_fits_every_width(width):
    def check(fmt):
        bar = RangeBar.of(histogram(fmt.dtype, 1.0), width)
        assert 0 < len(bar.heights) <= width
        assert sum(h > 0 for h in bar.heights) == 1

    check_each(check, FORMATS.values())


@pytest.mark.parametrize(
    "evidence",
    [{}, {"dtype": "int64", "exp_lo": 0, "exp_hist": [1]}, {"dtype": "float16", "exp_lo": None, "exp_hist": None},
     {"dtype": "float16", "exp_lo": 3, "exp_hist": [0, 0]}],
)  # fmt: skip
def test_nothing_to_draw_is_no_bar(evidence):
    assert RangeBar.of(evidence, 48) is None


def test_a_spike_and_a_nan_survive_a_narrow_sparkline():
    series = [1.0] * 1000
    series[500] = 9.0
    assert sparkline(series, 50).count("█") == 1
    series[500] = math.nan
    assert sparkline(series, 50).count("x") == 1


def test_sparkline_edges():
    assert sparkline([]) == ""
    assert sparkline([None, 0.0, 0.0]) == " ▁▁"
    assert sparkline([1.0, 2.0], ascii_only=True) == "_#"
    assert sparkline([1.0, 10.0, 100.0], log=True) == "▁▅█"


@given(st.lists(st.none() | st.floats(width=32), max_size=200), st.integers(1, 80), st.booleans())
def test_sparkline_never_fails_and_never_exceeds_its_width(values, width, log):
    line = sparkline(values, width, log=log)
    assert len(line) == min(len(values), width)
