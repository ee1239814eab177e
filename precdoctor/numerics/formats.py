"""The number formats training runs are made of, one literal each.

Sources: IEEE 754-2019 section 3 (binary16/32/64); "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322;
OCP 8-bit Floating Point Specification (OFP8) revision 1.0, tables 1 and 2 (E4M3 and E5M2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from precdoctor.errors import UsageError


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, described by the five numbers that matter to a training run.

    Every value is exact in float64. All formats listed here have subnormals, and hardware honours them.
    """

    name: str
    #: What torch calls it, without the ``torch.`` prefix; this is the spelling used in the log.
    dtype: str
    exponent_bits: int
    #: Stored mantissa bits, the implicit leading one not counted.
    mantissa_bits: int
    bias: int
    #: Largest finite value.
    max: float
    #: An overflowing cast gives Inf (true) or, for E4M3FN, NaN or the maximum (false).
    has_infinity: bool

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number, ``2**(1 - bias)``."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number, ``2**(1 - bias - mantissa_bits)``."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def flush_limit(self) -> float:
        """Magnitudes up to and including this one round to zero (nearest, ties to even): half of ``min_subnormal``.

        For FP64 this is itself below the smallest float64 and reads 0.0.
        """
        return self.min_subnormal / 2.0

    @property
    def overflow_limit(self) -> float:
        """Magnitudes at or above this one leave the format under round-to-nearest.

        It is the midpoint between ``max`` and the value that would come next; the tie goes to the even neighbour, which
        is the one outside, except in E4M3FN, whose 448 ends in an even mantissa: there 464 itself still rounds to 448.
        """
        ulp = math.ldexp(1.0, math.frexp(self.max)[1] - 1 - self.mantissa_bits)
        return self.max + ulp / 2.0

    def headroom(self, amax: float) -> float:
        """Binades between ``amax`` (a magnitude > 0) and the largest finite value: ``log2(max / amax)``."""
        return math.log2(self.max) - math.log2(amax)


FP64 = Format("FP64", "float64", 11, 52, 1023, float.fromhex("0x1.fffffffffffffp+1023"), has_infinity=True)
FP32 = Format("FP32", "float32", 8, 23, 127, float.fromhex("0x1.fffffep+127"), has_infinity=True)
FP16 = Format("FP16", "float16", 5, 10, 15, 65504.0, has_infinity=True)
BF16 = Format("BF16", "bfloat16", 8, 7, 127, float.fromhex("0x1.fep+127"), has_infinity=True)
E4M3FN = Format("E4M3FN", "float8_e4m3fn", 4, 3, 7, 448.0, has_infinity=False)
E4M3FNUZ = Format("E4M3FNUZ", "float8_e4m3fnuz", 4, 3, 8, 240.0, has_infinity=False)
E5M2 = Format("E5M2", "float8_e5m2", 5, 2, 15, 57344.0, has_infinity=True)
E5M2FNUZ = Format("E5M2FNUZ", "float8_e5m2fnuz", 5, 2, 16, 57344.0, has_infinity=False)

#: Every scalar format by name, widest first.
FORMATS: dict[str, Format] = {f.name: f for f in (FP64, FP32, BF16, FP16, E5M2, E5M2FNUZ, E4M3FN, E4M3FNUZ)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}


def format_of_dtype(dtype: str) -> Format:
    """The format behind a dtype as the log spells it (``float16``, ``bfloat16``, ``float8_e4m3fn`` ...).

    Raises:
        UsageError: the dtype is not a floating-point type precdoctor knows.
    """
    try:
        return _BY_DTYPE[dtype.removeprefix("torch.")]
    except KeyError:
        raise UsageError(f"no number format for dtype {dtype!r}; known: {', '.join(_BY_DTYPE)}") from None
