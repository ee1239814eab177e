"""What to do about each cause found at an op: the change, what it would do by the numbers, and the line to paste."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.divergence.onset import healthy_norms
from precdoctor.diagnosis.families.nonfinite import domain_prescriptions as edges
from precdoctor.diagnosis.families.nonfinite import optimizer_prescriptions
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import mask_filling, too_large_constant
from precdoctor.diagnosis.families.nonfinite.culprit import Culprit, scale_of_gradients
from precdoctor.diagnosis.families.nonfinite.culprit_words import Maker, bad_of, data_of, line_words, look, operand_of
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.survey.bad_data import drop_samples
from precdoctor.diagnosis.survey.op_facts import BadSetting, Poisoned
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP16, FP32

#: Norms from whose median a usual one is told; with fewer it is the 1 that most recipes clip to.
_ENOUGH_NORMS = 8
#: Times the usual norm: as in ``norm_factor`` of PD605.
_EXPLODED = 4.0


def prescribe(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """One prescription for the cause; where there is no remedy to compute, where to stop and look."""
    if culprit.examined.bad_settings:
        return finite_setting(incident, culprit.examined.bad_settings[0])
    maker = _BY_CAUSE.get(culprit.cause.name or "", look)
    if maker is look and incident.poison is not None:
        return mend_buffer(incident, incident.poison.poisoned[0])
    return maker(view, incident, culprit)


def finite_setting(incident: Incident, setting: BadSetting) -> Prescription:
    """For a hyper-parameter that a schedule, or the script, made NaN or infinite."""
    key = setting.name.partition("[")[0]
    return Prescription(
        title=f"compute {setting.words} so that it stays finite up to step {incident.step} and beyond: look at powers "
        "of negative numbers and quotients of zeros at the end of warm-up and of the schedule",
        change={"parameter_group": setting.group, key: {"from": setting.value, "to": "finite"}},
        predicted={"stops_before_step": incident.step},
        snippet=(
            "import math\n\n"
            "import torch\n\n"
            "# before optimizer.step():\n"
            "for number, group in enumerate(optimizer.param_groups):\n"
            f"    if not all(map(math.isfinite, torch.as_tensor(group[{key!r}]).flatten().tolist())):\n"
            f"        raise ValueError(f'{key} of group {{number}} is not finite')\n"
        ),
    )


def mend_buffer(incident: Incident, poisoned: Poisoned) -> Prescription:
    """For a buffer that nothing in training mends."""
    return Prescription(
        title=f"load `{poisoned.full_name}` from a checkpoint"
        + (f" of step {incident.last_finite} or before" if incident.last_finite is not None else "")
        + ", and check buffers before saving one",
        change={"checkpoint_at_or_before": incident.last_finite, "buffer": poisoned.full_name},
        predicted={"nonfinite_elements": {"from": poisoned.facts.bad, "to": 0}},
        snippet=(
            "import torch\n\n"
            "bad = [n for n, b in model.named_buffers() if b.is_floating_point() and not torch.isfinite(b).all()]\n"
            "if bad:\n    raise ValueError(bad)  # nn.BatchNorm: reset_running_stats() starts them anew\n"
        ),
    )


def _clamp_log(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand, smallest = operand_of(culprit), FP32.min_normal
    at_most_zero = operand.zero + operand.negative if operand is not None else None
    return Prescription(
        title=f"clamp what goes into log at {smallest:.3g}{line_words(culprit)}, or work with log-probabilities "
        "throughout",
        change={"clamp_min": smallest},
        predicted={
            "values_at_or_below_zero": {"from": at_most_zero, "to": 0},
            "smallest_log": round(math.log(smallest), 1),
        },
        snippet=(
            "import torch\n\n"
            "# of a softmax: use log_softmax on the logits instead\n"
            "y = torch.log(x.float().clamp_min(torch.finfo(torch.float32).tiny))\n"
        ),
    )


def _guard_divisor(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand = operand_of(culprit, -1)
    fmt = known_format(operand.dtype) if operand is not None else None
    eps = 1e-3 if fmt is not None and fmt.exponent_bits <= 5 else 1e-6
    zeros = operand.zero if operand is not None else None
    root = culprit.op.short == "rsqrt"  # its divisor cannot be reached, what it takes the root of can
    divided = "torch.rsqrt(x" if root else "x / (norm"
    return Prescription(
        title=f"add eps {eps:g} to {'what goes into rsqrt' if root else 'the divisor'}{line_words(culprit)}"
        + (f": below {fmt.min_subnormal:.3g} an eps is 0 in {operand.dtype}" if fmt and operand else ""),
        change={"eps": {"from": 0.0, "to": eps}},
        predicted={"zero_divisors": {"from": zeros, "to": 0}, "nonfinite_elements": {"from": bad_of(culprit), "to": 0}},
        snippet=f"y = {divided} + {eps!r})  # {eps!r} is representable in the divisor's format\n",
    )


def _shift_domain(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand = operand_of(culprit)
    lowest = operand.min if operand is not None else None
    return Prescription(
        title=f"clamp the operand of {culprit.op.short} to where it is defined{line_words(culprit)}",
        change={"clamp": culprit.op.short},
        predicted={"smallest_operand": {"from": lowest, "to": 1e-12}, "nan": {"from": bad_of(culprit), "to": 0}},
        snippet="y = x.clamp_min(1e-12).sqrt()  # rounding alone can push a sum of squares below 0\n",
    )


def _wider(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    result = culprit.op.results[0] if culprit.op.results else None
    reference = culprit.op.reference
    narrow = known_format(result.dtype) if result is not None else None
    reach = reference.amax if reference is not None else None
    too_far = reach is not None and reach >= BF16.overflow_limit  # the end of FP32 is past it
    if narrow is not None and (narrow.exponent_bits >= FP32.exponent_bits or too_far):
        return _hold_back(view, incident, culprit)
    if narrow is None or reach is None:
        return look(view, incident, culprit)
    predicted: dict[str, Any] = {
        "headroom_binades": {"from": round(narrow.headroom(reach), 1), "to": round(BF16.headroom(reach), 1)},
        "largest_finite": {"from": narrow.max, "to": BF16.max},
    }
    return Prescription(
        title=f"use BF16 in place of {narrow.name}{line_words(culprit)}: the exact result reaches {reach:.4g}, "
        f"{narrow.name} ends at {narrow.max:g}",
        change={"module": culprit.module, "dtype": {"from": narrow.dtype, "to": BF16.dtype}},
        predicted=predicted,
        snippet=snippets.bfloat16_autocast(view.device),
    )


def _hold_back(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """No format holds what leaves FP32's range: where exploding gradients led there, they are clipped."""
    steps = [s for s in view.timeline.get(incident.process, ()) if s.step < incident.step and s.grad_norm]
    norms = [s.grad_norm for s in steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    healthy = healthy_norms(steps)  # with none, what most recipes clip to
    level = median(healthy) if len(healthy) >= _ENOUGH_NORMS else 1.0
    if not norms or steps[-1].clip_norm is not None or norms[-1] <= _EXPLODED * level:
        # Before any step, no learning rate can have done it.
        return look(view, incident, culprit) if incident.last_finite is None else lower_rate(view, incident)
    return Prescription(
        title=f"clip gradients to a norm of {level:.3g} and lower the learning rate: the last finite norm was "
        f"{norms[-1]:.3g}",
        change={"clip_norm": level, "lr_factor": 0.1},
        predicted={"largest_norm": {"from": norms[-1], "to": level}},
        snippet=snippets.lower_rate_and_clip(level),
    )


def lower_rate(view: RunView, incident: Incident) -> Prescription:
    """Values that leave FP32's range are a run that diverged, not a format too narrow."""
    facts = view.step_facts(incident.process, incident.step)
    earlier = [s.lr for s in view.timeline.get(incident.process, ()) if s.step < incident.step and s.lr]
    lr = (facts.lr if facts is not None else None) or (earlier[-1] if earlier else None)
    seen = [s for s in incident.history if s.amax and s.step < incident.step]
    grown = (
        f"amax was {seen[-1].amax:.3g} at step {seen[-1].step}" if seen else "3.4e38 is out of reach of a healthy run"
    )
    return Prescription(
        title=f"lower the learning rate{f' from {lr:.3g} to {lr / 10:.3g}' if lr else ''} and clip: {grown}",
        change={"lr": {"from": lr, "to": lr / 10 if lr else None}, "clip_norm": 1.0},
        predicted={"update_binades": -3.3, "resume_from_step": incident.last_finite},
        snippet=snippets.lower_rate_and_clip(),
    )


def _mask_value(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    return Prescription(
        title="use -1e4 in place of -inf in the mask, so that no row is empty, or leave fully masked rows out",
        change={"mask_value": {"from": "-inf", "to": -1e4}, "module": culprit.module},
        predicted={"nan": {"from": bad_of(culprit), "to": 0}},
        snippet="scores = scores.masked_fill(~mask, -1e4)  # finite in FP16, BF16 and FP32; exp of it is 0\n",
    )


def _double_where(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    if (bounded := edges.bounded_before(culprit)) is not None:
        return bounded
    return Prescription(
        title=f"make the operand safe before the function, not only its result after it{line_words(culprit)}",
        change={"module": culprit.module, "pattern": "double where"},
        predicted={"nonfinite_gradients": {"from": bad_of(culprit), "to": 0}},
        snippet=(
            "import torch\n\n"
            "valid = x > 0  # here, of log: where the function and its gradient are finite\n"
            "safe = torch.where(valid, x, torch.ones_like(x))  # 0 * inf is NaN\n"
            "y = torch.where(valid, torch.log(safe), torch.zeros_like(x))\n"
        ),
    )


def _step_once(refused: int, incident: Incident) -> Prescription:
    return Prescription(
        title=f"leave stepping to `scaler.step(optimizer)` alone: at step {refused} the scaler kept the optimizer from "
        f"gradients that were not finite, and at step {incident.step} `optimizer.step()` was called with the same ones",
        change={"optimizer_step": {"from": "scaler.step and optimizer.step", "to": "scaler.step"}},
        predicted={"steps_that_reach_the_weights_with_inf": 0, "skipped_step": refused},
        snippet="scaler.step(optimizer)  # and no optimizer.step() beside it\nscaler.update()\n",
    )


def _lower_scale(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    facts, before = (view.step_facts(incident.process, s) for s in (incident.step, incident.step - 1))
    if facts is not None and before is not None and before.skipped and not (facts.micro_steps or facts.skipped):
        return _step_once(before.step, incident)
    scale = scale_of_gradients(view, incident.process, incident.step) or 1.0
    reach = culprit.op.reference.amax if culprit.op.reference is not None else None
    down = max(1, math.ceil(math.log2(reach / FP16.max)) + 1) if reach and reach > FP16.max else 1
    target = 2.0 ** (math.floor(math.log2(scale)) - down)
    return Prescription(
        title=f"lower the loss scale from {scale:g} to {target:g} and let GradScaler skip what still overflows",
        change={"loss_scale": {"from": scale, "to": target}},
        predicted={"largest_gradient": {"from": reach, "to": reach * target / scale if reach else None}},
        snippet=snippets.grad_scaler(view.device, target),
    )


def _mend_data(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    data = data_of(culprit)
    return look(view, incident, culprit) if data is None else drop_samples(data, incident.step)


def _off_the_edge(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    quotient = (culprit.op.node or "").startswith(("Div", "Reciprocal"))
    return (_guard_divisor if quotient else edges.off_the_edge)(view, incident, culprit)


def _divisor(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    if "weight_norm" in culprit.op.short:
        return edges.prune_behind_norm(culprit)
    quotient = len(culprit.op.operands) > 1 or culprit.op.short in {"reciprocal", "rsqrt", "pow", "div"}
    averages = not quotient and culprit.op.phase != "backward" and bool(culprit.op.operands)
    averages = averages or any(not o.numel for o in culprit.op.operands)
    return (edges.nothing_to_average if averages else _guard_divisor)(view, incident, culprit)


def _cast(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    constant = too_large_constant(culprit.op)
    constant = mask_filling(culprit.op) if constant is None else constant
    return edges.constant_that_fits(constant, culprit) if constant is not None else _wider(view, incident, culprit)


_BY_CAUSE: dict[str, Maker] = {
    "log-of-nonpositive": _clamp_log,
    "division-by-zero": _divisor,
    "exp-overflow": edges.clamp_exponent,
    "sqrt-of-negative": _shift_domain,
    "domain-error": edges.into_domain,
    "matmul-overflow": _wider,
    "square-overflow": _wider,
    "reduction-overflow": _wider,
    "cast-overflow": _cast,
    "softmax-fully-masked": _mask_value,
    "sqrt-gradient-at-zero": edges.inside_root,
    "norm-gradient-at-zero": edges.norm_as_root,
    "where-gradient-trap": _double_where,
    "domain-edge-gradient": _off_the_edge,
    "loss-scale-overflow": _lower_scale,
    "optimizer-division-by-zero": optimizer_prescriptions.divisor,
    "optimizer-overflow": optimizer_prescriptions.overflow,
    "nonfinite-input-batch": _mend_data,
}
