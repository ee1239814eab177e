"""PD304: a loss scaler in a run that has nothing in FP16."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from precdoctor.diagnosis.analyses.loss_scales import is_dynamic, scaled_steps
from precdoctor.diagnosis.analyses.parameters import recorded_parameters
from precdoctor.diagnosis.claims.finding import Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import location, text
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
A `GradScaler` in a run without any FP16 tensor, weight or autocast region. BF16 has the exponents of FP32: its
gradients do not underflow and need no scale. This is information; once the scaler has skipped steps it is a warning,
because without FP16 those overflows were real.
""",
    matters="""
The scaler costs a pass over all gradients and a wait for the device on every step. Worse, it silently skips any step
with non-finite gradients: in FP16 that is its purpose, in BF16 it hides a fault of the model or the data.
""",
    example="""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()  # scaler from the days of FP16
    scaler.step(optimizer)
""",
    remedy="""
Remove the scaler, or make it with `enabled=False`. If it has skipped steps, first find what made their gradients
non-finite: after the change they will reach the weights.
""",
    confidence="""
0.95; 0.8 if modules were left out of the recording. Not evaluated if rows were dropped.
""",
    references=("PyTorch documentation: Automatic Mixed Precision, BF16 and gradient scaling",),
)
_FP16 = "float16"


def check(view: RunView, options: Options) -> Checked:
    """At most one finding, for the process that skipped most steps."""
    courses = [(p, steps) for p, steps in scaled_steps(view) if is_dynamic(steps)]
    if not courses:
        return Checked.not_applicable("no GradScaler was seen")
    count = max(len(steps) for _, steps in courses)
    if (fp16 := _half_precision(view)) is not None:
        return Checked((), f"the scaler scales {fp16} over {plural(count, 'step')}")
    if view.missing is not None:
        return Checked.indeterminate(f"no FP16 tensor was recorded, but {view.missing}")
    if count < options["min_steps"]:
        return Checked.not_applicable(f"{plural(count, 'scaled step')}: too few")
    process, steps = max(courses, key=lambda item: (sum(s.skipped for s in item[1]), -item[0].rank))
    skipped = [s for s in steps if s.skipped]
    tensors, _ = view.tensor_count(("output", "grad_output", "weight_grad"))
    dtype = next((s.autocast_dtype for s in steps if s.autocast_dtype), None) or "float32"
    last = steps[-1].loss_scale or 0.0
    message = (
        f"Loss scale {last:g} is in force after {plural(len(steps), 'step')}, but none of {plural(tensors, 'tensor')} "
        f"recorded in the forward and backward pass is FP16 (limit 0). The run computes in {dtype}, whose smallest "
        "normal number is 1.2e-38."
    )
    if skipped:
        message += (
            f" The scaler silently skipped {plural(len(skipped), 'step')} (first: {skipped[0].step}): their gradients "
            f"were non-finite at a scale that {dtype} can hold."
        )
    finding = RULE.finding(
        severity=Severity.WARNING if skipped else Severity.INFO,
        confidence=0.8 if view.partial_modules else 0.95,
        title=f"a GradScaler (scale {last:g}) in a {dtype} run, which needs no loss scale",
        message=message,
        location=location(None, Phase.OPTIMIZER, process, skipped[0].step if skipped else steps[0].step),
        evidence={
            "loss_scale": last,
            "fp16_tensors": 0,
            "limit": 0,
            "tensors": tensors,
            "computed_in": dtype,
            "skipped_steps": len(skipped),
            "last_bad_step": steps[-1].step,
            "confidence_reason": "dtypes of all tensors, weights and autocast regions were recorded",
        },
        prescription=Prescription(
            title=f"drop the scaler: scaled steps {len(steps)} -> 0",
            change={"scaler_enabled": {"from": True, "to": False}},
            predicted={"scaled_steps": {"from": len(steps), "to": 0}, "flushed_share": 0.0},
            snippet="loss.backward()\noptimizer.step()  # no scaler.scale, scaler.step, scaler.update\n",
        ),
    )
    return Checked([finding], f"a scaler over {plural(count, 'step')} without FP16")


def _half_precision(view: RunView) -> str | None:
    """What the run has in FP16: ``FP16 autocast``, ``FP16 weights`` or ``FP16 tensors``; None if nothing."""
    for process in view.processes:
        if any(text(a).endswith(f":{_FP16}") for a in view.facts(process).get("autocast") or ()):
            return "FP16 autocast"
        if any(text(p.get("dtype")) == _FP16 for _, p in recorded_parameters(view, process)):
            return "FP16 weights"
    if any(s.autocast_dtype == _FP16 for steps in view.timeline.values() for s in steps):
        return "FP16 autocast"
    totals = view.survey.totals
    kinds = pa.array(["input", "output", "grad_output", "weight_grad", "weight"])
    is_fp16 = pc.and_(pc.is_in(totals["kind"], kinds), pc.equal(totals["dtype"], _FP16))
    return "FP16 tensors" if pc.any(is_fp16).as_py() else None


RULE = Rule(
    code="PD304",
    name="needless-loss-scaler",
    severity=Severity.INFO,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(RuleOption("min_steps", 3.0, "steps", "Minimum number of scaled steps.", minimum=1.0),),
    sampled_steps=False,
    check=check,
)
