"""The facts of a cast to float8 that go with the tensor's statistics, and the count of the elements that it clips."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from precdoctor.numerics import EXP_MIN
from precdoctor.numerics.formats import FORMATS, Format, Kind
from precdoctor.recording import kernels
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.slots.deferred import Deferred, read

#: Formats whose tensors are 8-bit floating-point numbers in this torch, by dtype.
FLOAT8: Final[dict[torch.dtype, Format]] = {
    getattr(torch, f.dtype): f
    for f in FORMATS.values()
    if f.kind is Kind.FLOAT and f.bits == 8 and hasattr(torch, f.dtype)
}

#: A multiplier (or, if true, a divisor) that was applied before the cast.
Factor = tuple[Deferred, bool]


@dataclass
class Operand:
    """One cast.

    Attributes:
        factors: their product is the quantiser's scale; None if it is unknown or not a single number.
        whole: whether the tensor was measured before anything could have clipped it.
        by_parts: whether the tensor was scaled by row or block.
    """

    fmt: Format
    factors: tuple[Factor, ...] | None
    whole: bool
    by_parts: bool = False

    def scale(self) -> float | None:
        """Return the product of the factors, None if unknown; waits for the device if necessary (drain thread only)."""
        if self.factors is None:
            return None
        product = 1.0
        for deferred, inverse in self.factors:
            value = read(deferred)
            if value is None:
                return None
            if inverse:
                value = math.inf if value == 0 else 1.0 / value
            product *= value
        return product

    def hides_clipping(self, amax: float) -> bool:
        """Whether elements may have been clipped before the measurement: some are exactly at the maximum."""
        return not self.whole and amax == self.fmt.max


def flush_bins(fmt: Format) -> int:
    """Number of bins of the exponent histogram, from the lowest up, whose elements round to zero in the format.

    Exact: the limit is a power of two, half of the smallest subnormal, and bins include their upper end.
    """
    return math.frexp(fmt.flush_limit)[1] - 1 - EXP_MIN


@functools.cache
def launcher(fmt: Format) -> Callable[[Tensor, int], None]:
    """Return the function that measures a tensor before its cast to ``fmt``, with the count of elements that clip."""

    def stat(x: Tensor, slot: int) -> None:
        kernels.stat(x, slot)
        x = kernels.measurable(x)
        home = kernels.admitted(x.device, slot)
        if home is None:
            return
        ints, floats = home.row(slot)
        if x.is_cpu and not fmt.overflows(float(floats[at.AMAX])):
            return
        for _, piece in reference.chunks(x.detach(), reference.CHUNK_DEVICE):
            magnitude = piece.abs()
            over = fmt.overflows(magnitude)
            ints[at.SATURATED] += over.logical_and_(magnitude <= torch.finfo(x.dtype).max).sum()

    return stat
