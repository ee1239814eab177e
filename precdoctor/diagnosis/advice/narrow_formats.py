"""Whether a run computes in a narrow format at all; if not, FP32 must not be advised."""

from __future__ import annotations

from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32


def is_narrow(dtype: str) -> bool:
    """Return whether a logged dtype is a floating-point format with a shorter mantissa than FP32."""
    fmt = known_format(dtype)
    return fmt is not None and fmt.mantissa_bits < FP32.mantissa_bits


def computes_narrow(view: RunView) -> bool:
    """Return whether any step ran under autocast, or any recorded tensor has a narrow format."""
    if any(s.autocast_dtype for steps in view.timeline.values() for s in steps):
        return True
    return any(is_narrow(dtype) for dtype in view.survey.totals["dtype"].unique().to_pylist())


def widened(name: str, dtype: str) -> str:
    """Return a Python expression for a tensor in at least FP32: ``x.float()``, or ``x`` if it is not narrow."""
    return f"{name}.float()" if is_narrow(dtype) else name
