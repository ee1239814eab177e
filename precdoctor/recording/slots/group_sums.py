"""Histograms of elements by their ratio to the amax of their token, channel, head or 128 features, for inference runs.

For their meaning, and what is predicted from them, see :mod:`precdoctor.numerics.group_prediction`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from precdoctor.numerics.group_prediction import LIMIT
from precdoctor.recording import kernels
from precdoctor.recording.slots.deferred import deferred, is_capturing

_CACHED: Final = {"token": (3,), "channel": (0, 2), "head": (0, 2, 3), "group128": (3,)}
#: Groupings of each kind of tensor; the dimensions that share a scale, out of sequences x heads x tokens x features.
_SHARED: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "weight": {"channel": (3,), "group128": (3,)},  # a token of a weight is one of its output channels
    "input": {"token": (3,), "channel": (0, 1, 2), "group128": (3,)},
    "output": {"token": (3,), "channel": (0, 1, 2), "group128": (3,)},
    "kv_key": _CACHED,
    "kv_value": _CACHED,
}
_ROW: Final = 128
#: Elements processed together: the temporaries take 40 times their bytes.
_CHUNK: Final = 1 << 18


class GroupSums(NamedTuple):
    """The sums of one tensor; ``numbers`` returns, per grouping, counts and then energies, each ``LIMIT`` long."""

    groupings: tuple[str, ...]
    numbers: Callable[[], list[float]]


def measured_groups(kind: str, x: Tensor) -> list[GroupSums]:
    """:func:`group_sums` of a tensor of the user's; empty also if memory runs out or a CUDA graph is captured."""
    if is_capturing():
        return []
    with kernels.apart_from_user_modes():
        try:
            found = group_sums(kind, x)
        except torch.OutOfMemoryError:
            return []
    return [found] if found is not None else []


def group_sums(kind: str, x: Tensor) -> GroupSums | None:
    """Measure a tensor; None if its kind or shape has no groups.

    Args:
        kind: of the tensor's row.
        x: dense, floating-point; weights with the output channel first, cached keys and values as sequences x heads x
            tokens x features, others with features last, or second from four dimensions on.
    """
    shared, x = _SHARED.get(kind, {}), kernels.measurable(x.detach())
    y = _as_four(kind, x)
    if y is None or not shared:
        return None
    sums = torch.zeros((len(shared), 2, LIMIT + 1), dtype=torch.float64, device=y.device)
    rows = max(1, _CHUNK // max(1, y.numel() // y.shape[2]))
    chunks = [(first, y[:, :, first : first + rows]) for first in range(0, y.shape[2], rows)]
    for name, out in zip(shared, sums, strict=True):
        dims = shared[name]
        whole = None
        if 2 in dims:
            whole = functools.reduce(torch.maximum, (_finite(part).amax(dims, keepdim=True) for _, part in chunks))
        for _, part in chunks:
            magnitudes = _finite(part)
            if name == "group128":
                magnitudes = _in_rows(magnitudes)
            amax = magnitudes.amax(dims, keepdim=True) if whole is None else whole
            _add(magnitudes, amax, out)
            if whole is None:
                _leave_out_largest(amax, out)
        if whole is not None:
            _leave_out_largest(whole, out)
    return GroupSums(tuple(shared), deferred(sums[..., :LIMIT].clamp(min=0.0).flatten()))


def _as_four(kind: str, x: Tensor) -> Tensor | None:
    """View a tensor as sequences x heads x tokens x features; None if its shape does not fit its kind."""
    if kind in ("kv_key", "kv_value"):
        return x if x.dim() == 4 else None
    if x.dim() < 2:
        return None
    if kind == "weight":
        return x.flatten(1)[None, None]
    x = x.movedim(1, -1) if x.dim() > 3 else x
    return x.flatten(0, -2)[None, None]


def _finite(x: Tensor) -> Tensor:
    """Return magnitudes in FP32 or FP64, with 0 for NaN and Inf."""
    x = x.abs()
    return torch.nan_to_num(x if x.dtype is torch.float64 else x.float(), nan=0.0, posinf=0.0)


def _in_rows(magnitudes: Tensor) -> Tensor:
    """Split the last dimension into rows of 128; the last row is padded with zeros, which are not counted."""
    short = -magnitudes.shape[-1] % _ROW
    padded = torch.nn.functional.pad(magnitudes, (0, short)) if short else magnitudes
    return padded.reshape(1, 1, -1, _ROW)


def _add(magnitudes: Tensor, amax: Tensor, out: Tensor) -> None:
    """Add counts and energies by binade below the amax; zeros go to an entry of their own, the last."""
    mantissa, exponent = torch.frexp(magnitudes / amax)
    place = torch.where(mantissa == 0.5, 1 - exponent, -exponent).clamp(0, LIMIT - 1)
    place = place.masked_fill(magnitudes == 0.0, LIMIT).flatten().long()
    energy = amax.double().square().expand(magnitudes.shape).flatten()
    if out.is_cpu:
        out[0] += torch.bincount(place, minlength=LIMIT + 1)
        out[1] += torch.bincount(place, energy, minlength=LIMIT + 1)
    else:  # on CUDA, bincount with weights has no deterministic form
        out[0].index_add_(0, place, torch.ones_like(energy))
        out[1].index_add_(0, place, energy)


def _leave_out_largest(amax: Tensor, out: Tensor) -> None:
    """Subtract the largest element of each group from entry 0, where it was counted."""
    out[0, 0] -= (amax > 0.0).sum()
    out[1, 0] -= amax.double().square().sum()
