"""Layers that drive the tanh or sigmoid behind them where it is flat, so that their gradient is exactly zero.

tanh(x) is 1 in FP32 from |x| = 9 on, and its derivative, computed as 1 - tanh(x)^2, is zero there (LeCun et al.,
Efficient BackProp, 1998, section 4: start where the sigmoid is linear).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import Key, TensorRow, location, path_evidence, path_to, range_evidence, text
from precdoctor.diagnosis.survey.view import Process, RunView

#: Steps whose rows are read, evenly spread.
_STEPS = 16
#: What is larger than 2^3 is flat, as far as an exponent histogram can tell from 9.
_FLAT_BIN = 3
#: What a saturated function gives: its largest magnitude, and the bin of magnitudes above a half.
_LEAST_BOUND, _TOP_BIN = 0.99, -1

#: Root, module, call.
_Place = tuple[str, str, int]


@dataclass
class Saturated:
    """A layer whose output is followed by a bounded function, on the steps where its gradient was zero for that."""

    zero: list[float] = field(default_factory=list)
    flat: list[float] = field(default_factory=list)
    #: Steps looked at on which it got a gradient.
    steps: int = 0
    last: tuple[Process, int] = (Process(0, 0), 0)


def saturated(view: RunView, steps: Sequence[int], share: float, most: float) -> dict[_Place, Saturated]:
    """Layers with weights of whose output gradient ``share`` or more is zero behind a flat function.

    Args:
        view: of the run.
        steps: those that may be looked at.
        share: least part of the output's gradient that is zero, and of the output that is too large.
        most: least part of the steps on which it is so, those at the beginning too: what is learnt saturates late.
    """
    chosen = list(steps)[:: max(1, -(-len(steps) // _STEPS))]
    weighted = {place[:2] for place in view.places("weight")} | {place[:2] for place in view.places("weight_grad")}
    suspects = {
        (text(r["root"]), text(r["module"]))
        for r in view.scan_records(("root", "module", "numel", "zero"), ("grad_output",), steps=chosen)
        if share * int(r["numel"]) <= int(r["zero"]) < int(r["numel"])
    } & weighted
    found: dict[_Place, Saturated] = {}
    for process in view.processes if suspects else ():
        for step in chosen:
            _look(view.rows(process, step), suspects, share, found, (process, step))
    return {k: s for k, s in found.items() if s.zero and len(s.zero) >= most * s.steps}


def _look(
    rows: Sequence[TensorRow],
    suspects: set[tuple[str, str]],
    share: float,
    found: dict[_Place, Saturated],
    at: tuple[Process, int],
) -> None:
    forward = sorted(
        (r for r in rows if r.kind in ("input", "output") and r.order is not None and r.phase == "train"),
        key=lambda r: r.order or 0,
    )
    gradients = {r.key: r for r in rows if r.kind == "grad_output"}
    for i, output in enumerate(forward[:-1]):
        gradient = gradients.get((output.root, output.module, "grad_output", output.name, output.call))
        if output.kind != "output" or gradient is None or (output.root, output.module) not in suspects:
            continue
        place = (output.root, output.module, output.call)
        seen = found.setdefault(place, Saturated())
        seen.steps += 1
        zero, flat = gradient.zero / gradient.numel, output.histogram[_FLAT_BIN:].total / output.numel
        if min(zero, flat) >= share and _flattened(forward[i + 1], output, zero, gradients):
            seen.zero.append(zero)
            seen.flat.append(flat)
            seen.last = at


def _flattened(after: TensorRow, output: TensorRow, zero: float, gradients: Mapping[Key, TensorRow]) -> bool:
    """Whether what follows ``output`` is a function of it with the bound 1, at which a share of ``zero`` lies.

    Where the gradient that arrives there was recorded it must be alive: else the loss gives nothing.
    """
    bounded = after.numel == output.numel and after.amax is not None and _LEAST_BOUND <= after.amax <= 1.0
    if not bounded or after.histogram[_TOP_BIN:].total < 0.9 * zero * after.numel:
        return False
    arriving = gradients.get((after.root, after.module, "grad_output", after.name, after.call))
    return after.kind != "output" or arriving is None or arriving.zero < 0.5 * zero * arriving.numel


def finding(view: RunView, found: Mapping[_Place, Saturated], limit: float) -> Finding:
    """One, at the layer that loses most."""
    (root, module, call), worst = max(found.items(), key=lambda item: median(item[1].zero))
    process, step = worst.last
    rows = view.rows(process, step)
    mine = {r.kind: r for r in rows if (r.root, r.module, r.call) == (root, module, call)}
    output, gradient = mine["output"], mine["grad_output"]
    zero, flat, rms = median(worst.zero), median(worst.flat), output.rms or 1.0
    name = module or root
    binades = max(1, math.ceil(math.log2(rms)))
    after = output.histogram[_FLAT_BIN + binades :].total / output.numel
    return Finding(
        code="PD203",
        name="dead-layer",
        severity=Severity.WARNING,
        confidence=0.85 if len(worst.zero) >= _STEPS // 2 else 0.7,
        title=f"{percent(zero)} of the gradient of `{name}` is exactly zero: the function behind it is saturated",
        message=(
            f"{percent(flat)} of the output of `{name}` is larger than {2**_FLAT_BIN} (amax {output.amax or 0.0:.3g}, "
            f"RMS {rms:.3g}), what follows lies at its bound of 1, and {percent(zero)} of the gradient that comes back "
            f"is exactly zero (medians of {plural(len(worst.zero), 'step')} of {worst.steps}, limit {percent(limit)}): "
            "tanh is 1 in FP32 from 9 on and has no slope there. It has been so from the beginning, so it is no sign "
            "of having learnt."
        ),
        location=location(gradient, Phase.BACKWARD, process.rank, step),
        evidence={
            "zero_share": zero,
            "saturated_share": flat,
            "limit": limit,
            "output_rms": rms,
            "steps_examined": worst.steps,
            "range": range_evidence(output),
            "path": path_evidence(path_to([r for r in rows if r.kind in ("loss", "grad_output")], gradient)),
            "confidence_reason": "zeros counted in the gradient, sizes in the output, the bound in what follows it",
        },
        prescriptions=(
            Prescription(
                title=f"weights {2**binades} times smaller: saturated {percent(flat)} -> {percent(after)}",
                change={"module": module, "initial_gain": {"divided_by": 2**binades}},
                predicted={"saturated_share": {"from": flat, "to": after}},
                snippet=(
                    "import torch\n\n"
                    f"layer = {module_expression(module)}\n"
                    "with torch.no_grad():  # before the first step\n"
                    f"    layer.weight.div_({2**binades})\n"
                ),
            ),
        ),
    )
