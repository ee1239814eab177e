"""PD101: the forward pass made the first NaN or infinity."""

from __future__ import annotations

from precdoctor.diagnosis.analyses.origin import Origin
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, makes_it_fall, same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage
from precdoctor.diagnosis.families.nonfinite.domain_prescriptions import FINITE_MASK, clamp_exp, stop_at
from precdoctor.diagnosis.families.nonfinite.incident import LEAD_TO_NONFINITE, Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_report import check_incidents, confidence_options
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import lower_rate
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, known_format
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP32

PAGE = RulePage(
    finds="""
The module whose forward pass made the first NaN or infinity of a step that ended with a non-finite loss, gradient or
weight. The origin is the first non-finite tensor in execution order that is not excused. Two things excuse a tensor: it
is non-finite in the same way on healthy steps, or it holds nothing but `-inf` and is a mask. A module that turns a mask
into NaN is the origin; the mask is evidence. A mask that only meets a NaN, or an infinity from elsewhere, is no cause.
A mask is no excuse if it holds more `-inf` than ever before and its finite values have reached the format's limit: then
some of them overflowed. If a module's *input* is non-finite although every recorded tensor before it is finite,
functional code made it. The finding then names the module around that code.

If the operands were huge because training had diverged before, the finding leads with that divergence; the op stays the
location. The search goes back over steps: loss, gradient norm, updates against their weights, learning rate of each
parameter group, batch, and weights that something other than an update made four times larger. A root is named only if
a weight was replaced since (an update of 0.3 of its RMS or more), or if the loss falls without bound. Undefined
operations (the log of 0, a division by 0) are never attributed to a divergence.

The rule also reports a forward pass that makes a *buffer* non-finite (a running variance that overflows) while its
outputs, the loss and all gradients stay finite. It names the step, long before an evaluation or a later step shows it.

Calls of a trained model without gradients, as in a validation pass, are judged by what they return. Such a finding is a
warning, because the weights are intact, and information if no sample (entry along the first dimension) is non-finite
throughout, because then it may be padding, or if all that is non-finite is `inf`, a cost beyond a barrier. If the call
only read a weight or buffer that was non-finite, it is an error. Code outside of modules, such as a functional loss, is
not seen in such calls. On a GPU only the calls 1, 2, 4, 8 ... since the last step are read.
""",
    matters="""
Everything downstream of the first NaN is NaN: the loss, every gradient, and, unless the step is skipped, every weight.
Only the origin needs a fix, and only before the optimizer step can the run be saved.
""",
    example="""
Attention logits computed in FP16 without the factor `1/sqrt(d)`: `q @ k.transpose(-2, -1)` exceeds 65504, becomes Inf,
and softmax turns a row of Inf into NaN.

    scores = q @ k.transpose(-2, -1)            # overflows
    scores = (q / d**0.5) @ k.transpose(-2, -1) # does not
""",
    remedy="""
If a value left the format's range (cause `matmul-overflow`, `cast-overflow`, `exp-overflow`, `square-overflow`), run
the module in BF16 or FP32, or scale its operands down before the product. If a row of attention was fully masked, keep
one position open. If no cause is named, stop at the module with the snippet and inspect its inputs. Then resume from a
checkpoint at or before the step that the finding names.
""",
    confidence="""
0.95 if a module's own output is the first non-finite tensor, 0.9 if functional code between two tensors made it. 0.2
less if `--include`/`--exclude` left modules out, 0.2 less without execution order, 0.15 less if a mask is involved and
no cause could be named. PD102, PD103 or PD105 reports a step without recorded tensors; this rule never guesses. A cause
is named only if arithmetic leaves one choice, and carries its own reason. At most 0.85 if the finding leads with a
divergence.
""",
    references=(
        "IEEE 754-2019, section 7 (overflow, invalid operation)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740",
        "docs: concepts, 'Producer and propagator'",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding per incident that begins in the forward pass."""
    return check_incidents(view, RULE, options, _report, FORWARD_KINDS, "forward tensor")


def _report(view: RunView, incident: Incident) -> Report:
    origin = incident.origin
    assert origin is not None, "an incident without recorded tensors is never PD101"
    row, before = origin.row, incident.preceding
    title = f"first non-finite value of the forward pass comes from {origin.maker}{incident.cause.in_brackets}"
    message = incident.held_words(view, row) + incident.preceding_words(row, before)
    usual = max((s.neg_inf_share for s in incident.history), default=0.0) * row.numel
    if row.mask_like and usual:
        message += f" As on healthy steps, {usual:,.0f} -Inf are a mask; the other {row.neg_inf - usual:,.0f} are new."
    if before is not None and before.mask_like:
        message += f" Its input holds a mask with {before.neg_inf:,} -inf, which is legal and not the origin."
    message += incident.cause.sentence + incident.headroom_words + incident.consequence_words
    return Report(title, f"{message} {incident.resume_advice}", _prescribe(view, incident, origin))


def _prescribe(view: RunView, incident: Incident, origin: Origin) -> Prescription:
    row, after = origin.row, origin.after
    if incident.cause.name == "softmax-fully-masked" and after is not None:
        return Prescription(
            title=f"use -1e4 in place of -inf in the mask ({after.neg_inf:,} elements), so that no row is empty",
            change={"mask_value": {"from": "-inf", "to": -1e4}, "module": origin.module},
            predicted={"nan": {"from": row.nan, "to": 0}, "masked": after.neg_inf},
            snippet=FINITE_MASK,
        )
    narrow = known_format(row.dtype)
    if incident.cause.name == "matmul-overflow" and narrow is not None and narrow.exponent_bits >= FP32.exponent_bits:
        return lower_rate(view, incident)
    if narrow is not None and narrow.mantissa_bits <= BF16.mantissa_bits + 3 and after is not None and after.amax:
        wide = BF16 if row.dtype == "float16" else FP32
        before = round(narrow.headroom(after.amax), 1)
        change = {"module": origin.module, "dtype": {"from": row.dtype, "to": wide.dtype}}
        predicted = {
            "input_headroom_binades": {"from": before, "to": round(wide.headroom(after.amax), 1)},
            "largest_finite": {"from": narrow.max, "to": wide.max},
        }
        if wide is BF16:
            title = f"use BF16 autocast: its range ends at {wide.max:.3g}, {narrow.name}'s at {narrow.max:g}"
            return Prescription(title, change, predicted, snippets.bfloat16_autocast(view.device))
        title = f"run `{origin.module or origin.root}` in FP32 (inputs reach {after.amax:.4g})"
        return Prescription(title, change, predicted, snippets.run_in_float32(origin.module, view.device))
    if incident.cause.name == "exp-overflow" and narrow is not None and after is not None and after.amax:
        return clamp_exp(narrow, after.amax, row.inf)
    reach = after.amax if after is not None else None
    return stop_at(incident, origin.module, origin.root, row.non_finite, reach)


RULE = Rule(
    code="PD101",
    name="nonfinite-origin-forward",
    severity=Severity.ERROR,
    triage=Triage.FORWARD,
    page=PAGE,
    options=confidence_options(0.95),
    explains={
        **when(makes_it_fall, "PD301"),
        **when(anywhere, *LEAD_TO_NONFINITE),
        **when(same_module, "PD107", "PD206", "PD705", "PD706"),
    },
    check=check,
)
