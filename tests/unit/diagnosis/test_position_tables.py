"""Tensors in FP32 that hold 16-bit numbers only."""

import numpy as np
import pytest

from precdoctor.diagnosis.families.configuration.half_precision_positions import rounded_to
from precdoctor.diagnosis.survey.rows import TensorRow
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import BF16, FP16, FP32
from tests.support.training import histogram, tensor


def row(values: np.ndarray) -> TensorRow:
    """Of a buffer in FP32."""
    record = tensor(0, "buffer", "rotary", 0, name="inv_freq", dtype="float32", rank=0, call=0, subnormal=0, at_max=0)
    return TensorRow.of(record | histogram(values))


def frequencies(base: float, dim: int) -> np.ndarray:
    return (base ** -(np.arange(0, dim, 2) / dim)).astype(np.float32)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_frequencies_that_were_rounded(base: float, dim: int) -> None:
    assert rounded_to(row(cast_array(frequencies(base, dim), BF16))) is BF16
    assert rounded_to(row(cast_array(frequencies(base, dim), FP16))) in (BF16, FP16)  # rarely, all bits beyond cancel


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0])
def test_frequencies_in_fp32(base: float, dim: int) -> None:
    assert rounded_to(row(cast_array(frequencies(base, dim), FP32))) is None


@pytest.mark.parametrize(
    "values",
    [
        np.arange(512.0),
        2.0 ** np.arange(-8.0, 8.0),
        np.arange(1.0, 65.0) / 64.0,
        np.tril(np.ones((24, 24))),
        np.zeros(64),
        np.array([np.nan, 1.0, 0.1]),
    ],
    ids=["counts", "powers of two", "fractions of 64", "a mask", "zeros", "a NaN"],
)
def test_numbers_that_need_no_rounding(values: np.ndarray) -> None:
    assert rounded_to(row(values)) is None


def test_other_formats_say_themselves_what_they_are() -> None:
    record = tensor(0, "buffer", "rotary", 0, dtype="bfloat16", rank=0, call=0, subnormal=0, at_max=0, name="inv_freq")
    assert rounded_to(TensorRow.of(record | histogram(cast_array(frequencies(1e4, 64), BF16)))) is None
