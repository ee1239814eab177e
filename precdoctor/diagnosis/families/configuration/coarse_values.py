"""FP32 tensors that hold 16-bit numbers only: computed in half precision, or converted to it and back.

Numbers between ``2**e`` and ``2**(e + 1)`` are multiples of ``2**(e - 7)`` in BF16, of ``2**(e - 10)`` in FP16 and of
``2**(e - 23)`` in FP32. If all of a tensor's elements are multiples of the first of them, at the exponent of the
smallest one, so are their sum and, squared, the sum of their squares, which a log has in FP64. Of FP32 numbers the
smallest alone is one by a chance of 2^-16 (2^-13); sums of FP16 numbers pass for those of BF16 once in some dozens.
Numbers with fewer significant bits still are no sign of rounding: counts, powers of two and fractions of them have few
of their own.
"""

from __future__ import annotations

import math

from precdoctor.diagnosis.survey.rows import TensorRow
from precdoctor.numerics.formats import BF16, FP16, Format

#: Counts in a sum are exact in FP64 up to here.
_EXACT = 2.0**52
#: Significant bits below the leading one that a tensor of few bits of its own does not have.
_OWN = 4


def rounded_to(row: TensorRow) -> Format | None:
    """The 16-bit format that holds all elements of an FP32 tensor; None where none does or it needs no rounding."""
    if row.dtype != "float32" or row.bad or not row.amin_nonzero or row.amax is None or row.numel < 2:
        return None
    exponent = math.frexp(row.amin_nonzero)[1] - 1
    if _are_multiples(row, 2.0 ** (exponent - _OWN)):
        return None
    return next((f for f in (BF16, FP16) if _are_multiples(row, 2.0 ** (exponent - f.mantissa_bits))), None)


def _are_multiples(row: TensorRow, grid: float) -> bool:
    if row.amax is None or row.sum is None or row.sum_sq is None:
        return False
    counts = row.amax / grid, abs(row.sum) / grid, row.sum_sq / grid / grid
    return all(c <= _EXACT and c == round(c) for c in counts)
