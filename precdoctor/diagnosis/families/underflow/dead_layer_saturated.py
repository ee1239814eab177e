"""PD203, saturated layers: their output is so large that the tanh or sigmoid after them has a derivative of zero.

tanh(x) is 1 in FP32 from |x| = 9 on, and its derivative, computed as 1 - tanh(x)^2, is zero there (LeCun et al.,
Efficient BackProp, 1998, section 4: start where the sigmoid is linear).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.underflow.dead_layer_stop import training_forward
from precdoctor.diagnosis.survey.rows import Key, TensorRow, gradient_evidence, known_format, location, range_evidence
from precdoctor.diagnosis.survey.view import Process, RunView

#: Number of steps whose rows are read, evenly spread; bounds the work.
_MAX_STEPS = 16
#: Outputs above 2^3 in magnitude count as flat: of the bins of an exponent histogram, this one begins nearest to 9.
_FLAT_BIN = 3
#: A bounded function's result has at least this amax; the bins of its saturated elements begin at 2^-1.
_LEAST_BOUND, _TOP_BIN = 0.99, -1
#: Minimum share of the gradient's zeros that these bins must account for: nearly all. Chosen empirically.
_AT_BOUND = 0.9
#: RMS from which an input counts as not normalised. Chosen empirically: normalised data have 1.
_RAW_RMS = 4.0
#: Maximum share of zeros in the gradient of the function's result, relative to the share in that of its operand; with
#: more, the loss itself gives no gradient.
_ARRIVING = 0.5

#: Root, module, call.
_Place = tuple[str, str, int]


@dataclass
class SaturatedLayer:
    """A layer before a saturated function.

    Attributes:
        zero, flat: for each step on which the function was saturated, the share of zeros in the gradient of the layer's
            output, and the share of the output that is flat.
        steps: number of examined steps on which the layer got a gradient; those of each process count.
        last: process and number of the last step on which the function was saturated.
    """

    zero: list[float] = field(default_factory=list)
    flat: list[float] = field(default_factory=list)
    steps: int = 0
    last: tuple[Process, int] = (Process(0, 0), 0)


def find_saturated_layers(
    view: RunView, steps: Sequence[int], share: float, most: float
) -> dict[_Place, SaturatedLayer]:
    """The layers with weights whose output gradient is zero because the function after them is flat.

    Args:
        share: minimum share of zeros in the output's gradient, and of flat elements in the output.
        most: minimum share of the examined steps on which both hold; a function that saturates late has learnt to.
    """
    chosen = list(steps)[:: max(1, -(-len(steps) // _MAX_STEPS))]
    weighted = {place[:2] for place in view.places("weight")} | {place[:2] for place in view.places("weight_grad")}
    rows = view.measured((), ("grad_output",), columns=("numel", "zero"), steps=chosen)
    rows = rows[(share * rows["numel"] <= rows["zero"]) & (rows["zero"] < rows["numel"])]
    suspects = set(zip(rows["root"], rows["module"], strict=True)) & weighted
    found: dict[_Place, SaturatedLayer] = {}
    for process in view.processes if suspects else ():
        for step in chosen:
            _examine(view.rows(process, step), suspects, share, found, (process, step))
    return {k: s for k, s in found.items() if s.zero and len(s.zero) >= most * s.steps}


def _examine(
    rows: Sequence[TensorRow],
    suspects: set[tuple[str, str]],
    share: float,
    found: dict[_Place, SaturatedLayer],
    at: tuple[Process, int],
) -> None:
    """Add one step of one process (``at``) to the suspects in ``found``."""
    forward = training_forward(rows)
    gradients = {r.key: r for r in rows if r.kind == "grad_output"}
    for i, output in enumerate(forward[:-1]):
        gradient = gradients.get((output.root, output.module, "grad_output", output.name, output.call))
        if output.kind != "output" or gradient is None or output.layer not in suspects:
            continue
        place = (output.root, output.module, output.call)
        layer = found.setdefault(place, SaturatedLayer())
        layer.steps += 1
        zero, flat = gradient.zero / gradient.numel, output.histogram[_FLAT_BIN:].total / output.numel
        if min(zero, flat) >= share and _is_saturated(forward[i + 1], output, zero, gradients):
            layer.zero.append(zero)
            layer.flat.append(flat)
            layer.last = at


def _is_saturated(after: TensorRow, output: TensorRow, zero: float, gradients: Mapping[Key, TensorRow]) -> bool:
    """Whether ``after`` is a function of ``output`` bounded by 1, and at its bound for a share ``zero`` of elements.

    False if the recorded gradient that arrives at ``after`` is itself zero there: then the loss gives none.
    """
    bounded = after.numel == output.numel and after.amax is not None and _LEAST_BOUND <= after.amax <= 1.0
    if not bounded or after.histogram[_TOP_BIN:].total < _AT_BOUND * zero * after.numel:
        return False
    arriving = gradients.get((after.root, after.module, "grad_output", after.name, after.call))
    return after.kind != "output" or arriving is None or arriving.zero < _ARRIVING * zero * arriving.numel


def saturated_finding(rule: Rule, view: RunView, found: Mapping[_Place, SaturatedLayer], limit: float) -> Finding:
    """The finding for all saturated layers, at the one with most zeros in its gradient; ``limit`` is their minimum."""
    (root, module, call), worst = max(found.items(), key=lambda item: median(item[1].zero))
    process, step = worst.last
    rows = view.rows(process, step)
    by_kind = {r.kind: r for r in rows if (r.root, r.module, r.call) == (root, module, call)}
    output, gradient = by_kind["output"], by_kind["grad_output"]
    zero, flat, rms = median(worst.zero), median(worst.flat), output.rms or 1.0
    name = module or root
    raw = _raw_input(rows, output)
    return rule.finding(
        confidence=0.85 if len(worst.zero) >= _MAX_STEPS // 2 else 0.7,
        title=f"{percent(zero)} of the gradient of `{name}` is exactly zero: the function behind it is saturated",
        message=f"{percent(flat)} of the output of `{name}` is larger than {2**_FLAT_BIN} (amax "
        f"{output.amax or 0.0:.3g}, RMS {rms:.3g}), and the function behind it returns its bound, 1. {percent(zero)} "
        f"of the gradient of that output is exactly zero (medians of {plural(len(worst.zero), 'step')} of "
        f"{worst.steps}, limit {percent(limit)}). In FP32, tanh is 1 from 9 on and has no slope there. The layer was "
        "saturated from the beginning, so it has not learnt this.",
        location=location(gradient, Phase.BACKWARD, process, step),
        evidence={
            "zero_share": zero,
            "saturated_share": flat,
            "limit": limit,
            "output_rms": rms,
            "steps_examined": worst.steps,
            **gradient_evidence(rows, gradient),
            "range": range_evidence(output),
            "confidence_reason": "zeros counted in the gradient, sizes in the output, the bound in the tensor after it",
        },
        prescription=_smaller_weights(output, flat) if raw is None else _normalised_input(raw, output, flat),
    )


def _raw_input(rows: Sequence[TensorRow], output: TensorRow) -> TensorRow | None:
    """Return the model's input if the layer is the first to read it and it is too large for usual weights."""
    own = [r for r in rows if r.root == output.root and r.order is not None and r.phase == "train"]
    first = min((r for r in own if r.kind == "output"), key=lambda r: r.order or 0, default=None)
    inputs = [r for r in own if r.kind == "batch" and known_format(r.dtype) is not None]
    largest = max(inputs, key=lambda r: r.rms or 0.0, default=None)
    large = largest is not None and (largest.rms or 0.0) >= _RAW_RMS
    return largest if large and first is output else None


def _after(output: TensorRow, divisor: float) -> float:
    """Return the share of an output that is flat once it is divided by ``divisor``, in whole binades."""
    return output.histogram[_FLAT_BIN + math.floor(math.log2(divisor)) :].total / output.numel


def _normalised_input(raw: TensorRow, output: TensorRow, flat: float) -> Prescription:
    """Normalise the input; smaller weights would keep its offset, and make what differs in it small."""
    rms = raw.rms or 1.0
    after = _after(output, rms)
    return Prescription(
        title=f"normalise the input of the model, RMS {rms:.3g} -> 1: saturated {percent(flat)} -> {percent(after)}",
        change={"input_rms": {"from": rms, "to": 1.0}},
        predicted={"saturated_share": {"from": flat, "to": after}},
        snippet=(
            "mean, std = data.mean(0), data.std(0)  # once, over the training data\n"
            "x = (x - mean) / std.clamp(min=1e-6)  # in training and evaluation\n"
        ),
    )


def _smaller_weights(output: TensorRow, flat: float) -> Prescription:
    divisor = 2 ** max(1, math.ceil(math.log2(output.rms or 1.0)))
    after = _after(output, divisor)
    return Prescription(
        title=f"weights {divisor} times smaller: saturated {percent(flat)} -> {percent(after)}",
        change={"module": output.module, "initial_gain": {"divided_by": divisor}},
        predicted={"saturated_share": {"from": flat, "to": after}},
        snippet=(
            "import torch\n\n"
            f"layer = {module_expression(output.module)}\n"
            "with torch.no_grad():  # before the first step\n"
            f"    layer.weight.div_({divisor})\n"
        ),
    )
