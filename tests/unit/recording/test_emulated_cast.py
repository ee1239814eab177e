"""Casts on the device against the casts of ``numerics``, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from precdoctor.errors import UsageError
from precdoctor.numerics.blocks import BlockFormat, ScaleRule
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.narrow_cast import NarrowCast, casts_in_words, parse_casts
from precdoctor.recording.applying.emulated_cast import cast
from tests.support.references import cast_blocks

ELEMENTS = ("BF16", "FP16", "E4M3FN", "E5M2", "E4M3FNUZ", "E3M2", "E2M3", "E2M1")


def numbers() -> torch.Tensor:
    """FP32 over 60 binades, both signs, zeros, ties of FP8, what rounds to the largest and what does not."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(64, 60, generator=generator) * 2.0 ** torch.arange(-40, 20)
    edges = torch.tensor([0.0, -0.0, 464.0, 464.1, 61440.0, 61439.0, 2.0**-10, 2.0**-17, 3 * 2.0**-10, 1e-41, 3e38])
    return torch.cat([spread.flatten(), edges, -edges, edges.new_zeros(2)]).reshape(-1, 8)


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_rounded_as_the_reference_rounds_them(name):
    x = numbers()
    how = NarrowCast.of(name, "none")
    found, counts = cast(x, how)
    expected = cast_array(x.numpy(), how.element, saturate=not how.element.has_infinity)
    assert np.array_equal(found.numpy(), expected.astype(np.float32))
    nonzero = x.numpy() != 0.0
    assert counts[0] == nonzero.sum()
    assert counts[1] == (nonzero & (expected == 0.0)).sum() > 0
    wide = cast_array(x.numpy(), how.element)
    assert counts[2] == (~np.isfinite(wide) | (np.abs(x.numpy()) > how.element.overflow_limit)).sum()


@pytest.mark.parametrize("rule", ["floor", "up", "amax"])
@pytest.mark.parametrize("name", ["MXFP8_E4M3", "MXFP8_E5M2", "MXFP4", "NVFP4", "TILE_1X128"])
def test_blocks_are_scaled_as_the_reference_scales_them(name, rule):
    x = torch.randn(8, 70, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-35, 35).div(4)
    x[3] = 0.0
    how = NarrowCast.of(name, rule)
    found, counts = cast(x, how)
    assert isinstance(how.format, BlockFormat)
    expected = cast_blocks(x.double().numpy(), how.format, rule=ScaleRule(rule))
    # FP32 here and FP64 there: a quotient next to a tie, or a block scale, may fall on the other side of it
    assert np.isclose(found.numpy(), expected.values, rtol=1e-6, atol=0.0).mean() > 0.995
    assert counts[1] == pytest.approx(((expected.values == 0.0) & (x.numpy() != 0.0)).sum(), abs=2)
    assert counts[3] == pytest.approx(np.square(expected.values - x.double().numpy()).sum(), rel=1e-3)


def test_amax_scaling_fills_the_format_and_a_number_is_the_scale():
    x = torch.tensor([1e-6, 2e-6, -4.48e-4])
    found, counts = cast(x, NarrowCast.of("E4M3FN", "tensor"))
    assert found[2] == x[2] and counts.tolist()[:3] == [3, 0, 0]
    assert cast(x, NarrowCast.of("E4M3FN", "none"))[1].tolist()[:3] == [3, 3, 0]
    assert cast(x, NarrowCast.of("E4M3FN", "1e6"))[1].tolist()[:3] == [3, 0, 0]
    assert cast(x, NarrowCast.of("E4M3FN", "1e9"))[1].tolist()[:3] == [3, 0, 3]


def test_what_is_not_finite_stays_and_dtype_and_shape_do():
    x = torch.tensor([[np.nan, np.inf, -np.inf, 1.03]], dtype=torch.float64)
    found, counts = cast(x, NarrowCast.of("mxfp8", "floor"))
    assert found.dtype is torch.float64 and found.shape == x.shape
    assert found[0, :3].isnan().tolist() == [True, False, False] and found[0, 1:3].isinf().all()
    assert counts[0] == 1 and cast(torch.zeros(0, 4), NarrowCast.of("mxfp8", "floor"))[1].tolist() == [0] * 5
    assert cast(torch.tensor(3.3), NarrowCast.of("mxfp8", "floor"))[0].item() == 3.25


def test_casts_in_words_are_read_back():
    text = "weight E4M3FN tensor, input MXFP8_E4M3 floor, grad_output E5M2 0.5"
    assert casts_in_words(parse_casts(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bias E4M3FN tensor", "casts are written"),
        ("weight E4M3FN", "casts are written"),
        ("weight E4M3FN tensor, weight E5M2 tensor", "casts are written"),
        ("weight E4M3FN amax", "is scaled by none, tensor or a positive number"),
        ("weight mxfp8 tensor", "is scaled by floor, up, amax"),
        ("weight int8 tensor", "INT8 cannot be applied"),
        ("weight fp64 none", "FP64 cannot be applied"),
        ("weight 128x128 amax", "TILE_128X128 cannot be applied"),
        ("weight E4M3FN inf", "positive number"),
    ],
)
def test_other_casts_are_refused(text, reason):
    with pytest.raises(UsageError, match=reason):
        parse_casts(text)
