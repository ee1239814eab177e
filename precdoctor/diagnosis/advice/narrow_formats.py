"""Whether a run computes in a narrow format at all: to one that does not, FP32 is no advice."""

from __future__ import annotations

from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32


def is_narrow(dtype: str) -> bool:
    """Whether a logged dtype is a floating-point format with a shorter mantissa than FP32."""
    fmt = known_format(dtype)
    return fmt is not None and fmt.mantissa_bits < FP32.mantissa_bits


def computes_narrow(view: RunView) -> bool:
    """Whether a step ran under autocast, or a tensor of a narrow format has rows."""
    if any(s.autocast_dtype for steps in view.timeline.values() for s in steps):
        return True
    return any(is_narrow(dtype) for dtype in view.survey.totals["dtype"].unique().to_pylist())


def widened(name: str, dtype: str) -> str:
    """Python that reads a tensor in FP32 at least: ``x.float()``, or ``x`` where it is as wide already."""
    return f"{name}.float()" if is_narrow(dtype) else name
