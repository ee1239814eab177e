"""FP32 weight gradients that were rounded to a coarse grid on their way: compressed, quantised, cast to FP16 and back.

What FP16 rounds near zero becomes a whole multiple of 2^-24, its smallest subnormal; divided by the workers before and
multiplied by them afterwards, of that many times 2^-24. Sums of products in FP32 do not lie on such a grid, and never
on the same one on every step. The histogram in units of the grid then tells what was rounded to zero, as for a gradient
that is stored in FP16.

Source: ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook`` divides in FP16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.gradient_underflow import examined_steps, lost_magnitude
from precdoctor.diagnosis.survey.rows import Key, TensorRow, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16
from precdoctor.numerics.tail import Tail, flushed_tail

#: Steps on all of which the grid must be the same.
_STEPS = 4
#: Elements of the smallest gradient that is looked at.
_ELEMENTS = 64
#: Counts in ``sum`` and ``sum_sq`` are exact in FP64 up to here.
_EXACT = 2.0**50
_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call", "phase", "dtype", "numel", "order"),
    *("nan", "pos_inf", "neg_inf", "zero", "amax", "amin_nonzero", "sum", "sum_sq", "exp_lo", "exp_hist"),
)


@dataclass
class Gridded:
    """A gradient whose non-zero elements are multiples of ``grid`` on every step."""

    grid: float
    #: Per step: rounded to zero among the intended non-zero elements, at least; and the magnitude that went with them.
    shares: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    worst: tuple[Process, int] = (Process(0, 0), 0)
    worst_share: float = -1.0

    @property
    def share(self) -> float:
        """Rounded to zero, median over steps."""
        return median(self.shares)

    @property
    def lost_share(self) -> float:
        """Of the sum of magnitudes, median over steps."""
        return median(self.lost)


def grid_of(row: TensorRow) -> float | None:
    """The power of two of which all elements are multiples and one is equal to; None where they show none."""
    grid = row.amin_nonzero
    if not grid or math.frexp(grid)[0] != 0.5 or row.bad or None in (row.amax, row.sum, row.sum_sq):
        return None
    counts = (row.amax or 0.0) / grid, abs(row.sum or 0.0) / grid, (row.sum_sq or 0.0) / grid / grid
    return grid if all(c <= _EXACT and c == round(c) for c in counts) else None


def gridded(view: RunView, max_steps: float) -> dict[Key, Gridded]:
    """FP32 weight gradients on one and the same grid on all steps; FP16 autocast's, which PD202 reads, left out."""
    found: dict[Key, Gridded | None] = {}
    steps = examined_steps(view, int(max_steps))
    kinds = ("weight_grad",)
    for record in view.scan_records(_COLUMNS, kinds, steps=steps, where=[("dtype", "in", ("float32",))]):
        row = TensorRow.of(record)
        process = Process(row.rank, row.attempt)
        facts = view.step_facts(process, row.step)
        scaled = facts is not None and (facts.autocast_dtype == FP16.dtype or facts.loss_scale is not None)
        if row.numel < _ELEMENTS or row.zero == row.numel or row.phase == "recompute":
            continue
        grid, known = grid_of(row), found.get(row.key)
        if scaled or grid is None or (row.key in found and (known is None or known.grid != grid)):
            found[row.key] = None
            continue
        _take(found.setdefault(row.key, Gridded(grid)), row, process)
    return {k: g for k, g in found.items() if g is not None and len(g.shares) >= _STEPS}


def _take(gradient: Gridded | None, row: TensorRow, process: Process) -> None:
    if gradient is None:
        return
    tail = _tail(row, gradient.grid)
    share = tail.total / (tail.total + row.numel - row.zero)
    gradient.shares.append(share)
    gradient.lost.append(lost_magnitude(row.histogram.shift(FP16.min_subnormal / gradient.grid), tail))
    if share > gradient.worst_share:
        gradient.worst, gradient.worst_share = (process, row.step), share


def _tail(row: TensorRow, grid: float) -> Tail:
    """What lies below the grid, which is put where FP16's is."""
    return flushed_tail(row.histogram.shift(FP16.min_subnormal / grid), row.zero, FP16)


def finer(view: RunView, key: Key, gradient: Gridded) -> TensorRow | None:
    """The gradient of the module's output, if that is finer than the grid: then the weight's was rounded to it."""
    rows = view.rows(*gradient.worst)
    return next(
        (
            r
            for r in rows
            if r.kind == "grad_output" and r.key[:2] == key[:2] and r.amin_nonzero and r.amin_nonzero < gradient.grid
        ),
        None,
    )


def finding(
    view: RunView, guilty: Mapping[Key, Gridded], limits: tuple[float, float], error_share: float, margin: float
) -> Finding:
    """One, at the gradient that loses most; ``limits`` of the flushed share and of the magnitude lost."""
    key, worst = max(guilty.items(), key=lambda item: item[1].share)
    process, step = worst.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    parameter = ".".join(part for part in (key[1], key[3]) if part)
    made = finer(view, key, worst)
    small = made.amin_nonzero if made is not None else None
    message = (
        f"Every element of the gradient of `{parameter}` is a multiple of {worst.grid:.3g}, 2^{_log2(worst.grid)}, on "
        f"{plural(len(worst.shares), 'step')}, and {percent(row.zero / row.numel)} are zero, although FP32 resolves "
        f"down to 1e-45 and the gradient of the module's output reaches down to {small or 0.0:.3g}: it was rounded on "
        "its way, to FP16 by a hook, or in a compressed reduction. "
        f"At least {percent(worst.share)} of what was not zero was rounded to zero (median, limit "
        f"{percent(limits[0])}), {percent(worst.lost_share)} of its magnitude (limit {percent(limits[1])}). "
        f"{plural(len(guilty), 'gradient')} above the limits."
    )
    return Finding(
        code="PD202",
        name="weight-gradient-underflow",
        severity=Severity.ERROR if worst.share >= error_share else Severity.WARNING,
        confidence=0.85,
        title=f"at least {percent(worst.share)} of the gradient of `{parameter}` is rounded to zero: it is given in "
        f"steps of {worst.grid:.3g}",
        message=message,
        location=Location(row.root, row.module, row.module_class or None, row.kind, Phase.BACKWARD, process.rank, step),
        evidence={
            "flushed_share": worst.share,
            "limit": limits[0],
            "lost_magnitude_share": worst.lost_share,
            "grid": worst.grid,
            "steps_examined": len(worst.shares),
            "tensors": [
                {"root": k[0], "parameter": f"{k[1]}.{k[3]}".strip("."), "flushed_share": g.share}
                for k, g in sorted(guilty.items(), key=lambda item: -item[1].share)[:16]
            ],
            "range": range_evidence(row),
            "path": path_evidence(path_to([r for r in rows if r.kind in ("loss", "grad_output")], row)),
            "confidence_reason": "sums and squares are whole multiples of one power of two on every step; the share is "
            "estimated from the survivors",
        },
        prescriptions=(_prescribe(row, worst, limits[0] / 10.0, margin),),
    )


def _prescribe(row: TensorRow, gradient: Gridded, target: float, margin: float) -> Prescription:
    tail = _tail(row, gradient.grid)
    intended = tail.total + row.numel - row.zero

    def flushed(binades: int) -> float:
        return tail.still_flushed(FP16, 2.0**binades) / intended

    room = math.floor(FP16.headroom((row.amax or 0.0) * FP16.min_subnormal / gradient.grid) - margin)
    binades = next((k for k in range(1, room + 1) if flushed(k) <= target), max(1, room))
    return Prescription(
        title=f"round gradients 2^{binades} times larger: flushed {percent(flushed(0))} -> {percent(flushed(binades))}",
        change={"gradient_scale_when_rounded": {"from": 1.0, "to": 2.0**binades}},
        predicted={"flushed_share": {"from": flushed(0), "to": flushed(binades)}, "overflow": 0},
        snippet=(
            f"scale = 2.0**{binades}\n"
            "(loss * scale).backward()  # what rounds the gradients gets larger ones\n"
            "for p in model.parameters():\n"
            "    if p.grad is not None:\n"
            "        p.grad.div_(scale)  # in FP32, before clipping and the optimizer's step\n"
        ),
    )


def _log2(value: float) -> int:
    return math.frexp(value)[1] - 1
