"""The number formats of training runs. Each is one literal, to be checked against the standard that it cites.

A code is sign, exponent, mantissa, from the top bit down. With exponent field ``E`` and mantissa field ``M`` of ``m``
bits, its magnitude is ``M * 2**(1 - bias - m)`` when ``E`` is 0 and ``(2**m + M) * 2**(E - bias - m)`` otherwise. An
integer is the format without an exponent: all of its codes are of the first kind, one apart.

Sources: [IEEE] IEEE 754-2019, section 3; [BF16] "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322;
[TF32] NVIDIA A100 Tensor Core GPU Architecture (2020); [OFP8] OCP 8-bit Floating Point Specification 1.0, tables 1 and
2; [FNUZ] "8-bit Numerical Formats for Deep Neural Networks", arXiv:2206.02915; [MX] OCP Microscaling Formats (MX)
Specification 1.0, section 5.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from precdoctor.errors import UsageError


class Kind(enum.Enum):
    """The kind of numbers that the codes of a format represent."""

    FLOAT = "float"
    #: Two's complement; quantisers multiply by a scale first.
    INTEGER = "integer"
    #: Powers of two that scale a block: no sign, no zero.
    SCALE = "scale"


class NaN(enum.Enum):
    """Which codes of a format are NaN."""

    NONE = "none"
    IEEE = "all ones in the exponent, mantissa not zero"
    ALL_ONES = "all ones below the sign"
    NEGATIVE_ZERO = "the code that would be negative zero"


@dataclass(frozen=True)
class Format:
    """A binary number format, described by the properties that matter in training. Every value is exact in float64.

    All floating-point formats listed here have subnormals, and hardware honours them.
    """

    name: str
    #: Name of the dtype in the log, in torch or, if neither has it, in ml_dtypes, without the module's prefix.
    dtype: str
    exponent_bits: int
    #: Stored mantissa bits, the implicit leading one not counted.
    mantissa_bits: int
    bias: int
    #: Largest finite value.
    max: float
    nan: NaN
    source: str
    kind: Kind = Kind.FLOAT
    #: Whether tensors can be stored in it; false for a format that exists only inside a matrix unit (TF32).
    stored: bool = True

    @property
    def has_infinity(self) -> bool:
        """Whether an overflowing cast gives Inf (IEEE 754); else NaN, or the maximum in a format without NaN."""
        return self.nan is NaN.IEEE

    @property
    def sign_bits(self) -> int:
        """Number of sign bits: 1, or 0 for a scale."""
        return 0 if self.kind is Kind.SCALE else 1

    @property
    def bits(self) -> int:
        """Number of bits of a code (19 for TF32, which occupies 32 in memory)."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def has_subnormals(self) -> bool:
        """Whether some numbers have fewer significant bits than the others."""
        return self.kind is Kind.FLOAT

    @property
    def min(self) -> float:
        """Most negative finite value; for a scale, the smallest value."""
        if self.kind is Kind.SCALE:
            return self.min_subnormal
        return -self.max - 1.0 if self.kind is Kind.INTEGER else -self.max

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number, ``2**(1 - bias)``.

        ``2**-bias`` for a scale, whose exponent field 0 is normal also. An integer format has no normal numbers: there
        this is the first number above its range.
        """
        return math.ldexp(1.0, (0 if self.kind is Kind.SCALE else 1) - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number, ``2**(1 - bias - mantissa_bits)``; for a scale, ``2**-bias``."""
        return self.min_normal if self.kind is Kind.SCALE else math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def flush_limit(self) -> float:
        """Magnitudes up to and including this one round to zero (nearest, ties to even): half of ``min_subnormal``.

        0.0 for FP64, because the half is below float64's range, and for a scale, which has no zero.
        """
        return 0.0 if self.kind is Kind.SCALE else self.min_subnormal / 2.0

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``; "emax" in [MX]."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite value, sign bit 0. Codes 0 to ``max_code`` are the magnitudes in order."""
        everything = 1 << (self.exponent_bits + self.mantissa_bits)
        if self.nan is NaN.IEEE:
            return everything - (1 << self.mantissa_bits) - 1
        return everything - (2 if self.nan is NaN.ALL_ONES else 1)

    @property
    def overflow_limit(self) -> float:
        """Positive values above this limit overflow under round-to-nearest; the limit itself: ``tie_overflows``.

        It is the midpoint between ``max`` and the value that would come next.
        """
        ulp = (
            self.min_subnormal if self.kind is Kind.INTEGER else math.ldexp(1.0, self.max_exponent - self.mantissa_bits)
        )
        return self.max + ulp / 2.0

    @property
    def tie_overflows(self) -> bool:
        """Whether a value of exactly ``overflow_limit`` overflows: the tie goes to the neighbour with an even code.

        The even neighbour is the one outside, except in E4M3FN: its 448 has an even code, so 464 still rounds to 448.
        """
        return self.kind is Kind.SCALE or self.max_code % 2 == 1

    def overflows(self, magnitude: Any) -> Any:
        """Whether magnitudes (a number, an array or a torch tensor) overflow under round-to-nearest; false for NaN."""
        return magnitude >= self.overflow_limit if self.tie_overflows else magnitude > self.overflow_limit

    @property
    def ulp_at_one(self) -> float:
        """Distance from 1 to the next larger number ("machine epsilon")."""
        return 1.0 if self.kind is Kind.INTEGER else math.ldexp(1.0, -self.mantissa_bits)

    @property
    def binades(self) -> float:
        """``log2`` of the largest over the smallest positive number, subnormals included."""
        return math.log2(self.max) - math.log2(self.min_subnormal)

    @property
    def decades(self) -> float:
        """``log10`` of the largest over the smallest positive *normal* number (for an integer: over 1)."""
        return math.log10(self.max) - (0.0 if self.kind is Kind.INTEGER else math.log10(self.min_normal))

    def headroom(self, amax: float) -> float:
        """Binades between ``amax`` (a magnitude > 0) and the largest finite value: ``log2(max / amax)``."""
        return math.log2(self.max) - math.log2(amax)


# Columns: name, dtype, exponent bits, mantissa bits, bias, largest finite value, codes of NaN, source.
FP64 = Format("FP64", "float64", 11, 52, 1023, (2 - 2**-52) * 2.0**1023, NaN.IEEE, "IEEE 754-2019 binary64")
FP32 = Format("FP32", "float32", 8, 23, 127, (2 - 2**-23) * 2.0**127, NaN.IEEE, "IEEE 754-2019 binary32")
TF32 = Format(
    "TF32", "tfloat32", 8, 10, 127, (2 - 2**-10) * 2.0**127, NaN.IEEE,
    "NVIDIA A100 Tensor Core GPU Architecture (2020)", stored=False,
)  # fmt: skip
BF16 = Format("BF16", "bfloat16", 8, 7, 127, (2 - 2**-7) * 2.0**127, NaN.IEEE, "arXiv:1905.12322")
FP16 = Format("FP16", "float16", 5, 10, 15, 65504.0, NaN.IEEE, "IEEE 754-2019 binary16")
E5M2 = Format("E5M2", "float8_e5m2", 5, 2, 15, 57344.0, NaN.IEEE, "OCP OFP8 1.0, table 2")
E5M2FNUZ = Format("E5M2FNUZ", "float8_e5m2fnuz", 5, 2, 16, 57344.0, NaN.NEGATIVE_ZERO, "arXiv:2206.02915")
E4M3FN = Format("E4M3FN", "float8_e4m3fn", 4, 3, 7, 448.0, NaN.ALL_ONES, "OCP OFP8 1.0, table 1")
E4M3FNUZ = Format("E4M3FNUZ", "float8_e4m3fnuz", 4, 3, 8, 240.0, NaN.NEGATIVE_ZERO, "arXiv:2206.02915")
# The dtype is ml_dtypes' spelling; to most people "e4m3" is E4M3FN.
E4M3_IEEE = Format("E4M3_IEEE", "float8_e4m3", 4, 3, 7, 240.0, NaN.IEEE, "IEEE 754-2019 rules with 4 exponent bits")
E3M2 = Format("E3M2", "float6_e3m2fn", 3, 2, 3, 28.0, NaN.NONE, "OCP MX 1.0, section 5.3.2")
E2M3 = Format("E2M3", "float6_e2m3fn", 2, 3, 1, 7.5, NaN.NONE, "OCP MX 1.0, section 5.3.2")
E2M1 = Format("E2M1", "float4_e2m1fn", 2, 1, 1, 6.0, NaN.NONE, "OCP MX 1.0, section 5.3.3")
INT8 = Format(
    "INT8", "int8", 0, 7, -6, 127.0, NaN.NONE,
    "two's complement; the INT8 of OCP MX 1.0 has an implied scale of 2^-6", Kind.INTEGER,
)  # fmt: skip
INT4 = Format("INT4", "int4", 0, 3, -2, 7.0, NaN.NONE, "two's complement", Kind.INTEGER)
E8M0 = Format("E8M0", "float8_e8m0fnu", 8, 0, 127, 2.0**127, NaN.ALL_ONES, "OCP MX 1.0, section 5.4.1", Kind.SCALE)

#: Every format a tensor's elements can have, by name, widest first.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        *(FP64, FP32, TF32, BF16, FP16),
        *(E5M2, E5M2FNUZ, E4M3FN, E4M3FNUZ, E4M3_IEEE),
        *(E3M2, E2M3, E2M1, INT8, INT4),
    )
}
#: Formats that hold the scale of a block, never an element.
SCALE_FORMATS: dict[str, Format] = {E8M0.name: E8M0}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def format_of_dtype(dtype: str) -> Format:
    """Return the element format of a dtype as the log spells it (``float16``, ``bfloat16``, ``float8_e4m3fn`` ...).

    Raises:
        UsageError: no element format has this dtype.
    """
    try:
        return _BY_DTYPE[dtype.removeprefix("torch.")]
    except KeyError:
        raise UsageError(f"no number format for dtype {dtype!r}; known: {', '.join(_BY_DTYPE)}") from None
