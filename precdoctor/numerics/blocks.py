"""Block formats: elements in a narrow format, with a scale that a block of them shares.

Sources: [MX] OCP Microscaling Formats (MX) Specification 1.0, sections 5.1 and 6.3; [NVFP4] "Pretraining Large
Language Models with NVFP4", arXiv:2509.25149; [tiles] "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.numerics.arrays import Floats
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, E8M0, FP32, Format
from precdoctor.numerics.histogram import ExponentHistogram


class ScaleRule(enum.Enum):
    """How a block's scale follows from its amax. The stored scale is the divisor ``X``: elements hold ``x / X``."""

    #: ``2**(floor(log2 amax) - emax)``, [MX] section 6.3: elements above the maximum are clipped (0.3 % of a Gaussian).
    FLOOR = "floor"
    #: The smallest power of two with ``amax / X <= max``: clips nothing, wastes up to a binade of range.
    UP = "up"
    #: ``amax / max``, rounded to nearest in the scale's format.
    AMAX = "amax"


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """An element format, a scale format, and the shape of the block that shares one scale."""

    name: str
    element: Format
    scale: Format
    #: Rows and columns that share one scale; columns run along the last dimension.
    block: tuple[int, int]
    rule: ScaleRule
    #: Format of a second scale for the whole tensor, which brings the block scales into range; None without one.
    tensor_scale: Format | None = None
    source: str

    @property
    def bits_per_element(self) -> float:
        """Memory per element with its share of the block's scale, in bits."""
        return self.element.bits + self.scale.bits / (self.block[0] * self.block[1])


def _mx(name: str, element: Format) -> BlockFormat:
    """Return the format of [MX] with these elements: blocks of 32 with a power of two as scale."""
    return BlockFormat(name=name, element=element, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0")


MXFP8_E4M3 = _mx("MXFP8_E4M3", E4M3FN)
MXFP8_E5M2 = _mx("MXFP8_E5M2", E5M2)
MXFP6_E3M2 = _mx("MXFP6_E3M2", E3M2)
MXFP6_E2M3 = _mx("MXFP6_E2M3", E2M3)
MXFP4 = _mx("MXFP4", E2M1)
NVFP4 = BlockFormat(
    name="NVFP4",
    element=E2M1,
    scale=E4M3FN,
    block=(1, 16),
    rule=ScaleRule.AMAX,
    tensor_scale=FP32,
    source="arXiv:2509.25149",
)
TILE_1X128 = BlockFormat(
    name="TILE_1X128", element=E4M3FN, scale=FP32, block=(1, 128), rule=ScaleRule.AMAX, source="arXiv:2412.19437"
)
TILE_128X128 = BlockFormat(
    name="TILE_128X128", element=E4M3FN, scale=FP32, block=(128, 128), rule=ScaleRule.AMAX, source="arXiv:2412.19437"
)

#: Every block format by name.
BLOCK_FORMATS: dict[str, BlockFormat] = {
    f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4, TILE_1X128, TILE_128X128)
}


def tensor_divisor(amax: float, fmt: BlockFormat) -> float:
    """Return the tensor's scale, which brings the largest block scale to its format's maximum; 1 if there is none."""
    if fmt.tensor_scale is None or amax == 0.0:
        return 1.0
    ideal = amax / (fmt.element.max * fmt.scale.max)
    return max(float(cast_array(ideal, fmt.tensor_scale)), fmt.tensor_scale.min_subnormal)


def block_divisors(amax: Floats, fmt: BlockFormat, rule: ScaleRule) -> Floats:
    """Return each block's scale ``X``, rounded to its format, from the block's amax divided by the tensor's scale.

    All-zero blocks get 1. A scale below the range of its format becomes the format's smallest number, or 0 if it rounds
    to 0.
    """
    if rule is ScaleRule.AMAX:
        scales = cast_array(amax / fmt.element.max, fmt.scale, saturate=True)
    else:
        mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
        power = exponent - 1 - fmt.element.max_exponent
        if rule is ScaleRule.UP:
            power = power + (mantissa > math.frexp(fmt.element.max)[0])
        scales = cast_array(np.ldexp(1.0, power), fmt.scale, saturate=True)
    return np.where(amax > 0.0, scales, 1.0)


@dataclass(frozen=True)
class BlockHistogram:
    """The log's columns on blocks of one size (``block32_hist``, ``block32_amax_lo``, ``block32_amax_hist`` ...).

    Attributes:
        size: elements per block, along the last dimension: 16, 32 or 128.
        below: entry ``r`` counts the non-zero elements whose bin is ``r`` below their block's amax; the last of 64
            entries also counts those further below. Trailing zeros may be missing.
        amax: histogram of the blocks' amax, all-zero blocks left out.
    """

    size: int
    below: tuple[int, ...]
    amax: ExponentHistogram

    #: Maximum number of entries of ``below``; the last one is open-ended.
    LIMIT = 64

    @classmethod
    def of_row(cls, row: Mapping[str, Any], size: int) -> BlockHistogram | None:
        """Read a ``tensors`` row's ``block<size>_hist``, ``_amax_lo`` and ``_amax_hist``; None if not recorded."""
        below = row.get(f"block{size}_hist")
        if below is None or isinstance(below, float):  # pandas puts NaN for a missing list
            return None
        amax = row.get(f"block{size}_amax_lo"), row.get(f"block{size}_amax_hist")
        return cls(size, tuple(int(n) for n in below), ExponentHistogram.of(*amax))
