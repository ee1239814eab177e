"""The Triton kernel counts what the reference counts: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.recording import kernels
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.tiling import tiling
from tests.support.kernels import measure_triton

with pytest.MonkeyPatch.context() as _patch:
    if not torch.cuda.is_available():
        _patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    triton_kernel = pytest.importorskip("precdoctor.recording.kernels.triton_kernel")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


# What NumPy says, in the interpreter, of Inf and NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # of the interpreter of Triton before 3.3, with NumPy of today
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
FINGERPRINT = 8
RARE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 2.0**-149, -(2.0**-126), 3.4e38, 2.0**-24, 448.0]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "every third": lambda x: x[..., ::3],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


def row():
    ints, floats = kernels.Bank(DEVICE).row(0)
    return ints.clone(), floats.clone(), torch.zeros((), dtype=torch.int64, device=DEVICE)


def both(tensors, blocks=at.BLOCK_SIZES):
    """Rows of the kernel and of the reference, after the same tensors."""
    rows = []
    for measure in (measure_triton, reference.measure):
        ints, floats, counter = row()
        for x in tensors:
            measure(x.to(DEVICE), ints, floats, counter, blocks)
        for block in at.BLOCK_SIZES:
            ints[at.block_hist(block) + at.BLOCK_BINS] = 0  # scrap
        rows.append((ints.cpu(), floats.cpu()))
    return rows


def assert_equal(tensors, blocks=at.BLOCK_SIZES):
    (ints, floats), (truth, true_floats) = both(tensors, blocks)
    assert torch.equal(ints, truth), (ints != truth).nonzero().flatten()
    assert torch.equal(floats[:2], true_floats[:2])
    spread = math.sqrt(float(true_floats[at.SUM_SQ]) * sum(x.numel() for x in tensors))
    assert float(floats[at.SUM]) == pytest.approx(float(true_floats[at.SUM]), rel=1e-5, abs=1e-6 * spread + 1e-300)
    assert float(floats[at.SUM_SQ]) == pytest.approx(float(true_floats[at.SUM_SQ]), rel=1e-5)


@pytest.mark.parametrize("dtype", triton_kernel.FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 33), (2, 5, 130), (5003,)], ids=str)
def test_counts_what_the_reference_counts(dtype, shape):
    x = torch.randn(shape, dtype=torch.float64)
    planted = x.clone()
    planted.view(-1)[: len(RARE)] = torch.tensor(RARE[: x.numel()], dtype=torch.float64)
    far_apart = x * torch.randint(-140, 120, shape).double().exp2()
    assert_equal([x.to(dtype)])
    assert_equal([planted.to(dtype)])
    assert_equal([far_apart.to(dtype)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_walks_any_strides(layout):
    x = LAYOUTS[layout](torch.randn(4, 6, 50).bfloat16())
    assert triton_kernel.supports(x, 15)
    assert_equal([x], (32, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz], ids=str)
def test_every_code_point(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    codes = torch.arange(256**size, dtype=torch.int32).to(torch.int8 if size == 1 else torch.int16)
    assert_equal([codes.view(dtype)], ())


def test_launches_merge_and_the_first_bad_one_sticks():
    x = torch.randn(9000)
    bad = x.clone()
    bad[[3, 8000]] = math.inf
    (ints, _), _ = both([x, bad, bad])
    assert ints[at.ORDER] == 1
    assert ints[at.FIRST_BAD_ORDER] == 2
    assert ints[at.LAUNCHES] == 3
    assert_equal([x, bad, bad, x])


def ordinary(numel):
    """Tiles of ordinary values; then tiles in which something is rare, each in its own way."""
    x = torch.randn(numel, dtype=torch.float64)
    x[1000:3000] = 0.0
    x[5000] = math.inf
    x[9000:9100:7] = 1e-30
    x[20_000] = math.nan
    x[-3000:] *= 2.0**40
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_in_a_window_and_those_left_out_of_it_add_up(dtype, monkeypatch):
    monkeypatch.setattr(triton_kernel, "FEWEST_TILES", 64)  # so that a program adds to the slot more than once
    assert_equal([ordinary(40_000).to(dtype)], ())


@pytest.mark.parametrize("block", at.BLOCK_SIZES)
def test_blocks_of_rows_that_end_within_a_block(block):
    x = ordinary(24_000).view(80, 300).bfloat16()
    x[:, 160:176] = 0.0
    assert_equal([x], (block,))
    assert_equal([x[:, :256]], (block,))


ATTENTION = torch.randn(4, 5, 3, 4, 16).permute(2, 0, 3, 1, 4)  # queries, keys and values of one product


@pytest.mark.parametrize("x", [torch.randn(6, 40, 10, 10).to(memory_format=torch.channels_last), ATTENTION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_order_is_enough_where_no_fingerprint_and_no_blocks_are_wanted(x, dtype):
    x = x.to(dtype)
    assert triton_kernel.supports(x, 0) and tiling(x.shape, x.stride(), x.dtype, 0).flat == (dtype == torch.float32)
    assert triton_kernel.supports(x, FINGERPRINT) == (x.dim() == 4)
    part = x[:, ::3]
    assert triton_kernel.supports(part, 0) == (x.dim() == 4)
    assert x.dim() == 5 or not tiling(part.shape, part.stride(), x.dtype, 0).flat
    here, there = row(), row()
    measure_triton(x.to(DEVICE), *here, (), fingerprint=False)
    reference.measure(x.to(DEVICE), *there, ())
    there[0][at.FINGERPRINT] = 0
    assert torch.equal(here[0], there[0])


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=700), st.integers(-1, 2100))
@settings(max_examples=15, deadline=None)
def test_any_sixteen_bits_anywhere_count_as_in_the_reference(codes, before):
    """BF16, with normal numbers in front that the window is chosen by."""
    planted = torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_equal([torch.cat([torch.randn(max(before, 0)).bfloat16(), planted])], ())
