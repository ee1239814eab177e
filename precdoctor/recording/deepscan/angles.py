"""Detects sines and cosines of angles that were rounded to half precision, and measures the error in radians."""

from __future__ import annotations

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.scan_facts import Findings
from precdoctor.recording.deepscan.scanned_op import HALF, Call
from precdoctor.recording.ops.tensor_facts import dtype_name

#: Ops that take angles.
TURNS = op_names("sin cos")
#: Errors in radians: from the first on a fact is noted, from the second on an element counts as wrong.
_NOTED, _WRONG = 2.0**-4, 2.0**-3


def note_angles(findings: Findings, call: Call, exact: Tensor, dtype: torch.dtype) -> None:
    """Note an op whose angles are off because they were rounded.

    Args:
        exact: its operand from before the rounding, of the same shape.
        dtype: the format that it was rounded to.
    """
    if dtype not in HALF:
        return
    seen = call.before(call.args[0]).detach().double()
    off = (seen - exact.detach().double()).abs()
    known = torch.isfinite(off)
    error = float(torch.where(known, off, 0.0).max()) if off.numel() else 0.0
    if error >= _NOTED:
        wrong, largest = int((known & (off >= _WRONG)).sum()), float(torch.where(known, seen.abs(), 0.0).max())
        facts = {
            "error": error,
            "wrong": wrong,
            "of": int(known.sum()),
            "largest": largest,
            "rounded_to": dtype_name(dtype),
        }
        findings.add("angle", call, error, **facts)
