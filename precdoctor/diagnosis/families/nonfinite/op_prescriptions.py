"""The prescription for each cause of a replayed incident: the change, its predicted effect, and the lines to paste.

Causes at the edge of a function's domain are in :mod:`.domain_prescriptions`. Nobody edits the code of an installed
package: there the change is that of the call, or of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from precdoctor.diagnosis.advice.wide_weights import wide_weights
from precdoctor.diagnosis.analyses.bad_data import mend_data
from precdoctor.diagnosis.analyses.op_facts import BadSetting, Poisoned
from precdoctor.diagnosis.claims import finding, snippets
from precdoctor.diagnosis.claims.finding import Phase, Prescription, Source, at_line
from precdoctor.diagnosis.divergence.onset import clip_level, healthy_norms
from precdoctor.diagnosis.families.nonfinite import domain_prescriptions as domains
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import (
    MAY_BE_ROUNDED,
    NOTHING_COUNTED,
    mask_filling,
    too_large_constant,
)
from precdoctor.diagnosis.families.nonfinite.culprit import gradient_scale
from precdoctor.diagnosis.families.nonfinite.incident import Culprit, Incident
from precdoctor.diagnosis.families.nonfinite.safe_operands import double_where, log_of_logits
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP16, FP32, Format

#: Factor over the clip level (twice the usual norm) from which gradients have exploded: the ``norm_factor`` of PD605.
_EXPLODED = 2.0
#: A learning rate from here on is a mistake of its own, of which a tenth is no better: SGD on tiny gradients takes 100.
_ABSURD_RATE = 1000.0
#: The condition that a call's arguments have to meet, by cause.
_CONDITIONS = {
    "division-by-zero": "what {op} divides by must not be 0",
    "optimizer-division-by-zero": "what {op} divides by must not be 0",
    "log-of-nonpositive": "the operand of {op} must be above 0",
    "sqrt-of-negative": "the operand of {op} must not be negative",
    "exp-overflow": "the operand of {op} must be smaller",
    "domain-error": "the operand of {op} must lie where {op} is defined",
    "softmax-fully-masked": "no row may be masked throughout",
    "sqrt-gradient-at-zero": "the operand of {op} must not be 0, where its derivative is infinite",
    "norm-gradient-at-zero": "the operand of {op} must not be 0, where it has no derivative",
    "domain-edge-gradient": "the operand of {op} must not lie where its derivative is infinite",
}


def prescribe(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Return the prescription for the culprit's cause; without one, stop on the first bad value to inspect operands."""
    if culprit.replay.bad_settings:
        return finite_setting(incident, culprit.replay.bad_settings[0])
    remedy = _BY_CAUSE.get(culprit.cause.name or "", domains.stop_and_inspect)
    if remedy is domains.stop_and_inspect and incident.poison is not None:
        return finite_buffer(incident, incident.poison.poisoned[0])
    if remedy is domains.stop_and_inspect and culprit.mask is not None:
        return _mend_mask(view, incident, culprit)
    if culprit.op.in_library and culprit.external is None and culprit.cause.name in _AT_LINE:
        return change_the_call(view, incident, culprit)
    return remedy(view, incident, culprit)


def finite_setting(incident: Incident, setting: BadSetting) -> Prescription:
    """Keep a hyper-parameter finite that a schedule or the script made NaN or infinite."""
    key = setting.name.partition("[")[0]
    return Prescription(
        title=f"compute {setting.words} so that it stays finite up to step {incident.step} and beyond: look for powers "
        "of negative numbers and 0 / 0 at the end of the warm-up and of the schedule",
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


def finite_buffer(incident: Incident, poisoned: Poisoned) -> Prescription:
    """Load a non-finite buffer from a checkpoint, because training never makes it finite again."""
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


def _widen(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Compute the op in a format that holds its exact result; if FP32 does not hold it, clip or lower the rate."""
    reference, narrow = culprit.op.reference, culprit.op.result_format
    reach = reference.amax if reference is not None else None
    too_far = reach is not None and reach >= BF16.overflow_limit  # FP32 ends there as well
    if narrow is not None and (narrow.exponent_bits >= FP32.exponent_bits or too_far):
        return _clip_or_lower_rate(view, incident, culprit)
    if narrow is None or reach is None:
        return domains.stop_and_inspect(view, incident, culprit)
    why = f"the exact result reaches {reach:.4g}, {narrow.name} ends at {narrow.max:g}"
    in_loss = culprit.phase is Phase.LOSS  # FP32 costs little in a loss, and autocast may not cover it
    wide = FP32 if in_loss else BF16
    predicted: dict[str, Any] = {
        "headroom_binades": {"from": round(narrow.headroom(reach), 1), "to": round(wide.headroom(reach), 1)},
        "largest_finite": {"from": narrow.max, "to": wide.max},
    }
    if in_loss:
        name, line = culprit.op.short, "" if culprit.op.in_library else culprit.at_line
        return Prescription(
            title=f"compute {name} in FP32{line}: {why}",
            change={"op": culprit.op.name, "dtype": {"from": narrow.dtype, "to": FP32.dtype}},
            predicted=predicted,
            snippet=f"x = x.float()  # each tensor that {name} reads; in a loss FP32 costs little\n",
        )
    return Prescription(
        title=f"use BF16 in place of {narrow.name}{culprit.at_line}: {why}",
        change={"module": culprit.op.module, "dtype": {"from": narrow.dtype, "to": BF16.dtype}},
        predicted=predicted,
        snippet=snippets.bfloat16_autocast(view.device),
    )


def _clip_or_lower_rate(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Clip if gradients exploded, else lower the learning rate: no format holds values beyond FP32's range."""
    steps = [s for s in view.timeline.get(incident.process, ()) if s.step < incident.step and s.grad_norm]
    norms = [s.grad_norm for s in steps if s.grad_norm is not None and math.isfinite(s.grad_norm)]
    level = clip_level(healthy_norms(steps))
    if not norms or steps[-1].clip_norm is not None or norms[-1] <= _EXPLODED * level:
        if incident.last_finite is None:  # no step has applied the learning rate yet
            return domains.stop_and_inspect(view, incident, culprit)
        return lower_rate(view, incident)
    return Prescription(
        title=f"clip gradients to a norm of {level:.3g} and lower the learning rate: the last finite norm was "
        f"{norms[-1]:.3g}",
        change={"clip_norm": level, "lr_factor": 0.1},
        predicted={"largest_norm": {"from": norms[-1], "to": level}},
        snippet=snippets.lower_rate_and_clip(level),
    )


def lower_rate(view: RunView, incident: Incident) -> Prescription:
    """Divide the learning rate by 10 and clip, for values beyond FP32's range: training diverged."""
    facts = view.step_facts(incident.process, incident.step)
    earlier = [s.lr for s in view.timeline.get(incident.process, ()) if s.step < incident.step and s.lr]
    lr = (facts.lr if facts is not None else None) or (earlier[-1] if earlier else None)
    seen = [s for s in incident.history if s.amax and s.step < incident.step]
    growth = (
        f"amax was {seen[-1].amax:.3g} at step {seen[-1].step}" if seen else "3.4e38 is out of reach of a healthy run"
    )
    to = lr / 10 if lr and lr < _ABSURD_RATE else None
    rates = f" from {lr:.3g} to {to:.3g}" if to else f", which is {lr:.3g}," if lr else ""
    return Prescription(
        title=f"lower the learning rate{rates} and clip: {growth}",
        change={"lr": {"from": lr, "to": to}, "clip_norm": 1.0},
        predicted={"update_binades": -3.3, "resume_from_step": incident.last_finite},
        snippet=snippets.lower_rate_and_clip(),
    )


def _mend_log(view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    if (better := domains.log_target(view, culprit) or log_of_logits(culprit)) is not None:
        return better
    operand = culprit.op.first_operand
    if operand is None:
        return domains.clamp_log("", None, culprit.at_line)
    return domains.clamp_log(operand.dtype, operand.zero + operand.negative, culprit.at_line)


def _mend_mask(_view: RunView, _incident: Incident, culprit: Culprit) -> Prescription:
    """Mask with a finite number, or leave out what is masked before the op that makes something worse of ``-inf``."""
    op, mask = culprit.op, "use -1e4 in place of -inf in the mask"
    if culprit.cause.name == "softmax-fully-masked":
        title, snippet = f"{mask}, so that no row is empty, or leave out fully masked rows", domains.FINITE_MASK
    elif op.short.startswith("nll_loss"):
        title, snippet = f"do not mask the class of the target, or {mask}", "allowed[torch.arange(len(y)), y] = True\n"
    elif op.in_library or culprit.cause.name == "other":
        title = f"{mask}, or leave masked elements out of the sum"
        snippet = "logits = logits.masked_fill(~allowed, -1e4)  # finite in FP16, BF16 and FP32\n"
    else:
        title = f"set masked elements to 0 before {op.short}{culprit.at_line}, or {mask}"
        snippet = (
            "# of each operand that is -inf there; a sum over classes then leaves these out\n"
            "log_probs = log_probs.masked_fill(~allowed, 0.0)\n"
        )
    change = {"mask_value": {"from": "-inf", "to": -1e4}, "module": op.module}
    return Prescription(title=title, change=change, predicted=culprit.predicted_effect, snippet=snippet)


def _step_once(refused: int, incident: Incident) -> Prescription:
    """Drop ``optimizer.step()`` after ``scaler.step()``, which had skipped the gradients at step ``refused``."""
    return Prescription(
        title=f"call only `scaler.step(optimizer)`: at step {refused} the scaler skipped non-finite gradients, and at "
        f"step {incident.step} `optimizer.step()` applied the same ones",
        change={"optimizer_step": {"from": "scaler.step and optimizer.step", "to": "scaler.step"}},
        predicted={"steps_that_reach_the_weights_with_inf": 0, "skipped_step": refused},
        snippet="scaler.step(optimizer)  # and no optimizer.step()\nscaler.update()\n",
    )


def _lower_scale(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Lower the loss scale until the exact gradient fits into FP16, with one binade to spare."""
    facts, before = (view.step_facts(incident.process, s) for s in (incident.step, incident.step - 1))
    if facts is not None and before is not None and before.skipped and not (facts.micro_steps or facts.skipped):
        return _step_once(before.step, incident)
    scale = gradient_scale(view, incident.process, incident.step) or 1.0
    reach = culprit.op.reference.amax if culprit.op.reference is not None else None
    binades = max(1, math.ceil(math.log2(reach / FP16.max)) + 1) if reach and reach > FP16.max else 1
    target = 2.0 ** (math.floor(math.log2(scale)) - binades)
    predicted = {"largest_gradient": {"from": reach, "to": reach * target / scale if reach else None}}
    return lower_scale(view, scale, target, predicted)


def lower_scale(view: RunView, scale: float, target: float, predicted: Mapping[str, Any]) -> Prescription:
    """Lower the loss scale to ``target``."""
    return Prescription(
        title=f"lower the loss scale from {scale:g} to {target:g} and let GradScaler skip what still overflows",
        change={"loss_scale": {"from": scale, "to": target}},
        predicted=predicted,
        snippet=snippets.grad_scaler(view.device, target),
    )


def _drop_data(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    data = culprit.data
    if data is None:
        return domains.stop_and_inspect(view, incident, culprit)
    return mend_data(data, incident.step, prepared=not culprit.replay.made_outside)


def _replace_cast(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    constant = too_large_constant(culprit.op)
    constant = mask_filling(culprit.op) if constant is None else constant
    if constant is None or culprit.op.in_library:
        return _widen(view, incident, culprit)
    return domains.constant_that_fits(constant, culprit)


def _raise_eps(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Make a divisor of 0 in the optimizer nonzero: widen the format that made it or its eps 0, or raise the eps."""
    divisor, eps = culprit.op.divisor, culprit.op.settings.get("eps")
    if divisor is not None and MAY_BE_ROUNDED in culprit.cause.why and not culprit.op.in_library:
        return _divisor_in_float32(culprit, known_format(divisor.dtype) or BF16)
    if (narrow := _narrow_format(culprit)) is not None:
        smallest = {"smallest_eps": {"from": narrow.min_subnormal, "to": FP32.min_subnormal}}
        return weights_in_float32(view, narrow, f"{narrow.name} ends at {narrow.min_subnormal:.3g}", smallest)
    if eps == 0:
        return Prescription(
            title="give the optimizer an eps above 0 (it is 0)",
            change={"eps": {"from": eps, "to": 1e-8}},
            predicted={"resume_from_step": incident.last_finite},
            snippet="optimizer = type(optimizer)(model.parameters(), eps=1e-8)\n",
        )
    if culprit.op.in_library:
        return change_the_call(view, incident, culprit)
    return Prescription(
        title=f"add a small constant to what the optimizer divides by{culprit.at_line}",
        change={"divisor": {"plus": 1e-12}, "op": culprit.op.name},
        predicted={**culprit.predicted_effect, "resume_from_step": incident.last_finite},
        snippet="scale = rho / (norm + 1e-12)  # a gradient of 0 has a norm of 0\n",
    )


def _divisor_in_float32(culprit: Culprit, narrow: Format) -> Prescription:
    """Compute a divisor in FP32 that is 0 in the format ``narrow``; the log does not show its exact value."""
    before, after = (2.0 ** -(fmt.mantissa_bits + 2) for fmt in (narrow, FP32))
    return Prescription(
        title=f"compute the divisor of {culprit.op.short}{culprit.at_line} in FP32, from FP32 numbers: half an ulp "
        f"below 1 {before:.2g} -> {after:.2g}",
        change={"divisor_dtype": {"from": narrow.dtype, "to": FP32.dtype}, "op": culprit.op.name},
        predicted={"half_ulp_below_1": {"from": before, "to": after}},
        snippet=(
            f"# what the divisor is made of must not be in {narrow.dtype}: a step counter, for instance, with which\n"
            "# 1 - beta ** step is 0 if beta rounds to 1\n"
            "step = torch.zeros((), dtype=torch.float32)\n"
        ),
    )


def _widen_optimizer(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Keep an update or a moment in FP32 if its format is too narrow; else lower the rate and clip."""
    if (narrow := _narrow_format(culprit)) is not None:
        largest = {"largest_finite": {"from": narrow.max, "to": FP32.max}}
        return weights_in_float32(view, narrow, f"{narrow.name} ends at {narrow.max:g}", largest)
    return lower_rate(view, incident)


def _narrow_format(culprit: Culprit) -> Format | None:
    """The first format with at most five exponent bits (FP16, FP8) among the op's operands; None without one."""
    return next((f for o in culprit.op.operands if (f := known_format(o.dtype)) and f.exponent_bits <= 5), None)


def weights_in_float32(view: RunView, narrow: Format, reason: str, predicted: Mapping[str, Any]) -> Prescription:
    """Keep weights and optimizer state in FP32 in place of the format ``narrow``."""
    return Prescription(
        title=f"keep weights and optimizer state in FP32 ({reason})",
        change={"weight_dtype": {"from": narrow.dtype, "to": FP32.dtype}},
        predicted=predicted,
        snippet=wide_weights(view, (narrow.dtype,)),
    )


# -- code of installed packages ---------------------------------------------------------------------------------------


def user_line(view: RunView, incident: Incident, culprit: Culprit) -> Source | None:
    """The last line of the user's code on the way to the op; None if the log has none."""
    replay = culprit.replay
    if culprit.op.caller is None and replay.called_by_library:  # the user may have called backward()
        return view.detection(incident.process, incident.step)
    return culprit.op.caller or replay.call


def library_words(view: RunView, incident: Incident, culprit: Culprit) -> str:
    """A sentence if the op's line is in a library, with the last line of the user's code; else empty."""
    if not culprit.op.in_library or culprit.op.source is None:
        return ""
    return finding.library_words(culprit.op.source, user_line(view, incident, culprit))


def change_the_call(view: RunView, incident: Incident, culprit: Culprit) -> Prescription:
    """Change the arguments of the user's call, or the data, because the op's line is in a library."""
    line, made = user_line(view, incident, culprit), culprit.forward_op or culprit.op
    change = {"call": None if line is None else line.place, "module": culprit.op.module}
    if any(words in culprit.cause.why for words in NOTHING_COUNTED):
        return Prescription(
            title="leave out batches in which nothing is counted: labels that are all ignored, a mask without a 1"
            + (f" (called{at_line(line)})" if line is not None else ""),
            change={**change, "filter": "counted"},
            predicted=culprit.predicted_effect,
            snippet=(
                "# where batches are made; -100 is the label that torch and transformers ignore\n"
                "if not (labels != -100).any():\n"
                "    raise ValueError('no label of this batch counts: its loss is 0 / 0')\n"
            ),
        )
    wanted = _CONDITIONS.get(culprit.cause.name or "", "they must be such that {op} stays finite").format(op=made.short)
    return Prescription(
        title=f"change the arguments of the call{at_line(line)} or the data, not the library: {wanted}",
        change=change,
        predicted=culprit.predicted_effect,
        snippet=snippets.halt_on_nonfinite(culprit.op.module or ""),
    )


_Remedy = Callable[[RunView, Incident, Culprit], Prescription]
#: Remedies that edit the op's line, by cause; in the code of an installed package that is none.
_AT_LINE: dict[str, _Remedy] = {
    "log-of-nonpositive": _mend_log,
    "division-by-zero": domains.guard_quotient,
    "exp-overflow": domains.clamp_exponent,
    "sqrt-of-negative": domains.clamp_root,
    "domain-error": domains.into_domain,
    "softmax-fully-masked": _mend_mask,
    "sqrt-gradient-at-zero": domains.eps_inside_root,
    "norm-gradient-at-zero": domains.eps_inside_root,
    "where-gradient-trap": lambda _view, _incident, culprit: double_where(culprit),
    "domain-edge-gradient": lambda _view, _incident, culprit: log_of_logits(culprit) or domains.away_from_pole(culprit),
}
_BY_CAUSE: dict[str, _Remedy] = _AT_LINE | {
    "matmul-overflow": _widen,
    "square-overflow": _widen,
    "reduction-overflow": _widen,
    "cast-overflow": _replace_cast,
    "loss-scale-overflow": _lower_scale,
    "optimizer-division-by-zero": _raise_eps,
    "optimizer-overflow": _widen_optimizer,
    "nonfinite-input-batch": _drop_data,
}
