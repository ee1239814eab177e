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

from precdoctor.numerics.casting_array import Floats, cast_array
from precdoctor.numerics.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, E8M0, FP32, Format
from precdoctor.numerics.histogram import ExponentHistogram, bins_of


class ScaleRule(enum.Enum):
    """How a block's scale follows from its amax. What is stored is the divisor ``X``: elements hold ``x / X``."""

    #: ``2**(floor(log2 amax) - emax)``, [MX] section 6.3: elements above the maximum are clipped (0.3 % of a Gaussian).
    FLOOR = "floor"
    #: The smallest power of two with ``amax / X <= max``: nothing is clipped, up to half a binade of range is given up.
    UP = "up"
    #: ``amax / max``, rounded to nearest in the scale's format.
    AMAX = "amax"


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """An element format, a scale format, and who shares a scale."""

    name: str
    element: Format
    scale: Format
    #: Rows and columns that share one scale; columns run along the last dimension.
    block: tuple[int, int]
    rule: ScaleRule
    #: A second scale for the whole tensor, which brings the block scales into range.
    tensor_scale: Format | None = None
    source: str

    @property
    def bits_per_element(self) -> float:
        """Memory per element with its share of the block's scale, in bits."""
        return self.element.bits + self.scale.bits / (self.block[0] * self.block[1])


MXFP8_E4M3 = BlockFormat(
    name="MXFP8_E4M3", element=E4M3FN, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0"
)
MXFP8_E5M2 = BlockFormat(
    name="MXFP8_E5M2", element=E5M2, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0"
)
MXFP6_E3M2 = BlockFormat(
    name="MXFP6_E3M2", element=E3M2, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0"
)
MXFP6_E2M3 = BlockFormat(
    name="MXFP6_E2M3", element=E2M3, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0"
)
MXFP4 = BlockFormat(name="MXFP4", element=E2M1, scale=E8M0, block=(1, 32), rule=ScaleRule.FLOOR, source="OCP MX 1.0")
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


@dataclass(frozen=True, eq=False)
class BlockCast:
    """What a block cast made of a matrix.

    Attributes:
        values: scaled back, float64, the shape of the input.
        quotients: what the elements were before they were rounded: ``x / scale``; same shape.
        scales: the divisor of every block, tensor scale included, spread over its elements; same shape.
    """

    values: Floats
    quotients: Floats
    scales: Floats


def cast_blocks(matrix: Floats, fmt: BlockFormat, *, rule: ScaleRule | None = None) -> BlockCast:
    """Casts a matrix the way the format's kernels do, elements saturating, and scales it back.

    A block whose scale underflows to zero becomes zero (possible in NVFP4 only). All-zero blocks stay zero.

    Args:
        matrix: finite, float64, shape ``(rows, columns)``; short blocks at the ends stand alone.
        fmt: the block format.
        rule: another scale rule than the format's own.

    Raises:
        ValueError: not two-dimensional, or an element is not finite.
    """
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise ValueError("a block cast needs a matrix of finite numbers")
    rows, columns = matrix.shape
    height, width = fmt.block
    padded = np.zeros((-(-rows // height) * height, -(-columns // width) * width))
    padded[:rows, :columns] = np.abs(matrix)
    amax = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width).max(axis=(1, 3))
    tensor = tensor_divisor(float(amax.max(initial=0.0)), fmt)
    divisors = block_divisors(amax / tensor, fmt, rule or fmt.rule) * tensor
    spread = np.repeat(np.repeat(divisors, height, axis=0), width, axis=1)[:rows, :columns]
    quotients = np.divide(matrix, spread, out=np.zeros_like(matrix), where=spread > 0.0)
    return BlockCast(cast_array(quotients, fmt.element, saturate=True) * spread, quotients, spread)


def tensor_divisor(amax: float, fmt: BlockFormat) -> float:
    """The scale of the whole tensor: what makes the largest block scale the scale format's maximum. 1 without one."""
    if fmt.tensor_scale is None or amax == 0.0:
        return 1.0
    ideal = amax / (fmt.element.max * fmt.scale.max)
    return max(float(cast_array(ideal, fmt.tensor_scale)), fmt.tensor_scale.min_subnormal)


def block_divisors(amax: Floats, fmt: BlockFormat, rule: ScaleRule) -> Floats:
    """The scale ``X`` of each block from its amax (over the tensor's scale), as its format holds it.

    All-zero blocks get 1, the scale of a block too small for the scale format is its smallest number, or 0 if it
    rounds to that.
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
    """What the log holds about blocks of one size (``block32_hist``, ``block32_amax_lo``, ``block32_amax_hist`` ...).

    Attributes:
        size: elements per block, along the last dimension: 16, 32 or 128.
        below: entry ``r`` counts the non-zero elements whose bin is ``r`` below their block's amax; the last of 64
            entries also counts all further ones. Trailing zeros may be missing.
        amax: blocks by the bin of their amax, all-zero blocks left out.
    """

    size: int
    below: tuple[int, ...]
    amax: ExponentHistogram

    #: Entries of ``below`` in full; the last one is open-ended.
    LIMIT = 64

    @classmethod
    def of_row(cls, row: Mapping[str, Any], size: int) -> BlockHistogram | None:
        """From a ``tensors`` row's ``block<size>_hist``, ``_amax_lo`` and ``_amax_hist``; None if not recorded."""
        below = row.get(f"block{size}_hist")
        if below is None or isinstance(below, float):  # pandas puts NaN for a missing list
            return None
        amax = row.get(f"block{size}_amax_lo"), row.get(f"block{size}_amax_hist")
        return cls(size, tuple(int(n) for n in below), ExponentHistogram.of(*amax))

    @classmethod
    def of_values(cls, matrix: Floats, size: int) -> BlockHistogram:
        """Counted from a matrix, shape ``(rows, columns)``; blocks run along rows, a short last one stands alone."""
        finite = np.where(np.isfinite(matrix), matrix, 0.0)
        padded = np.zeros((matrix.shape[0], -(-matrix.shape[1] // size) * size))
        padded[:, : matrix.shape[1]] = finite
        blocks = padded.reshape(-1, size)
        peak = np.abs(blocks).max(axis=1, initial=0.0)
        used = peak > 0.0
        bins, peak_bins = bins_of(blocks[used]), bins_of(peak[used])
        below = np.minimum(peak_bins[:, None] - bins, cls.LIMIT - 1)[blocks[used] != 0.0]
        counts = np.trim_zeros(np.bincount(below, minlength=1), "b")
        return cls(size, tuple(counts.tolist()), ExponentHistogram.of_values(peak[used]))
