"""Emulates casts of whole tensors to narrow formats and back, on their device, as ``numerics`` does in NumPy.

The result has values that the format can hold, in the original dtype; counts and squared errors come with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precdoctor.numerics.blocks import BlockFormat, ScaleRule
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.narrow_cast import NarrowCast

#: The counts of :func:`cast`: finite non-zero elements, those that become zero, those beyond the maximum, the sum of
#: squared errors, the sum of squares.
COUNTS = ("elements", "flushed", "saturated", "noise", "signal")
_FP32_BIAS, _FP32_MANTISSA = 127, 23
_LARGEST = torch.finfo(torch.float32).max


def cast(x: Tensor, how: NarrowCast) -> tuple[Tensor, Tensor]:
    """Return ``x`` with values as the format holds them, and the :data:`COUNTS`.

    NaN and Inf stay as they are. Finite elements beyond the range become Inf, or the largest value at their scale if
    the format has no Inf or has blocks.

    Args:
        x: floating point, any shape; cast from FP32.
        how: the format and its scaling.

    Returns:
        A new tensor with dtype, shape and device of ``x``; counts of shape ``(5,)`` on that device, float64 (float32 on
        MPS).
    """
    with torch.no_grad():
        wide = x.detach().to(torch.float32)
        finite = wide.isfinite()
        given = torch.where(finite, wide, 0.0)
        if isinstance(how.format, BlockFormat):
            back, beyond, zero = _cast_blocks(given, how.format, ScaleRule(how.scaling))
        else:
            scale = _scale(given, how)
            quotient, beyond = _rounded(given * scale, how.format, saturate=not how.format.has_infinity)
            back, zero = quotient / scale, quotient == 0.0
        nonzero = given != 0.0
        exact = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no FP64
        sums = (nonzero, zero & nonzero, beyond, (back - given).to(exact).square(), given.to(exact).square())
        counts = torch.stack([s.sum(dtype=exact) for s in sums])
        return torch.where(finite, back, wide).to(x.dtype), counts


def _scale(given: Tensor, how: NarrowCast) -> Tensor:
    """Return the scale of a cast, as a tensor: the given one, or the one that maps the amax to the format's maximum."""
    if how.scale is not None:
        return torch.full((), how.scale, device=given.device)
    amax = given.abs().amax() if given.numel() else given.new_zeros(())
    return torch.where(amax > 0.0, (how.element.max / amax).clamp(max=_LARGEST), 1.0)


def _rounded(x: Tensor, fmt: Format, *, saturate: bool) -> tuple[Tensor, Tensor]:
    """Return FP32 numbers rounded to nearest even, and a mask of those that then lie beyond the format."""
    if fmt.bits == 32:
        return x, torch.zeros_like(x, dtype=torch.bool)
    if fmt.bits == 16:
        out = x.to(torch.bfloat16 if fmt.exponent_bits == 8 else torch.float16).to(torch.float32)
    else:  # ulps of all narrower formats are normal FP32 numbers, so they can be built from exponent bits
        exponent = (x.view(torch.int32) >> _FP32_MANTISSA & 0xFF) - _FP32_BIAS
        ulp = _power_of_two(exponent.clamp(min=1 - fmt.bias) - fmt.mantissa_bits)
        out = (x / ulp).round() * ulp
    beyond = out.abs() > fmt.max
    limit = torch.full((), fmt.max if saturate else torch.inf, device=x.device)
    return torch.where(beyond, torch.copysign(limit, x), out), beyond


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return powers of two in FP32, for int32 exponents from -126 to 127."""
    return (exponent + _FP32_BIAS << _FP32_MANTISSA).view(torch.float32)


def _cast_blocks(given: Tensor, fmt: BlockFormat, rule: ScaleRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cast values, and masks of clipped and of zero elements; blocks run along the last dimension."""
    columns, width = (given.shape[-1] if given.dim() else 1), fmt.block[1]
    rows = given.numel() // max(columns, 1)
    matrix = torch.nn.functional.pad(given.reshape(rows, columns), (0, -columns % width))
    blocks = matrix.reshape(rows, matrix.shape[1] // width, width)
    amax = blocks.abs().amax(dim=2, keepdim=True)
    tensor = torch.ones((), device=given.device)
    if fmt.tensor_scale is not None and amax.numel():
        peak = amax.amax()
        tensor = torch.where(peak > 0.0, peak / (fmt.element.max * fmt.scale.max), 1.0)
    divisors = _block_divisors(amax / tensor, fmt, rule) * tensor
    quotient = torch.where(divisors > 0.0, blocks / divisors, 0.0)
    elements, beyond = _rounded(quotient, fmt.element, saturate=True)
    parts = (elements * divisors, beyond, elements == 0.0)
    values, clipped, zero = (p.reshape(matrix.shape)[:, :columns].reshape(given.shape) for p in parts)
    return values, clipped, zero


def _block_divisors(amax: Tensor, fmt: BlockFormat, rule: ScaleRule) -> Tensor:
    """Return the scale of each block, from its amax, as the scale format holds it; 1 for a block of zeros."""
    if rule is ScaleRule.AMAX:
        scales = _rounded(amax / fmt.element.max, fmt.scale, saturate=True)[0]
    else:
        power = (amax.view(torch.int32) >> _FP32_MANTISSA) - _FP32_BIAS - fmt.element.max_exponent
        power = power.clamp(min=1 - _FP32_BIAS)
        if rule is ScaleRule.UP:
            power = power + (amax / _power_of_two(power) > fmt.element.max).to(torch.int32)
        scales = _power_of_two(power)
        if fmt.scale.kind is Kind.FLOAT:
            scales = _rounded(scales, fmt.scale, saturate=True)[0]
    return torch.where(amax > 0.0, scales, 1.0)
