"""What to do about each cause found at an op: the change, what it would do by the numbers, and the line to paste."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from precdoctor.diagnosis import snippets
from precdoctor.diagnosis.examination import Culprit
from precdoctor.diagnosis.examined import BadSetting, Operand, Poisoned
from precdoctor.diagnosis.finding import Prescription
from precdoctor.diagnosis.incident import Incident
from precdoctor.diagnosis.rows import known_format
from precdoctor.diagnosis.view import RunView
from precdoctor.numerics.formats import BF16, FP32

_Maker = Callable[[RunView, Incident, Culprit], Prescription]


def prescribe(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """One prescription for the cause; where there is no remedy to compute, where to stop and look."""
    if culprit.examined.bad_settings:
        return finite_setting(incident, culprit.examined.bad_settings[0])
    maker = _BY_CAUSE.get(culprit.cause.name or "", _look)
    if maker is _look and incident.poison is not None:
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


def _operand(culprit: Culprit, at: int = 0) -> Operand | None:
    operands = culprit.op.operands
    return operands[at] if -len(operands) <= at < len(operands) else None


def _bad(culprit: Culprit) -> int:
    return sum(r.bad for r in culprit.op.results)


def _line(culprit: Culprit) -> str:
    return f" at {culprit.source.file}:{culprit.source.line}" if culprit.source is not None else ""


def _clamp_log(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand, smallest = _operand(culprit), FP32.min_normal
    at_most_zero = operand.zero + operand.negative if operand is not None else None
    return Prescription(
        title=f"clamp what goes into log at {smallest:.3g}{_line(culprit)}, or work with log-probabilities throughout",
        change={"clamp_min": smallest},
        predicted={
            "values_at_or_below_zero": {"from": at_most_zero, "to": 0},
            "smallest_log": round(math.log(smallest), 1),
        },
        snippet=(
            "import torch\n\n"
            "y = torch.log(x.float().clamp_min(torch.finfo(torch.float32).tiny))  # or log_softmax on the logits\n"
        ),
    )


def _guard_divisor(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand = _operand(culprit, -1)
    fmt = known_format(operand.dtype) if operand is not None else None
    eps = 1e-3 if fmt is not None and fmt.exponent_bits <= 5 else 1e-6
    zeros = operand.zero if operand is not None else None
    return Prescription(
        title=f"add eps {eps:g} to the divisor{_line(culprit)}"
        + (f": below {fmt.min_subnormal:.3g} an eps is 0 in {operand.dtype}" if fmt and operand else ""),
        change={"eps": {"from": 0.0, "to": eps}},
        predicted={"zero_divisors": {"from": zeros, "to": 0}, "nonfinite_elements": {"from": _bad(culprit), "to": 0}},
        snippet=f"y = x / (norm + {eps!r})  # {eps!r} is representable in the divisor's format\n",
    )


def _clamp_exp(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    operand = _operand(culprit)
    fmt = known_format(operand.dtype) if operand is not None else None
    if operand is None or fmt is None or operand.max is None:
        return _look(view, incident, culprit)
    largest = math.floor(math.log(fmt.max))
    return Prescription(
        title=f"clamp what goes into exp at {largest}{_line(culprit)}, or subtract the maximum first (logsumexp)",
        change={"clamp_max": largest},
        predicted={"largest_exponent": {"from": operand.max, "to": largest}, "inf": {"from": _bad(culprit), "to": 0}},
        snippet=f"y = x.clamp(max={largest}).exp()  # exp({largest}) is finite in {fmt.name}\n",
    )


def _shift_domain(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    operand = _operand(culprit)
    lowest = operand.min if operand is not None else None
    return Prescription(
        title=f"clamp the operand of {culprit.op.short} to where it is defined{_line(culprit)}",
        change={"clamp": culprit.op.short},
        predicted={"smallest_operand": {"from": lowest, "to": 1e-12}, "nan": {"from": _bad(culprit), "to": 0}},
        snippet="y = x.clamp_min(1e-12).sqrt()  # rounding alone can push a sum of squares below 0\n",
    )


def _wider(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    result = culprit.op.results[0] if culprit.op.results else None
    reference = culprit.op.reference
    narrow = known_format(result.dtype) if result is not None else None
    reach = reference.amax if reference is not None else None
    if narrow is None or reach is None or narrow.exponent_bits >= FP32.exponent_bits:
        return _look(view, incident, culprit)
    predicted: dict[str, Any] = {
        "headroom_binades": {"from": round(narrow.headroom(reach), 1), "to": round(BF16.headroom(reach), 1)},
        "largest_finite": {"from": narrow.max, "to": BF16.max},
    }
    return Prescription(
        title=f"use BF16 in place of {narrow.name}{_line(culprit)}: the exact result reaches {reach:.4g}, "
        f"{narrow.name} ends at {narrow.max:g}",
        change={"module": culprit.module, "dtype": {"from": narrow.dtype, "to": BF16.dtype}},
        predicted=predicted,
        snippet=snippets.bfloat16_autocast(view.device),
    )


def _mask_value(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    return Prescription(
        title="use -1e4 in place of -inf in the mask, so that no row is empty, or leave fully masked rows out",
        change={"mask_value": {"from": "-inf", "to": -1e4}, "module": culprit.module},
        predicted={"nan": {"from": _bad(culprit), "to": 0}},
        snippet="scores = scores.masked_fill(~mask, -1e4)  # finite in FP16, BF16 and FP32; exp of it is 0\n",
    )


def _inside_root(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    made = culprit.examined.ops.get(culprit.op.forward) if culprit.op.forward is not None else None
    zeros = made.operands[0].zero if made is not None and made.operands else None
    return Prescription(
        title=f"add a small constant inside the root{_line(culprit)}"
        + (f": {zeros:,} elements are exactly 0 there" if zeros else ""),
        change={"eps": {"from": 0.0, "to": 1e-12}, "module": culprit.module},
        predicted={
            "nonfinite_elements": {"from": _bad(culprit), "to": 0},
            "largest_derivative": 0.5 / math.sqrt(1e-12),
        },
        snippet="import torch\n\ny = torch.sqrt(x + 1e-12)  # the derivative at 0 is 5e5, not infinite\n",
    )


def _double_where(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    return Prescription(
        title=f"make the operand safe before the function, not only its result after it{_line(culprit)}",
        change={"module": culprit.module, "pattern": "double where"},
        predicted={"nonfinite_gradients": {"from": _bad(culprit), "to": 0}},
        snippet=(
            "import torch\n\n"
            "safe = torch.where(valid, x, torch.ones_like(x))  # 0 * inf is NaN, so no inf may be computed at all\n"
            "y = torch.where(valid, torch.log(safe), torch.zeros_like(x))\n"
        ),
    )


def _lower_scale(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    facts = view.step_facts(incident.process, incident.step)
    scale = facts.loss_scale if facts is not None and facts.loss_scale else 1.0
    reach = culprit.op.reference.amax if culprit.op.reference is not None else None
    down = max(1, math.ceil(math.log2(reach / 65504.0)) + 1) if reach and reach > 65504.0 else 1
    target = 2.0 ** (math.floor(math.log2(scale)) - down)
    return Prescription(
        title=f"lower the loss scale from {scale:g} to {target:g} and let GradScaler skip what still overflows",
        change={"loss_scale": {"from": scale, "to": target}},
        predicted={"largest_gradient": {"from": reach, "to": reach * target / scale if reach else None}},
        snippet=snippets.grad_scaler(view.device, target),
    )


def _drop_samples(_view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    count = sum(o.bad for o in culprit.examined.batch or culprit.op.operands)
    return Prescription(
        title=f"drop samples that are not finite (the batch of step {incident.step} holds {count:,} such elements)",
        change={"filter": "isfinite"},
        predicted={"nonfinite_elements": {"from": count, "to": 0}},
        snippet=(
            "import torch\n\n"
            "finite = torch.isfinite(batch).flatten(1).all(dim=1)\n"
            "batch, target = batch[finite], target[finite]\n"
        ),
    )


def _fp32_state(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    narrow = next((f for o in culprit.op.operands if (f := known_format(o.dtype)) and f.exponent_bits <= 5), None)
    eps = culprit.op.settings.get("eps")
    if narrow is None:
        return Prescription(
            title=f"give the optimizer an eps above 0 (it is {eps})"
            if eps == 0
            else "lower the learning rate and clip",
            change={"eps": {"from": eps, "to": 1e-8}} if eps == 0 else {"clip_norm": 1.0},
            predicted={"resume_from_step": incident.last_finite},
            snippet="optimizer = type(optimizer)(model.parameters(), eps=1e-8)\n"
            if eps == 0
            else snippets.lower_rate_and_clip(),
        )
    return Prescription(
        title=f"keep weights and optimizer state in FP32 ({narrow.name} ends at {narrow.min_subnormal:.3g})",
        change={"weight_dtype": {"from": narrow.dtype, "to": FP32.dtype}},
        predicted={"smallest_eps": {"from": narrow.min_subnormal, "to": FP32.min_subnormal}},
        snippet=(
            "import torch\n\n"
            "model = model.float()  # FP32 weights and optimizer state\n"
            f"with torch.autocast({view.device!r}, dtype=torch.bfloat16):\n"
            "    loss = compute_loss(model, batch)\n"
        ),
    )


def _look(_view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    return Prescription(
        title=f"stop at `{culprit.module or culprit.examined.root}` on the first bad value and look at what goes in",
        change={"module": culprit.module, "hook": "forward"},
        predicted={"stops_at_step": incident.step, "nonfinite_elements": _bad(culprit)},
        snippet=snippets.halt_on_nonfinite(culprit.module or ""),
    )


_BY_CAUSE: dict[str, _Maker] = {
    "log-of-nonpositive": _clamp_log,
    "division-by-zero": _guard_divisor,
    "exp-overflow": _clamp_exp,
    "sqrt-of-negative": _shift_domain,
    "matmul-overflow": _wider,
    "square-overflow": _wider,
    "reduction-overflow": _wider,
    "cast-overflow": _wider,
    "softmax-fully-masked": _mask_value,
    "sqrt-gradient-at-zero": _inside_root,
    "norm-gradient-at-zero": _inside_root,
    "where-gradient-trap": _double_where,
    "domain-edge-gradient": _double_where,
    "loss-scale-overflow": _lower_scale,
    "optimizer-division-by-zero": _fp32_state,
    "optimizer-overflow": _fp32_state,
    "nonfinite-input-batch": _drop_samples,
}
