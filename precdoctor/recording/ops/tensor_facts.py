"""Facts of one tensor that took part in a suspect op: counts, extremes, and the place of the first bad element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.process import attach

#: Bits for the kinds of non-finite values in a tensor.
NAN, POS_INF, NEG_INF = 1, 2, 4

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the package: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def badness(x: Tensor) -> int:
    """Return the kinds of non-finite values in ``x``, as bits ``NAN``, ``POS_INF`` and ``NEG_INF``; 0: none."""
    real = readable(x)
    if real is None or bool(torch.isfinite(real).all()):
        return 0
    found = NAN if bool(torch.isnan(real).any()) else 0
    found |= POS_INF if bool((real == torch.inf).any()) else 0
    return found | (NEG_INF if bool((real == -torch.inf).any()) else 0)


def readable(x: Tensor) -> Tensor | None:
    """Return the elements of ``x`` as real floating-point numbers; None for integers, or without dense elements."""
    if x.layout is not torch.strided or x.is_meta or x.is_nested or x.numel() == 0:
        return None
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj())
    if x.dtype in _REAL:
        return x
    return x.float() if x.dtype.is_floating_point else None  # FP8 has neither comparisons nor reductions


def describe(x: Tensor) -> dict[str, Any]:
    """Return the facts of one tensor, as published in docs/run-log.md.

    Extremes are over finite elements; ``amin_nonzero`` is the smallest non-zero magnitude; ``first_bad`` is the index
    of the first non-finite element in logical order.
    """
    facts: dict[str, Any] = {"dtype": dtype_name(x.dtype), "shape": list(x.shape), "numel": x.numel()}
    real = readable(x)
    if real is None:
        return facts
    finite = torch.isfinite(real)
    bad = ~finite
    facts |= {
        "nan": int(torch.isnan(real).sum()),
        "pos_inf": int((real == torch.inf).sum()),
        "neg_inf": int((real == -torch.inf).sum()),
        "zero": int((real == 0).sum()),
        "negative": int((real < 0).sum()),
    }
    kept = real if not bool(bad.any()) else real[finite]
    if kept.numel():
        magnitude = kept.abs()
        nonzero = magnitude[magnitude > 0]
        facts |= {
            "min": float(kept.min()),
            "max": float(kept.max()),
            "amax": float(magnitude.max()),
            "amin_nonzero": float(nonzero.min()) if nonzero.numel() else None,
        }
    if bool(bad.any()):
        facts["first_bad"] = torch.nonzero(bad)[0].tolist()[: x.dim()]
    return facts


def value_at(x: Tensor, index: list[int], shape: torch.Size) -> float | None:
    """Return an element of ``x`` broadcast to ``shape``; None if that fails, or for complex numbers and integers."""
    real = x if x.dtype is torch.bool else readable(x)
    if real is None or x.dtype.is_complex or len(index) != len(shape):
        return None
    try:
        return float(real.broadcast_to(shape)[tuple(index)])
    except (RuntimeError, IndexError) as error:
        attach.let_through(error)
        return None
