"""Judges two uses of data that was rounded: sines and cosines of angles, and differences of running sums in half.

Angles are off by radians. A running sum (for window means, segment sums, box sums) grows along the sequence, and its
rounding with it, while the differences stay as large as the terms. So the differences at the end, which subtract the
largest numbers, are judged apart from those at the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.effects import Effects
from precdoctor.recording.deepscan.scan_facts import Findings, worst
from precdoctor.recording.deepscan.scanned_op import HALF, Call
from precdoctor.recording.ops.tensor_facts import dtype_name

#: Ops that take angles.
TURNS = op_names("sin cos")
#: Errors in radians: from the first on a fact is noted, from the second on an element counts as wrong.
_NOTED, _WRONG = 2.0**-4, 2.0**-3
#: Ops that make a running sum or product.
RUNNING = op_names("cumsum cumprod logcumsumexp")
#: Relative error from which on differences are coarse (L2), and one of them is wrong: no 8-bit format is that coarse.
COARSE = 0.125
#: Differences of at most this share of the larger operand cancel; most of them must.
_CANCELS = 0.125


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


def follow_coarse(findings: Findings, effects: Effects, call: Call, exact: Tensor, known: Tensor, off: Tensor,
                  largest: Tensor, dtype: torch.dtype) -> bool:  # fmt: skip
    """Follow the small differences of the larger half of the operands if they are coarse; return whether they are.

    Args:
        exact: the differences in FP64.
        known: which of them can be judged.
        off: errors of the run's differences.
        largest: magnitudes of the larger operands.
        dtype: the format that rounded the sums.
    """
    if not bool(known.any()):
        return False
    late, size = known & (largest >= largest[known].median()), exact.abs()
    judged = late & (size <= _CANCELS * largest)  # not the differences of the end and the start, which may be few
    if 2 * int(judged.sum()) < int(late.sum()):
        return False
    wrong, noise = judged & (off > COARSE * size), float(off[judged].norm() / size[judged].norm())
    if noise < COARSE or not bool(wrong.any()):
        return False
    seen = call.results[0].detach().double()
    counts = {"wrong": int(wrong.sum()), "of": int(judged.sum()), "largest": float(largest[judged].max())}
    effects.begin(
        "cancellation", findings.event_of(call), noise, call.results[0], torch.where(judged, exact, seen), **counts,
        **worst(wrong, size, seen, exact), dtype=dtype_name(dtype), noise=noise, rounded_before=True,
        running_sum=True,
    )  # fmt: skip
    return True
