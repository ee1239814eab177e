"""What a cast clips and flushes is counted exactly, whatever the dtype before it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics import EXP_MIN
from precdoctor.recording import kernels
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.slots.cast_operand import FLOAT8, Operand, flush_bins, launcher

#: Spacing of the format's numbers in its top binade, continued beyond its maximum.
SPACING = {"E4M3FN": 32.0, "E5M2": 8192.0, "E4M3FNUZ": 16.0, "E5M2FNUZ": 8192.0}
EDGES = [448.0, 456.0, 463.9, 464.0, 464.1, 480.0, 240.0, 247.0, 248.0, 249.0, 57344.0, 61439.0, 61440.0, 65504.0, 1e30]
TINY = [2.0**-k for k in range(8, 20)] + [1.5 * 2.0**-k for k in range(8, 20)]
VALUES = st.sampled_from([0.0, math.nan, math.inf, -math.inf, *EDGES, *TINY]) | st.floats(-1e5, 1e5)


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


def counted(x, fmt):
    kernels.forget_all()
    launcher(fmt)(x, 0)
    ints, _ = kernels.bank(x.device).row(0)
    return int(ints[at.SATURATED]), int(ints[at.HIST + 1 : at.HIST + 1 + flush_bins(fmt)].sum())


@settings(deadline=None)
@given(
    st.lists(VALUES, min_size=1, max_size=50),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from(sorted(FLOAT8, key=str)),
)
def test_counts_are_those_of_rounding_each_element(values, before, dtype):
    fmt = FLOAT8[dtype]
    x = torch.tensor(values, dtype=torch.float64).to(before)
    exact = np.array(x.tolist(), np.float64)
    magnitude = np.abs(exact[np.isfinite(exact)])
    rounded = np.round(magnitude / SPACING[fmt.name]) * SPACING[fmt.name]  # half to even
    zero = torch.tensor(exact).to(dtype).float().numpy() == 0
    assert counted(x, fmt) == (int((rounded > fmt.max).sum()), int((zero & (exact != 0)).sum()))


def test_launches_into_one_slot_add_up_and_shapes_do_not_matter():
    fmt = FLOAT8[torch.float8_e4m3fn]
    x = torch.full((300, 500), 1000.0)[:, ::3]
    launcher(fmt)(x, 0)
    launcher(fmt)(x.t(), 0)
    assert int(kernels.bank(x.device).row(0)[0][at.SATURATED]) == 2 * x.numel()


@pytest.mark.parametrize(
    ("factors", "scale"),
    [
        (None, None),
        ((), 1.0),
        (((4.0, False), (8.0, True)), 0.5),
        (((lambda: 3.0, False),), 3.0),
        (((0.0, True),), math.inf),
        (((None, False),), None),
    ],
)
def test_the_scale_is_a_product_read_late(factors, scale):
    assert Operand(FLOAT8[torch.float8_e5m2], factors, whole=True).scale() == scale


def test_flush_limits_are_ends_of_bins():
    for fmt in FLOAT8.values():
        assert 2.0 ** (EXP_MIN + flush_bins(fmt)) == fmt.flush_limit
