"""The history of a tensor before its cast to float8: the tensor it came from, and the scalars that multiplied it.

Tensors are identified by their memory (:mod:`~precdoctor.recording.ops.storage_notes`), so views need no special case.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.slots.cast_operand import Factor
from precdoctor.recording.slots.deferred import defer
from precdoctor.recording.slots.slot_table import Entry


@dataclass(frozen=True)
class History:
    """A tensor's history.

    Attributes:
        origin: ``storage_key`` of the tensor it began as.
        parameter: name of the parameter that it began as; None for another tensor.
        factors: scalars that have multiplied it since; None if something else multiplied it.
        whole: whether no op has clipped it.
        measured: entry of the tensor before it was clipped at the maximum of a format.
        parts: the tensor that multiplied it by row or block (or, if true, divided it), if nothing else did.
    """

    origin: int | None
    parameter: str | None
    factors: tuple[Factor, ...] | None = ()
    whole: bool = True
    measured: Entry | None = None
    parts: tuple[weakref.ref[Tensor], bool] | None = None

    def times(self, factors: tuple[Factor, ...] | None) -> History:
        """Return the history after multiplication by scalars (None: by something else)."""
        together = None if self.factors is None or factors is None else self.factors + factors
        return dataclasses.replace(self, factors=together, measured=None, parts=None)

    def by_parts(self, other: Tensor, *, divide: bool) -> History:
        """Return the history after multiplication or division by one number per row or block."""
        only = self.factors == () and self.parts is None
        return dataclasses.replace(self.times(None), parts=(weakref.ref(other), divide) if only else None)


def scaled(a: Any, b: Any, result: Tensor, *, divide: bool) -> tuple[Tensor, tuple[Factor, ...] | Tensor] | None:
    """Find which operand of ``a * b`` or ``a / b`` is the data, and the scalar or tensor that multiplies it.

    None if neither operand scales the other: both are as large as the result, or the result is a scalar itself.
    """
    first = divide or (isinstance(a, Tensor) and a.numel() == result.numel())
    data, other = (a, b) if first else (b, a)
    size = result.numel()
    if size == 1 or not is_float(data) or data.numel() != size:
        return None
    if isinstance(other, Tensor) and other.numel() == size:
        return None
    factor = scalar(other)
    if factor is None:
        return (data, other) if isinstance(other, Tensor) and other.numel() > 1 else None
    return data, ((factor, divide),)


def scalar(value: Any) -> Any:
    """Return a number to be read later; None if ``value`` is not one number, as with scales per row or block."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.dtype.is_complex:
        return None
    with kernels.apart_from_user_modes():
        return defer(value.detach(), by_drain=True)


def bound(lower: Any, upper: Any) -> float | None:
    """Return ``m`` of a clamp to ``[-m, m]``; None for any other clamp, or if reading a bound would need a device."""
    low, high = _number(lower), _number(upper)
    return high if high is not None and low is not None and low == -high else None


def _number(value: Any) -> float | None:
    """Return a bound as a float; None if it is not one number, or not on the CPU."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_cpu:
            return None
        with kernels.apart_from_user_modes():
            return float(value)
    return float(value) if isinstance(value, (int, float)) else None


def is_float(x: Any) -> bool:
    """Whether ``x`` is a dense tensor of floating-point numbers wider than 8 bits."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize > 1 and x.layout is torch.strided
