"""What is read of a call of a quantiser: the tensor times its scales; and what is left alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precdoctor.recording.fp8.library_quantisers import _blocks, _engine_quantised, _msamp_cast, _nvfp4, _to_mx
from precdoctor.recording.model.quantised_tensors import is_quantised, quantised
from tests.support.zoo import lib_te as te


def scaled(found):
    x = found.given
    return ((x if found.grid is None else x.reshape(found.grid)) * found.factors).reshape(x.shape)


@pytest.mark.parametrize(("shape", "columns", "rows"), [((6, 64), 32, 1), ((2, 3, 50), 16, 1), ((5, 300), 128, 128)])
def test_blocks_that_fit_and_that_do_not(shape, columns, rows):
    x = torch.randn(shape)
    by = torch.rand(-(-x.numel() // shape[-1] // rows), -(-shape[-1] // columns)) + 0.5
    found = _blocks(x, te.E4M3, torch.nn.functional.pad(by, (0, 3, 0, 2), value=9.0), columns, rows)
    assert torch.equal(found.multipliers, by)
    assert torch.equal(scaled(found), x * te.spread(by, x, columns, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_wide_whatever_the_tensor_is(dtype):
    x = torch.full((4, 32), 3.0, dtype=dtype)
    stored = te.Float8CurrentScalingQuantizer(te.E4M3).quantize(x)
    found = _engine_quantised((None, x), {}, stored)
    assert scaled(found).dtype is torch.float32
    assert float(scaled(found).max()) == pytest.approx(448.0, rel=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "change"),
    [
        ({"noop_flag": torch.zeros(1)}, {}),  # perhaps nothing is cast
        ({}, {"_scale_inv": None}),  # only the transposed copy is there
        ({}, {"_fp8_dtype": None}),
        ({}, {"_fp8_dtype": "kFloat8E4M3"}),  # nobody's enumeration
        ({}, {"_scale_inv": torch.ones(3)}),
    ],
)
def test_what_cannot_be_read_has_no_row(kwargs, change):
    x = torch.randn(4, 32)
    stored = te.Float8CurrentScalingQuantizer(te.E4M3).quantize(x)
    vars(stored).update(change)
    assert _engine_quantised((None, x), kwargs, stored) is None


def test_swizzled_scales_of_an_odd_shape_are_left_alone():
    x = torch.randn(128, 128)
    stored = te.MXFP8Quantizer(te.E4M3, optimize_for_gemm=True).quantize(x)
    stored._rowwise_scale_inv = stored._rowwise_scale_inv[:100]
    assert _engine_quantised((None, x), {}, stored) is None


@pytest.mark.parametrize(
    ("read", "args", "result"),
    [
        (_to_mx, (torch.ones(4, 32), torch.float8_e4m3fn, 32), (torch.ones(4, 1), torch.ones(4, 32))),
        (_to_mx, (torch.ones(4, 32), "fp6_e2m3", 32, None, True), (torch.ones(4, 1), torch.ones(4, 32))),
        (_to_mx, (torch.ones(4, 32), "fp6_e2m3", 32), None),
        (_nvfp4, (torch.ones(4, 32), 16, torch.ones(2)), (torch.ones(4, 2), torch.ones(4, 16))),
        (_msamp_cast, (torch.ones(4), SimpleNamespace(qtype=SimpleNamespace(name="kFloat16"))), None),
        (_msamp_cast, (torch.ones(4), None), None),
    ],
)
def test_other_formats_and_other_results_are_left_alone(read, args, result):
    assert read(args, {}, result) is None


class OptimState8bit(torch.Tensor):
    """Of another package, whatever it is called."""


def test_classes_are_known_by_their_package():
    assert not is_quantised(torch.ones(2).as_subclass(OptimState8bit)) and quantised(torch.ones(2)) is None
    known = type("ScalingTensor", (), {"__module__": "msamp.common.tensor.tensor"})()
    assert is_quantised(known) and quantised(known) is None  # without the parts
